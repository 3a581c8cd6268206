"""Files of mutated bytes and structure: opened and read, they give tensors or one CheckpointError, nothing else."""

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.ggufs import gguf
from tests.strategies import examples
from tests.written import write_tensors
from torchtether.files import KEY, replacing

EMB = torch.arange(24.0).reshape(6, 4)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """The bytes of a small file with every kind of record."""
    path = tmp_path_factory.mktemp("valid") / "x.safetensors"
    weight = tt.Weight.encode(torch.randn(4, 8), tt.int4(4))
    named = {"emb": EMB, "head": EMB, "turned": EMB.t(), "rows": EMB[1:3], "w": weight, "wt": weight.t()}
    tt.save({**named, "order": torch.randn(3, 4).t(), "flag": torch.tensor([True])}, path)
    return path.read_bytes()


def open_and_read(path, data):
    """Everything that can be asked of the file; returns whether it was believed."""
    path.write_bytes(data)
    return read_all(path, len(data))


def read_all(path, size):
    """As above, of what is at ``path``; its files have ``size`` bytes in all."""
    try:
        with tt.open(path) as checkpoint:
            for name in checkpoint:
                spec = checkpoint.spec(name)
                tensor = checkpoint[name]
                assert tuple(tensor.shape) == spec.shape
                assert tensor.dtype == spec.dtype
                if isinstance(tensor, tt.Weight):
                    tensor.dequantize()
                else:
                    assert tensor.untyped_storage().nbytes() <= size
                    tensor.clone()
    except tt.CheckpointError as error:
        assert "\n" not in str(error)
        assert path.name.split(".")[0] in str(error)
        return False
    return True


def mutated(valid, edits, cut):
    data = bytearray(valid)
    for where, value in edits:
        data[where % len(data)] = value
    return bytes(data[: len(data) - cut])


EDITS = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4)


@examples(150)
@given(EDITS, st.sampled_from([0, 0, 0, 1, 8, 100]))
def test_mutated_bytes(valid, tmp_path_factory, edits, cut):
    open_and_read(tmp_path_factory.getbasetemp() / "fuzz.safetensors", mutated(valid, edits, cut))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from([2**31, 2**47, 2**48, 2**63, 2**64, 1.5]),
    st.sampled_from(
        ["emb", "head", "w", "w.qdata", "x", "", "float32", "int4", "affine", "plain", "codebook", "00c0ffee"]
    ),
    st.lists(st.integers(0, 9), max_size=3),
    st.just({}),
    st.text(max_size=3),
    st.sampled_from(
        ["../x.safetensors", "\ud800", "F32", "__metadata__", "1e999", "torchtether.storage.x", -1, 2**200]
    ),
)


def paths_in(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths_in(inner, (*path, key))


def edited(record, path, value):
    if not path:
        return value
    made = dict(record) if isinstance(record, dict) else list(record)
    made[path[0]] = edited(made[path[0]], path[1:], value)
    return made


def any_edits(draw, record, count=2):
    """``record`` with up to ``count`` of its values replaced by any other, dropped, or moved to another key."""
    for _ in range(draw(st.integers(1, count))):
        path = draw(st.sampled_from(list(paths_in(record))))
        how = draw(st.sampled_from(["replace", "replace", "replace", "move", "drop"]))
        if how == "replace" or not path:
            record = edited(record, path, draw(VALUES))
        else:
            inside = record
            for step in path[:-1]:
                inside = inside[step]
            kept = dict(inside) if isinstance(inside, dict) else list(inside)
            value = kept.pop(path[-1])
            if how == "move" and isinstance(kept, dict):
                kept[draw(st.sampled_from([*kept, "emb", "x"]))] = value
            elif how == "move":
                kept.append(value)
            record = edited(record, path[:-1], kept)
    return record


def safetensors_file(header, data):
    text = json.dumps(header, ensure_ascii=True).encode()
    return struct.pack("<Q", len(text)) + text + data


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def check_mutated_header(draw, valid, folder):
    """Structure of the header, of our record inside it, or of both."""
    header, data = header_of(valid)
    record = json.loads(header["__metadata__"][KEY])
    if draw(st.booleans()):
        header["__metadata__"] = {**header["__metadata__"], KEY: json.dumps(any_edits(draw, record))}
    else:
        header = any_edits(draw, header)
    open_and_read(folder / "fuzz.safetensors", safetensors_file(header, data))


def check_mutated_shards(draw, shards, folder):
    """The index, its copy of the record, or a shard."""
    for name, data in shards.items():
        (folder / name).write_bytes(data)
    name = draw(st.sampled_from(sorted(shards)))
    if name.endswith(".json"):
        index = json.loads(shards[name])
        if draw(st.booleans()):
            index["metadata"][KEY] = json.dumps(any_edits(draw, json.loads(index["metadata"][KEY])))
        else:
            index = any_edits(draw, index)
        made = json.dumps(index).encode()
    else:
        header, data = header_of(shards[name])
        record = json.loads(header["__metadata__"][KEY])
        header["__metadata__"][KEY] = json.dumps(any_edits(draw, record))
        made = safetensors_file(header, data)
    (folder / name).write_bytes(made)
    read_all(folder, sum(map(len, shards.values())) + len(made))


def check_mutated_pickle(draw, pickled, folder):
    """Instructions of the pickle, or any byte of the archive around it."""
    data = bytearray(pickled)
    start, stop = pickled.index(b"\x80\x02"), pickled.index(b"PK\x03\x04", 8)
    for _ in range(draw(st.integers(1, 4))):
        within = st.integers(start, stop - 1) if draw(st.booleans()) else st.integers(0, len(data) - 1)
        code = draw(st.one_of(st.sampled_from(list(b"cRbq}](t.)0Qhsua\x81\x85\x86\x87")), st.integers(0, 255)))
        data[draw(within)] = code
    open_and_read(folder / "fuzz.pt", bytes(data))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The files of a checkpoint in shards, with a record in each."""
    path = tmp_path_factory.mktemp("shards")
    weight = tt.Weight.encode(torch.randn(4, 8), tt.int8())
    named = {"emb": EMB, "head": EMB, "w": weight, "wt": weight.t(), "order": torch.randn(3, 4).t()}
    tt.save(named, path, max_shard_size=60, aliases="copy")
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope="module")
def pickled(tmp_path_factory):
    """A file by ``torch.save`` with ties, a view and a Weight."""
    path = tmp_path_factory.mktemp("pickled") / "x.pt"
    weight = tt.Weight.encode(torch.randn(4, 8), tt.int8())
    torch.save({"emb": EMB, "head": EMB, "turned": EMB.t(), "w": weight, "wt": weight.t()}, path)
    return path.read_bytes()


CHECKS = {"valid": check_mutated_header, "shards": check_mutated_shards, "pickled": check_mutated_pickle}


@pytest.mark.parametrize("kind", CHECKS)
@examples(60)
@given(data=st.data())
def test_mutated_structure(request, tmp_path_factory, kind, data):
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    CHECKS[kind](data.draw, request.getfixturevalue(kind), folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKS)
@examples(2_000)
@given(data=st.data())
def test_much_mutated_structure(request, tmp_path_factory, kind, data):
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    CHECKS[kind](data.draw, request.getfixturevalue(kind), folder)


@examples(200)
@given(st.data())
def test_mutated_records(valid, tmp_path_factory, data):
    """Any value in the record replaced by any other: sizes, names, schemes, fields."""
    folder = tmp_path_factory.getbasetemp()
    (folder / "valid.safetensors").write_bytes(valid)
    with tt.open(folder / "valid.safetensors") as checkpoint:
        record = json.loads(checkpoint.store.header.metadata[KEY])
        tensors = {key: checkpoint.store.read(key) for key in checkpoint.store.header.tensors}
    for _ in range(data.draw(st.integers(1, 2))):
        record = edited(record, data.draw(st.sampled_from(list(paths_in(record)))), data.draw(VALUES))
    with replacing(folder / "made.safetensors") as (file,):
        write_tensors(file, tensors, {KEY: json.dumps(record)}, name="made")
    open_and_read(folder / "fuzz.safetensors", (folder / "made.safetensors").read_bytes())


@pytest.fixture(scope="module")
def valid_gguf():
    """The bytes of a small GGUF file with pairs of several types and blocks of several sizes."""
    blocks = torch.randint(0, 256, (4 * (34 + 18) + 144,), generator=torch.Generator().manual_seed(0)).byte()
    raw = blocks.numpy().tobytes()
    tensors = [
        ("blk.0.attn_q.weight", (4, 32), "Q8_0", raw[: 4 * 34]),
        ("blk.0.attn_k.weight", (4, 32), "Q4_0", raw[4 * 34 : 4 * 52]),
        ("token_embd.weight", (1, 256), "Q4_K", raw[4 * 52 :]),
        ("output_norm.weight", (24,), "F32", EMB.numpy().tobytes()),
    ]
    pairs = {"general.architecture": "llama", "tokens": ["a", "b"], "scores": [0.5], "general.alignment": 32}
    return gguf(tensors, pairs)


def one_gguf(valid_gguf, tmp_path_factory, edits, cut):
    """Edits are mostly in the header, where every byte means something."""
    edits = [(where % 480 if where % 8 else where, value) for where, value in edits]
    open_and_read(tmp_path_factory.getbasetemp() / "fuzz.gguf", mutated(valid_gguf, edits, cut))


@examples(150)
@given(EDITS, st.sampled_from([0, 0, 0, 1, 8, 100]))
def test_mutated_gguf(valid_gguf, tmp_path_factory, edits, cut):
    one_gguf(valid_gguf, tmp_path_factory, edits, cut)


def test_the_valid_file_is_believed(valid, tmp_path):
    assert open_and_read(tmp_path / "x.safetensors", valid)


def test_the_valid_gguf_is_believed(valid_gguf, tmp_path):
    assert open_and_read(tmp_path / "x.gguf", valid_gguf)


def test_an_index_of_nothing_is_an_error(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": null, "weight_map": {}}')
    assert not read_all(tmp_path, 0)
    with pytest.raises(tt.CheckpointError, match="index.json: the index lists no tensors"):
        tt.open(tmp_path)


def test_every_truncation_is_an_error(valid, tmp_path):
    for length in range(0, len(valid), 7):
        assert not open_and_read(tmp_path / "x.safetensors", valid[:length])
