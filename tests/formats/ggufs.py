"""GGUF files byte by byte, as tests write them: an encoder of its own, so that it shares no mistake with ours."""

import struct

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "IQ2_XXS": 16, "I8": 24, "F64": 28, "BF16": 30}


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(one):
    """A value with its type; (type, bytes) as they are, lists as arrays."""
    if isinstance(one, tuple):
        return struct.pack("<I", one[0]) + one[1]
    if isinstance(one, bool):
        return struct.pack("<IB", 7, one)
    if isinstance(one, int):
        return struct.pack("<II", 4, one)
    if isinstance(one, float):
        return struct.pack("<If", 6, one)
    if isinstance(one, list):
        items = [value(item) for item in one]
        kind = items[0][:4] if items else struct.pack("<I", 4)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(one)) + b"".join(item[4:] for item in items)
    return struct.pack("<I", 8) + text(one)


def info(name, shape, kind, offset):
    sizes = b"".join(struct.pack("<Q", n) for n in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def gguf(tensors=(), pairs=None, *, version=3, alignment=32, counts=None, places=None, magic=b"GGUF"):
    """The bytes of a file. ``tensors``: (name, shape, type number or name, bytes); ``places``: their offsets."""
    tensors = [(n, s, TYPES.get(k, k), raw) for n, s, k, raw in tensors]
    pairs = list((pairs or {}).items()) if not isinstance(pairs, list) else pairs
    count, data, offsets = counts or (len(tensors), len(pairs)), b"", []
    for _, _, _, raw in tensors:
        offsets.append(len(data))
        data += raw + b"\0" * (-len(raw) % alignment)
    head = magic + struct.pack("<IQQ", version, *count)
    head += b"".join(text(key) + value(one) for key, one in pairs)
    for (name, shape, kind, _), offset in zip(tensors, places or offsets, strict=True):
        head += info(name, shape, kind, offset)
    return head + b"\0" * (-len(head) % alignment) + data
