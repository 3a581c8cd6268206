"""The record of ties, weights and strides survives a file, and invalid records are refused."""

import json
import zlib

import pytest
import torch

import torchtether as tt
from tests.written import write_tensors
from torchtether.files import KEY, Record, replacing
from torchtether.files.hub import wanted_weights
from torchtether.geometry.views import View
from torchtether.weights.spec import Tie

F32 = "float32"


def crafted(path, record, tensors=None, flat=None):
    """A file whose record is ``record``."""
    text = record if isinstance(record, str) else json.dumps({"v": 1, **record})
    with replacing(path) as (file,):
        write_tensors(file, tensors or {"a": torch.arange(6.0).reshape(2, 3)}, {KEY: text, **(flat or {})}, name="x")
    return path


def tie(names, view=None, owner_view=None):
    return {"ties": [{"names": names, "views": [owner_view, view], "objects": [True, view is None]}]}


def view(size, stride, offset=0, dtype=F32):
    return {"dtype": dtype, "size": size, "stride": stride, "offset": offset}


def weight(**changes):
    spec = {"shape": [4, 8], "dtype": F32, "scheme": {"kind": "affine"}, "parts": ["qdata", "scale"]}
    return {"weights": {"w": {**spec, **changes}}}


PARTS = {"w.qdata": torch.zeros(4, 8, dtype=torch.int8), "w.scale": torch.ones(4, 1)}

LIES = {
    "not_json": ("{", "not JSON"),
    "list": ("[]", "not an object"),
    "duplicate": ('{"v": 1, "v": 1}', "twice"),
    "deep": ("[" * 200_000, "nested too deeply|not JSON"),
    "version": ('{"v": 2}', "version 2"),
    "field": ({"more": 1}, "version 1 and the fields"),
    "kind": ({"ties": {}}, "'ties' of the torchtether record is not a list"),
    "nan": ('{"v": 1, "weights": {"w": NaN}}', "number NaN"),
    "infinite": ('{"v": 1, "weights": {"w": 1e999}}', "number 1e999"),
    "absent_owner": (tie(["zzz", "b"]), "zzz: .* does not store it"),
    "shadow": (tie(["a", "c"]), "c: the file stores it, the record lists it as an alias of a"),
    "chain": (
        {"ties": [tie(["a", "b"])["ties"][0], tie(["b", "d"])["ties"][0]]},
        "b: the record lists it as the owner|two ties of the record contain",
    ),
    "two_owners": (
        {"ties": [tie(["a", "b"])["ties"][0], tie(["c", "b"])["ties"][0]]},
        "b: two ties of the record contain this name",
    ),
    "empty_name": (tie(["a", ""]), "cannot have this name"),
    "reserved": (tie(["a", "__metadata__"]), "cannot have this name"),
    "hidden": (tie(["a", "torchtether.storage.x"]), "cannot have this name"),
    "one_name": ({"ties": [{"names": ["a"], "views": [None], "objects": [True]}]}, "a tie in the record is invalid"),
    "escape": (tie(["a", "b"], view([7], [1])), "b: the alias ends at byte 28, its owner has 24"),
    "offset": (tie(["a", "b"], view([1], [1], 6)), "b: the alias ends at byte 28"),
    "empty_escape": (tie(["a", "b"], view([0], [1], 7)), "b: the alias ends at byte 28"),
    "huge": (tie(["a", "b"], view([2**40, 2**40], [2**40, 1])), "b: the alias ends at byte"),
    "too_huge": (tie(["a", "b"], view([2**50], [1])), "a tie in the record is invalid"),
    "negative": (tie(["a", "b"], view([2], [-1], 1)), "a tie in the record is invalid"),
    "bool": (tie(["a", "b"], view([True], [1])), "a tie in the record is invalid"),
    "expand": (tie(["a", "b"], view([1000], [0])), "b: the alias of size"),
    "overlap": (tie(["a", "b"], view([2, 2], [1, 1])), "b: the alias of size .* overlaps itself"),
    "rank": (tie(["a", "b"], view([1] * 65, [1] * 65)), "65 dimensions"),
    "dtype": (tie(["a", "b"], view([1], [1], dtype="quint8")), "an alias cannot have dtype torch.quint8"),
    "no_dtype": (tie(["a", "b"], view([1], [1], dtype="nn")), "unknown dtype"),
    "copy": ({"copies": ["c"]}, "c: the record lists it as a copy"),
    "copies": ({"copies": [1]}, "'copies' of the torchtether record has values that are not names"),
    "strides_absent": ({"strides": {"b": [1]}}, "b: the record has strides for it, the file does not store it"),
    "strides_gap": ({"strides": {"a": [4, 1]}}, "a: the strides .* are not dense"),
    "strides_overlap": ({"strides": {"a": [1, 1]}}, "a: the strides .* are not dense"),
    "strides_kind": ({"strides": {"a": "no"}}, "a: the strides 'no'|a: the strides no"),
    "crc_kind": ({"crc32": []}, "'crc32' of the torchtether record is not a dict"),
    "crc_absent": ({"crc32": {"b": "00000000"}}, "b: the record has a checksum for it, the file does not store it"),
    "crc_number": ({"crc32": {"a": 0}}, "a: the checksum '0' is not 8 lower-case hex digits"),
    "crc_short": ({"crc32": {"a": "0000000"}}, "a: the checksum '0000000' is not 8"),
    "crc_long": ({"crc32": {"a": "000000000"}}, "a: the checksum '000000000' is not 8"),
    "crc_upper": ({"crc32": {"a": "0000000A"}}, "a: the checksum '0000000A' is not 8"),
    "crc_line": ({"crc32": {"a": "00000000\n"}}, "a: the checksum .* is not 8"),
    "crc_digits": ({"crc32": {"a": "\u0660" * 8}}, "a: the checksum .* is not 8"),
    "compute_kind": ({"dtypes": ["a"]}, "'dtypes' of the torchtether record is not a dict"),
    "compute_none": ({"dtypes": {"a": None}}, "a: a weight cannot compute in the dtype None"),
    "compute_name": ({"dtypes": {"a": "Tensor"}}, "a: a weight cannot compute in the dtype 'Tensor'"),
    "compute_whole": ({"dtypes": {"a": "int64"}}, "a: a weight cannot compute in the dtype 'int64'"),
    "compute_8_bits": ({"dtypes": {"a": "float8_e4m3fn"}}, "a: a weight cannot compute in the dtype"),
    "no_parts": ({"weights": {"w": {}}}, "w: the record of this weight has no list of parts"),
    "scheme": (weight(scheme={"kind": "nope"}), "w: the record of this weight is invalid: unknown scheme kind 'nope'"),
    "scheme_field": (weight(scheme={"kind": "affine", "bits": "x"}), "w: the record of this weight is invalid"),
    "scheme_type": (weight(scheme={"kind": "affine", "block": 5}), "w: the record of this weight is invalid"),
    "scheme_object": (
        weight(scheme={"kind": "affine", "bits": {"os": "system"}}),
        "w: the record of this weight is invalid",
    ),
    "part_names": (weight(parts=["qdata"]), "w: the record of this weight lists the parts"),
    "part_shape": (weight(shape=[4, 9]), "w: its part 'qdata' is torch.int8"),
    "weight_stride": (weight(stride=[0, 1]), "w: .*the strides .* do not fit the shape"),
    "weight_rank": (weight(shape=[1] * 40, stride=[5] * 40), "w: "),
    "weight_field": (weight(extra=1), "w: the record of this weight has unknown fields: extra"),
    "weight_view": (
        {**weight(), **tie(["w", "b"], view([3, 3], [3, 1]))},
        "b: an alias of size .* neither the permuted weight nor rows",
    ),
    "weight_rows": ({**weight(), **tie(["w", "b"], view([4, 8], [8, 1], 8))}, "b: an alias of size"),
    "part_owner": ({**weight(), **tie(["w.qdata", "b"])}, "w.qdata: the record lists it as the owner"),
    "part_alias": ({**weight(), **tie(["c", "w.scale"])}, "w.scale: "),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_record_that_lies_is_one_error_with_file_and_key(tmp_path, lie):
    record, what = LIES[lie]
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "c": torch.zeros(2, 3), **PARTS}
    crafted(tmp_path / "bad.safetensors", record, tensors)
    with pytest.raises(tt.CheckpointError, match=what) as caught:
        tt.open(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_weight_cannot_lack_a_part(tmp_path):
    crafted(tmp_path / "x", weight(), {"w.qdata": PARTS["w.qdata"]})
    with pytest.raises(tt.CheckpointError, match=r"x: w: its part 'w.scale' is not stored"):
        tt.open(tmp_path / "x")


def test_what_the_record_may_say_is_read(tmp_path):
    crafted(tmp_path / "x", {**weight(), **tie(["a", "b"], view([3, 2], [1, 3]))}, {"a": torch.arange(6.0), **PARTS})
    with tt.open(tmp_path / "x") as checkpoint:
        assert checkpoint["b"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert checkpoint["w"].scheme == tt.int8()
        assert checkpoint.format == "native"
        assert [str(t) for t in checkpoint.ties] == ["a = b (view [3, 2] of it)"]


def test_a_record_and_its_json_are_inverses():
    record = Record(
        (Tie(("a", "b", "c"), (None, None, View(torch.float32, (2,), (1,), 3))),),
        {"w": tt.WeightSpec.of((4, 8), torch.bfloat16, tt.int4(4))},
        {"t": (1, 4)},
        frozenset({"b"}),
        {"t": 0xCBF43926, "a": 5},
        {"x": torch.bfloat16},
    )
    text = record.metadata()[KEY]
    assert text == record.metadata()[KEY]
    assert json.loads(text)["v"] == 1
    assert json.loads(text)["crc32"] == {"a": "00000005", "t": "cbf43926"}
    assert json.loads(text)["dtypes"] == {"x": "bfloat16"}
    assert record.metadata()["b"] == "a"
    assert "c" not in record.metadata()  # the flat pair can only say "all of it"
    assert record.metadata()["format"] == "pt"


def test_flat_pairs_of_other_writers_are_believed_when_asked_and_never_listed(tmp_path):
    with replacing(tmp_path / "x") as (file,):
        write_tensors(file, {"emb": torch.ones(2)}, {"head": "emb", "note": "emb", "free": "text"}, name="x")
    with tt.open(tmp_path / "x") as checkpoint:
        assert list(checkpoint) == ["emb"]
        assert "head" in checkpoint
        assert "free" not in checkpoint
        assert checkpoint["head"].data_ptr() == checkpoint["emb"].data_ptr()
        with pytest.raises(KeyError):
            checkpoint["free"]


# -- shards -----------------------------------------------------------------------------------------------------------


def sharded(folder, changes=None, drop=()):
    emb = torch.arange(8.0).reshape(4, 2)
    tt.save({"emb": emb, "head": emb, "y": torch.ones(2), "z": torch.ones(3, 2)}, folder, max_shard_size=32)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for key, value in (changes or {}).items():
        where, _, name = key.partition("/")
        index[where][name] = value(index[where][name]) if callable(value) else value
    for name in drop:
        del index["weight_map"][name]
    path.write_text(json.dumps(index))
    return folder


SECOND = "model-00002-of-00002.safetensors"

INDEX_LIES = {
    "absent_file": (
        {"weight_map/emb": "model-00009-of-00002.safetensors"},
        (),
        "lists the file model-00009.*, which does not exist",
    ),
    "parent": ({"weight_map/emb": "../x.safetensors"}, (), "emb: the index assigns it to '../x.safetensors'"),
    "absolute": ({"weight_map/emb": "/x.safetensors"}, (), "emb: the index assigns it to"),
    "not_text": ({"weight_map/emb": 5}, (), "emb: the index assigns it to 5"),
    "wrong_shard": ({"weight_map/y": "model-00001-of-00002.safetensors"}, (), "y: the index assigns it to .*00001"),
    "absent_key": ({"weight_map/nope": SECOND}, (), "nope: the index assigns it to .* it is in no shard"),
    "unnamed_key": ({}, ("y",), "y: the index does not list it"),
    "record": ({"metadata/torchtether": '{"v":1}'}, (), "the record in the index differs"),
    "record_checksums": (
        {"metadata/torchtether": lambda text: json.dumps({**json.loads(text), "crc32": {"y": "00000000"}})},
        (),
        "the record in the index differs",
    ),
    "record_lies": ({"metadata/torchtether": "{"}, (), "not JSON"),
}


@pytest.mark.parametrize("lie", INDEX_LIES)
def test_an_index_that_lies_is_one_error(tmp_path, lie):
    changes, drop, what = INDEX_LIES[lie]
    sharded(tmp_path, changes, drop)
    with pytest.raises(tt.CheckpointError, match=what):
        tt.open(tmp_path)


def test_shards_know_the_ties_of_their_owners_and_the_index_all(tmp_path):
    with tt.open(sharded(tmp_path)) as checkpoint:
        assert [str(tie) for tie in checkpoint.ties] == ["emb = head"]
        assert checkpoint["head"].data_ptr() == checkpoint["emb"].data_ptr()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {"emb", "y", "z"}
    assert index["metadata"]["head"] == "emb"
    assert index["metadata"]["total_size"] == 64


def test_each_shard_has_the_checksums_of_its_own_tensors_and_the_index_none(tmp_path):
    with tt.open(sharded(tmp_path)) as checkpoint:
        for file in checkpoint.store.files:
            found = json.loads(file.header.metadata[KEY])["crc32"]
            assert found.keys() == file.header.tensors.keys()
        wanted = {key: zlib.crc32(checkpoint[key].numpy().tobytes()) for key in ("emb", "y", "z")}
        assert checkpoint.store.record.checksums == wanted
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "crc32" not in json.loads(index["metadata"][KEY])


@pytest.mark.parametrize("absent", [1, 2, 3])
def test_without_an_index_the_names_of_the_shards_tell_that_one_is_absent(tmp_path, absent):
    for number in {1, 2, 3} - {absent}:
        tt.save({f"v{number}": torch.ones(2)}, tmp_path / f"model-{number:05d}-of-00003.safetensors")
    with pytest.raises(tt.CheckpointError, match=rf"shard model-0000{absent}-of-00003.safetensors does not exist"):
        tt.open(tmp_path)
    tt.save({f"v{absent}": torch.ones(2)}, tmp_path / f"model-{absent:05d}-of-00003.safetensors")
    assert sorted(tt.open(tmp_path)) == ["v1", "v2", "v3"]


def test_one_tensor_in_two_shards_is_refused(tmp_path):
    for name in ("a", "b"):
        tt.save({"v": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(tt.CheckpointError, match="v: a.safetensors also stores this name"):
        tt.open(tmp_path)


def test_a_folder_that_holds_two_checkpoints_is_not_guessed_at(tmp_path):
    sharded(tmp_path)
    tt.save({"v": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(tt.CheckpointError, match="several checkpoints"):
        tt.open(tmp_path)
    with pytest.raises(
        tt.CheckpointError, match="name: the repository holds several checkpoints: model.safetensors.in"
    ):
        wanted_weights("org/name", tmp_path, [file.name for file in tmp_path.iterdir()])


@pytest.mark.parametrize(
    "others", [["model.safetensors"], ["a-00001-of-00001.safetensors", "a.safetensors.index.json"]]
)
def test_an_index_whose_shards_are_gone_does_not_count(tmp_path, others):
    """transformers' ``save_pretrained`` deletes the shards of an earlier save, and leaves their index."""
    sharded(tmp_path)
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    tt.save({"v": torch.arange(2.0)}, tmp_path / others[0])
    for index in others[1:]:
        (tmp_path / index).write_text(json.dumps({"weight_map": {"v": others[0]}}))
    with tt.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["v"]
        assert checkpoint["v"].tolist() == [0, 1]
    assert wanted_weights("org/name", tmp_path, [file.name for file in tmp_path.iterdir()]) == [*reversed(others)]


@pytest.mark.parametrize("what", ["absent", "empty_folder"])
def test_nothing_there_is_one_error(tmp_path, what):
    with pytest.raises(tt.CheckpointError, match="no such file|holds no safetensors"):
        tt.open(tmp_path / "absent" if what == "absent" else tmp_path)
