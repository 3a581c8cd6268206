"""Files of mutated bytes: opened and read, they give tensors or one CheckpointError, never anything else."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchtether as tt
from torchtether.files import KEY, replacing, write_tensors

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
                    assert tensor.untyped_storage().nbytes() <= len(data)
                    tensor.clone()
    except tt.CheckpointError as error:
        assert "\n" not in str(error)
        return False
    return True


def mutated(valid, edits, cut):
    data = bytearray(valid)
    for where, value in edits:
        data[where % len(data)] = value
    return bytes(data[: len(data) - cut])


EDITS = st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4)


@settings(max_examples=300)
@given(EDITS, st.sampled_from([0, 0, 0, 1, 8, 100]))
def test_mutated_bytes(valid, tmp_path_factory, edits, cut):
    open_and_read(tmp_path_factory.getbasetemp() / "fuzz.safetensors", mutated(valid, edits, cut))


@pytest.mark.slow
@settings(max_examples=20_000)
@given(EDITS, st.sampled_from([0, 0, 0, 1, 8, 100]))
def test_many_mutated_bytes(valid, tmp_path_factory, edits, cut):
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


@settings(max_examples=400)
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


def test_the_valid_file_is_believed(valid, tmp_path):
    assert open_and_read(tmp_path / "x.safetensors", valid)


def test_every_truncation_is_an_error(valid, tmp_path):
    for length in range(0, len(valid), 7):
        assert not open_and_read(tmp_path / "x.safetensors", valid[:length])
