"""Changes to inputs that keep most of their structure: of JSON values, and of the instructions of a pickle."""

import copy
import itertools
import json
import math
import pickletools
import struct

ODD = [
    *(None, True, False, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 64, 128, 2**31, 2**40, 2**48, 2**60, 2**63, 2**64),
    *(
        10**400,
        1.5,
        -0.0,
        1e300,
        math.nan,
        math.inf,
        "",
        "x",
        "4",
        "int4",
        "re:[",
        "\ud800",
        "a\nb",
        "../x.safetensors",
    ),
    *([], {}, [None], [[]], [{}], {"": None}, [1, 2], [-1, 0], [2**40, 2**40], [128, 128], ["x"], [[0, 1], [2]]),
    *("gptq", "awq", "fp8", "group", "channel", "tensor", "float", "Linear", "gemm", "marlin", "float32", "bfloat16"),
    *("affine", "plain", "codebook", "00c0ffee", "F32", "U8", "BF16", "F4", "__metadata__", "torchtether.storage.x"),
]


def change_json(data, random, spare=None):
    """Return ``data`` with some of its values replaced, dropped, doubled, moved or taken from ``spare``.

    ``None`` if it is no JSON.
    """
    try:
        value, spare = json.loads(data), json.loads(spare or data)
    except (ValueError, RecursionError):
        return None
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        value = _changed(value, random, spare)
    return json.dumps(value, ensure_ascii=random.random() < 0.9).encode("utf-8", "surrogatepass")


def _changed(value, random, spare):
    if not isinstance(value, (dict, list)) or not value or random.random() < 0.07:
        return _replaced(value, random, spare)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key, how = random.choice(keys), random.random()
    if how < 0.75:
        value[key] = _changed(value[key], random, spare)
    elif how < 0.85:
        del value[key]
    elif isinstance(value, list):
        value.insert(random.randrange(len(value) + 1), value[key])
    elif how < 0.95:
        name = random.choice((*keys, "x", "", f"{key}.{random.choice(keys)}", f"{key}_scale", "weight"))
        value[name] = value.pop(key) if random.random() < 0.5 else value[key]
    else:
        other = random.choice(keys)
        value[key], value[other] = value[other], value[key]
    return value


def _replaced(value, random, spare):
    how = random.random()
    if how < 0.15 and type(value) is int:
        return value + random.choice((-1, 1, -8, 8, value, -value - 1))
    if how < 0.25 and isinstance(value, str) and value:
        at = random.randrange(len(value))
        return value[:at] + random.choice(("", ".", "*", "\\", "(", "9" * 30, "\u0660", value)) + value[at + 1 :]
    if how < 0.3:
        return random.choice(([value], {"x": value}, str(value), [value] * 3))
    if how < 0.5:
        return copy.deepcopy(_some(spare, random))
    return copy.deepcopy(random.choice(ODD))


def _some(value, random):
    """Return some value in ``value``."""
    while isinstance(value, (dict, list)) and value and random.random() < 0.8:
        value = random.choice(list(value.values()) if isinstance(value, dict) else value)
    return value


def change_pickle(data, random, spare=None):
    """Return ``data`` with some of its instructions dropped, doubled, moved, or with other arguments.

    ``None`` if it is no pickle.
    """
    made = _instructions(data)
    if len(made) < 2:
        return None
    others = _instructions(spare) if spare else made
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        at, how = random.randrange(len(made)), random.random()
        size = random.choice((1, 1, 1, 2, 4, 8))
        if how < 0.2:
            del made[at : at + size]
        elif how < 0.6 and others:
            start = random.randrange(len(others))
            made[at : at + random.choice((0, size))] = others[start : start + size]
        elif how < 0.7:
            made[at:at] = [random.choice(_ALONE)]
        else:
            made[at] = _other_argument(made[at], random)
        made = made or [b"."]
    return b"".join(made)


_ALONE = [code.code.encode("latin-1") for code in pickletools.opcodes if code.arg is None] + [
    b"K\0",
    b"J\xff\xff\xff\xff",
    b"\x8a\x09" + b"\xff" * 8 + b"\0",
    b"r\xff\xff\xff\x7f",
    b"h\0",
    b"G" + struct.pack(">d", math.nan),
]


def _instructions(data):
    """Return the instructions, each as its bytes; what comes after a damaged one as one more."""
    ends = [0]
    try:
        ends += [at for _, _, at in pickletools.genops(data)]
    except Exception:  # whatever the module raises of a damaged one
        ends.append(len(data))
    ends = sorted({*ends, len(data)})
    return [data[start:stop] for start, stop in itertools.pairwise(ends)]


def _other_argument(instruction, random):
    if len(instruction) < 2:
        return instruction
    changed = bytearray(instruction)
    at = random.randrange(1, len(changed))
    changed[at] = random.choice((0, 1, 2, 0x7F, 0x80, 0xFF, random.randrange(256)))
    return bytes(changed)


CHANGES = {"json": change_json, "pickle": change_pickle}
