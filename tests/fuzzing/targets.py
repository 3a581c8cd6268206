"""Targets of fuzzing: for each reader, valid inputs, and a function of bytes that returns or raises one of our errors.

An input is as small as the reader allows: JSON text if that is the untrusted part, the instructions of a pickle without
their archive, the changes to a sample if a format is recognised by many files. All of them are in memory, or in files
on tmpfs.
"""

import atexit
import functools
import io
import json
import os
import re
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import torchtether as tt
from tests.formats.ggufs import gguf as gguf_bytes
from torchtether.files import DTYPES, KEY, DcpFile, Record, Store, read_beside
from torchtether.files.header import parse_header
from torchtether.files.index import parse_index
from torchtether.files.opening import SINQ_SETTINGS
from torchtether.files.record import parse_record
from torchtether.formats import Contents, recognise
from torchtether.weights.weight import Weight

GOLDEN = Path(__file__).parent.parent / "golden"
LARGEST = 2**20
"""Bytes of a tensor that an input may describe without having them."""


class Skip(Exception):
    """Says that an input is none of this target."""


@dataclass(frozen=True)
class Target:
    """``run`` raises TetherError at most; ``kind`` says how inputs are mutated: as JSON, as a pickle, or as bytes."""

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    kind: str = "bytes"


def check(target, data):
    """Run one input; raise whatever a reader must not raise. Return whether it was believed."""
    try:
        target.run(data)
    except Skip:
        return False
    except tt.TetherError as error:
        text = str(error)
        assert "\n" not in text, text
        assert len(text) < 2_000 + 2 * len(data), text[:1000]
        text.encode()
        return False
    return True


@functools.cache
def folder():
    """A folder in memory where there is one, gone when the process ends."""
    made = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def put(name, data):
    path = folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def read_store(path):
    """Open files as a checkpoint does, and read every tensor."""
    with Store(path) as store:
        for key, stored in store.header.tensors.items():
            assert stored.nbytes <= LARGEST
            tensor = store.read(key)
            assert (tuple(tensor.shape), tensor.dtype) == (stored.shape, stored.dtype)
        for name, spec in store.record.weights.items():
            Weight({part: store.read(f"{name}.{part}") for part in spec.scheme.layout(spec.base)}, spec).dequantize()


# -- our own files ----------------------------------------------------------------------------------------------------


@functools.cache
def states():
    """State dicts with one kind of record each, as small as they can be: small inputs are many inputs."""
    emb, weight = torch.arange(24.0).reshape(6, 4), Weight.encode(torch.ones(4, 8), tt.int4(4))
    whole = torch.arange(9.0)
    return [
        {"flag": torch.tensor([True])},
        {"emb": emb, "head": emb, "turned": emb.t(), "rows": emb[1:3]},
        {"w": weight, "wt": weight.t()},
        {"order": torch.ones(3, 4).t(), "a": whole[:5], "b": whole[4:]},
    ]


def all_states():
    return {name: tensor for state in states() for name, tensor in state.items()}


def saved(state):
    """The text of the header of a file of ``state``, and the header."""
    path = folder() / "valid.safetensors"
    tt.save(state, path)
    data = path.read_bytes()
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    return text.strip(), parse_header(text, len(data), name="valid")


@functools.cache
def stored():
    return saved(all_states())[1].tensors


def records():
    return [saved(state)[1].metadata[KEY] for state in states()]


_STOPS = re.compile(rb"(\d{1,9})\s*\]")


def header(data):
    """The file is as long as the header wants, if it wants one length."""
    size = 8 + len(data) + max(map(int, _STOPS.findall(data)), default=0)
    found = parse_header(data, size, name="x")
    for key, stored in found.tensors.items():
        assert stored.start + stored.nbytes <= size, key
    if KEY in found.metadata:
        parse_record(found.metadata[KEY], found.tensors, name="x")


def record(data):
    parse_record(data.decode("utf-8", "replace"), stored(), name="x").metadata()


def index(data):
    found = parse_index(put("x.safetensors.index.json", data))
    assert all(file.parent == folder() for file in found.files)
    if isinstance(found.metadata.get(KEY), str):
        parse_record(found.metadata[KEY], stored(), name="x")


def beside(data):
    put("beside/config.json", data)
    contents = Contents(stored(), {}, Record(), read_beside(folder() / "beside"), read_nothing)
    recognise(contents)


def read_nothing(key):
    raise tt.errors.CheckpointError("it is not there", name=key)


def index_seeds():
    shards = {"emb": "a-1.safetensors", "order": "a-2.safetensors"}
    ours = {KEY: records()[1], "total_size": 3, "torchtether.headers": {"a-1.safetensors": "00"}}
    return [json.dumps({"metadata": m, "weight_map": shards}).encode() for m in (ours, {"total_size": 1.5}, None)]


def beside_seeds():
    """The configs of the formats that config.json announces, without any of their tensors."""
    return [path.read_bytes() for path in sorted(GOLDEN.glob("*/config.json"))]


# -- other containers -------------------------------------------------------------------------------------------------


def gguf(data):
    read_store(put("x.gguf", data))


def gguf_seeds():
    raw = bytes(range(256)) * 4
    tensors = [
        ("blk.0.attn_q.weight", (4, 32), "Q8_0", raw[: 4 * 34]),
        ("token_embd.weight", (1, 256), "Q4_K", raw[:144]),
        ("output_norm.weight", (24,), "F32", raw[:96]),
    ]
    pairs = {"general.architecture": "llama", "tokens": ["a", "b"], "scores": [0.5], "general.alignment": 32}
    return [gguf_bytes(tensors, pairs), gguf_bytes([], {"x": True}), gguf_bytes(tensors[2:], {}, version=2)]


def gguf_parts(data):
    """The two parts of a file, one after the other in ``data``; rules for its names, too."""
    at = data.find(b"GGUF", 1)
    first, second = (data, b"") if at < 0 else (data[:at], data[at:])
    put("x-00002-of-00002.gguf", second)
    path = put("x-00001-of-00002.gguf", first)
    read_store(path)
    tt.gguf_names(path)


def gguf_parts_seeds():
    made = []
    for family in ("llama", "gemma2", "qwen3moe"):
        pairs = {"general.architecture": family, f"{family}.attention.head_count": 2, f"{family}.expert_count": 2}
        heads = [(f"blk.0.attn_{one}.weight", (4, 32), "Q8_0", bytes(range(136))) for one in "qk"]
        others = [(f"blk.0.{one}.weight", (2, 2), "F32", bytes(16)) for one in ("ffn_gate_exps", "ffn_up_exps")]
        parts = [
            gguf_bytes(some, {**(pairs if number == 0 else {}), "split.no": number, "split.count": 2})
            for number, some in enumerate([heads, others])
        ]
        made.append(b"".join(parts))
    return made


def saved_by_torch(state):
    made = io.BytesIO()
    torch.save(state, made)
    return made.getvalue()


def pickle_in(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


@functools.cache
def archive_without_pickle():
    """What ``torch.save`` writes beside its pickle."""
    kept = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved_by_torch(all_states()))) as given, zipfile.ZipFile(kept, "w") as made:
        for entry in given.infolist():
            if entry.filename != "archive/data.pkl":
                made.writestr(entry.filename, given.read(entry))
    return kept.getvalue()


def pickled(data):
    """The instructions of a pickle, in an archive that is right."""
    file = io.BytesIO(archive_without_pickle())
    with zipfile.ZipFile(file, "a") as made:
        made.writestr("archive/data.pkl", data)
    read_store(put("x.pt", file.getvalue()))


def pickle_seeds():
    parameter = {"b": torch.nn.Parameter(torch.ones(2, 3)), "q": torch.ones(3, dtype=torch.bfloat16)}
    training = {"model": {"a": torch.ones(2)}, "epoch": 3, "optimizer": {"state": {0: (1.5, None, [b"x"])}}}
    return [pickle_in(saved_by_torch(state)) for state in (*states(), parameter, training)]


def archive(data):
    """The bytes of the archive around it."""
    read_store(put("y.pt", data))


def archive_seeds():
    return [saved_by_torch({"a": torch.ones(2), "b": torch.ones(1, dtype=torch.int8)})]


@functools.cache
def dcp_files():
    """A folder by torch.distributed.checkpoint, and what its .metadata is."""
    path = folder() / "dcp"
    state = {"a": torch.ones(6, 4), "nested": {"b": torch.ones(3).to(torch.bfloat16), "epoch": 7}, "z": torch.ones(())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path, (path / ".metadata").read_bytes()


def dcp_metadata(data):
    path, _ = dcp_files()
    (path / ".metadata").write_bytes(data)
    with DcpFile(path) as file:
        for key, stored in file.header.tensors.items():
            if stored.nbytes <= LARGEST:
                file.read(key)


# -- formats ----------------------------------------------------------------------------------------------------------


SIDES = ("quanto_qmap.json", SINQ_SETTINGS)


class Sample:
    """A folder of tests/golden in memory, and a JSON object of all that a stranger may write differently in it."""

    def __init__(self, path):
        data = (path / "model.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:start])
        metadata = {key: opened(text) for key, text in entries.pop("__metadata__", {}).items()}
        self.data = {key: data[start:][slice(*one["data_offsets"])] for key, one in entries.items()}
        texts = {key: json.loads(raw) for key, raw in self.data.items() if raw[:1] == b"{"}
        config = json.loads((path / "config.json").read_text()) if (path / "config.json").exists() else {}
        kept = {name: json.loads((path / name).read_text()) for name in SIDES if (path / name).exists()}
        self.seed = {
            "sample": path.name,
            "beside": {"config.json": config, **kept},
            "metadata": metadata,
            "tensors": {key: [one["dtype"], one["shape"]] for key, one in entries.items()},
            "texts": texts,
        }


def opened(text):
    """What JSON text says, so that its values are mutated too; other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@functools.cache
def sample_of(name):
    return Sample(GOLDEN / name)


@dataclass
class Fake:
    """A checkpoint that an input describes: as many bytes as it wants, those of the sample over and over."""

    given: dict
    sample: Sample
    tensors: dict = field(default_factory=dict)

    def __post_init__(self):
        wanted, texts = self.given.get("tensors"), self.given.get("texts")
        if not isinstance(wanted, dict) or not isinstance(texts, dict):
            raise Skip
        self.texts = {key: json.dumps(value).encode() for key, value in texts.items()}
        entries, at = {}, 0
        for key, one in wanted.items():
            code, shape = one if isinstance(one, list) and len(one) == 2 else (None, None)
            if key in self.texts:
                code, shape = "U8", [len(self.texts[key])]
            counts = (
                shape if isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**20 for n in shape) else None
            )
            if counts is None or not isinstance(code, str) or code not in DTYPES:
                raise Skip
            nbytes = int(torch.Size(counts).numel()) * DTYPES[code].itemsize // (2 if code == "F4" else 1)
            if nbytes > LARGEST:
                raise Skip
            entries[key] = {"dtype": code, "shape": counts, "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(entries).encode()
        self.tensors = parse_header(text, 8 + len(text) + at, name="x").tensors

    def read(self, key):
        stored = self.tensors[key]
        raw = self.texts.get(key) or self.sample.data.get(key) or b"\1\2\3\4"
        raw = (raw * (stored.nbytes // len(raw) + 1))[: stored.nbytes]
        made = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return made.view(stored.dtype).view(stored.shape)


_SEEN = set()
"""Entries that have been unpacked: the same roles of the same sample in the same layout give the same values."""


def format(data):
    """Recognise what a stranger's files say, and unpack each weight that is found without a fault."""
    given = opened(data)
    if not isinstance(given, dict) or not isinstance(given.get("sample"), str) or "/" in given["sample"]:
        raise Skip
    sample = sample_of(given["sample"]) if given["sample"] in samples() else None
    if sample is None or not isinstance(given.get("metadata"), dict) or not isinstance(given.get("beside"), dict):
        raise Skip
    fake = Fake(given, sample)
    metadata = {key: one if isinstance(one, str) else json.dumps(one) for key, one in given["metadata"].items()}
    files = {name: one for name, one in given["beside"].items() if isinstance(one, dict)}
    found_record = parse_record(metadata[KEY], fake.tensors, name="x") if KEY in metadata else Record()
    made, found, entries = recognise(Contents(fake.tensors, metadata, found_record, files, fake.read))
    assert all("\n" not in what and what.encode() for what in found.faults.values())
    for name, entry in entries.items():
        assert name not in found.faults
        layouts = tuple((role, fake.tensors[key]) for role, key in entry.keys.items())
        if entry.spec is None or (what := hash(repr((given["sample"], entry, layouts)))) in _SEEN:
            continue
        _SEEN.add(what)
        weight = Weight(made.unpack(entry, {role: fake.read(key) for role, key in entry.keys.items()}), entry.spec)
        values = weight.dequantize()
        assert (tuple(values.shape), values.dtype) == (entry.shape, entry.dtype)
    if len(_SEEN) > 2**20:
        _SEEN.clear()


@functools.cache
def samples():
    return {path.parent.name for path in GOLDEN.glob("*/model.safetensors")}


def format_seeds(prefix):
    return [json.dumps(sample_of(name).seed).encode() for name in sorted(samples()) if name.startswith(prefix)]


TARGETS = {
    "header": Target(header, lambda: [saved(state)[0] for state in states()], "json"),
    "record": Target(record, lambda: [text.encode() for text in records()], "json"),
    "index": Target(index, index_seeds, "json"),
    "beside": Target(beside, beside_seeds, "json"),
    "gguf": Target(gguf, gguf_seeds),
    "gguf parts": Target(gguf_parts, gguf_parts_seeds),
    "pickle": Target(pickled, pickle_seeds, "pickle"),
    "archive": Target(archive, archive_seeds),
    "dcp": Target(dcp_metadata, lambda: [dcp_files()[1]], "pickle"),
} | {
    name: Target(format, functools.partial(format_seeds, prefix), "json")
    for name, prefix in {
        "awq": "awq_",
        "bitsandbytes": "bnb_",
        "comfy": "comfy_",
        "compressed-tensors": "ct_",
        "fp8": "fp8_",
        "gptq": "gptq_",
        "hqq": "hqq_",
        "mlx": "mlx_",
        "modelopt": "modelopt_",
        "mxfp4": "mxfp4_",
        "quanto": "quanto_",
        "quark": "quark_",
        "sinq": "sinq_",
        "torchao": "torchao_",
    }.items()
}
