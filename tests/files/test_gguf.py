"""GGUF files: reading them, and refusing damaged ones with file and key."""

import json
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.formats.ggufs import gguf, text
from torchtether.files import PAIRS, Store

ONES = struct.pack("<6f", *[1.0] * 6)
PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
}


def written(folder, data, name="x.gguf"):
    (folder / name).write_bytes(data)
    return folder / name


def refused(path):
    with pytest.raises(tt.CheckpointError) as caught:
        Store(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    kind=st.sampled_from(sorted(PLAIN)),
    version=st.sampled_from((2, 3)),
    alignment=st.sampled_from((8, 32, 128)),
    seed=st.integers(0, 99),
)
def test_floats_and_integers_come_as_they_are(shape, kind, version, alignment, seed, tmp_path_factory):
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(9).to(PLAIN[kind])
    raw = made.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    first = ("first", (2, 3), "F32", ONES)
    pairs = {"general.alignment": alignment}
    data = gguf([first, ("w", shape, kind, raw)], pairs, version=version, alignment=alignment)
    with tt.open(written(tmp_path_factory.mktemp("gguf"), data)) as checkpoint:
        assert torch.equal(checkpoint["w"], made)
        assert torch.equal(checkpoint["first"], torch.ones(2, 3))
        assert checkpoint.format == "gguf"


def test_pairs_of_every_type_are_passed_and_scalars_kept(tmp_path):
    numbers = {f"n{kind}": (kind, struct.pack(f"<{code}", 1)) for kind, code in enumerate("BbHhIi")}
    more = {
        "Q": (10, struct.pack("<Q", 2**63)),
        "q": (11, struct.pack("<q", -5)),
        "d": (12, struct.pack("<d", 0.5)),
    }
    arrays = {"tokens": ["a", "bé", ""], "scores": [0.5, 1.0], "nested": [[1, 2], [3]], "flags": [True], "none": []}
    pairs = {**numbers, **more, **arrays, "flag": True, "general.architecture": "llama", "eps": 0.25}
    with Store(written(tmp_path, gguf([("w", (2, 3), "F32", ONES)], pairs))) as store:
        kept = json.loads(store.header.metadata[PAIRS])
        assert torch.equal(store.read("w"), torch.ones(2, 3))
    assert kept == {
        **dict.fromkeys(numbers, 1),
        "Q": 2**63,
        "q": -5,
        "d": 0.5,
        "flag": True,
        "general.architecture": "llama",
        "eps": 0.25,
    }


def test_magic_or_suffix_decides(tmp_path):
    data = gguf([("w", (2, 3), "F32", ONES)])
    for name in ("x.gguf", "x.bin2", "model"):
        with tt.open(written(tmp_path, data, name)) as checkpoint:
            assert list(checkpoint) == ["w"]
    assert "does not begin with 'GGUF'" in refused(written(tmp_path, b"\0" * 64, "y.gguf"))


def test_a_folder_may_hold_one_file(tmp_path):
    data = gguf([("w", (2, 3), "F32", ONES)])
    written(tmp_path, data)
    with tt.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["w"]
    written(tmp_path, data, "y.gguf")
    assert "several GGUF files: x.gguf, y.gguf" in refused(tmp_path)
    tt.save({"v": torch.ones(2)}, tmp_path)
    with tt.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["v"]


W = ("w", (2, 3), "F32", ONES)
HUGE = 2**62


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gguf([W], magic=b"GGML"), "does not begin with 'GGUF'"),
        (gguf([W], version=1), "version 1, only 2 and 3 can be read"),
        (gguf([W], version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (gguf([W], counts=(HUGE, 0)), "tensors, more than"),
        (gguf([W], counts=(1, HUGE)), "pairs, more than"),
        (gguf([W], counts=(2, 0)), "names that are empty"),
        (gguf([W, W]), "w: the file has two tensors of this name"),
        (gguf([W], [("a", 1), ("a", 2)]), "a: the file has this key twice"),
        (gguf([W], {b"\xff": 1}), "not UTF-8"),
        (gguf([W], {"a": (8, text(b"\xff"))}), "not UTF-8"),
        (gguf([W], {"a": (13, b"")}), "a: its value has the unknown type 13"),
        (gguf([W], {"a": (7, b"\2")}), "a: it is a bool with the value 2"),
        (gguf([W], {"a": (8, struct.pack("<Q", HUGE))}), "takes"),
        (gguf([W], {"a": (9, struct.pack("<IQ", 4, HUGE))}), "a: its array has"),
        (gguf([W], {"a": (9, struct.pack("<IQ", 8, HUGE))}), "a: its array has"),
        (gguf([W], {"a": (9, struct.pack("<IQ", 99, 0))}), "a: it is an array of unknown type 99"),
        (gguf([W], {"a": [[[[[1]]]]]}), "a: its arrays are nested too deeply"),
        (gguf([W], {"general.alignment": 0}), "general.alignment: it is 0"),
        (gguf([W], {"general.alignment": 24}), "general.alignment: it is 24"),
        (gguf([W], {"general.alignment": "32"}), "general.alignment: it is '32'"),
        (gguf([W], {"split.count": (2, struct.pack("<H", 3))}), "number None of 3 parts"),
        (gguf([W], {"split.count": 3, "split.no": 3}), "number 3 of 3 parts"),
        (gguf([W], {"split.count": 3, "split.no": 1}), "part 2 of 3, here it is 1 of 1"),
        (gguf([("", (2, 3), 0, ONES)]), "names that are empty"),
        (gguf([("torchtether.storage.w", (2, 3), 0, ONES)]), "begin with torchtether.storage."),
        (gguf([("n" * 2**17, (2, 3), 0, ONES)]), "has 131072 bytes, more than"),
        (gguf([("w", (1,) * 5, 0, ONES)]), "w: it has 5 dimensions"),
        (gguf([("w", (2, 3), 99, ONES)]), "w: it has the unknown type 99"),
        (gguf([("w", (2, 3), 4, ONES)]), "w: it has the unknown type 4"),
        (gguf([("w", (2**31, 2**31), 0, ONES)]), "has too many elements"),
        (gguf([("w", (0, 2**63), 0, ONES)]), "has too many elements"),
        (gguf([("w", (2, 33), "Q8_0", ONES)]), "not a multiple of 32"),
        (gguf([("w", (), "Q8_0", ONES)]), "not a multiple of 32"),
        (gguf([("w", (200, 3), 0, ONES)]), "w: it ends at byte"),
        (gguf([W], places=[HUGE]), "w: it ends at byte"),
        (gguf([W], places=[4]), "w: it begins at byte 4 of the data, not at a multiple of 32"),
        (gguf([W, ("v", (2, 3), 0, ONES)], places=[0, 0]), "overlaps"),
        (b"GGUF", "version takes 4 bytes"),
        (b"", "does not begin"),
    ],
)
def test_what_is_refused(data, said, tmp_path):
    assert said in refused(written(tmp_path, data))


def test_every_truncation_is_an_error(tmp_path):
    data = gguf([W], {"tokens": ["a", "b"], "n": 1, "s": "text"})
    end = len(data) - 8  # padding behind the last tensor
    for length in range(end):
        refused(written(tmp_path, data[:length]))
    Store(written(tmp_path, data[:end])).close()


def test_a_header_that_asks_for_memory_gets_none(tmp_path):
    """Each claims terabytes, in a file of a few hundred bytes."""
    for data in (
        gguf([W], {"a": (8, struct.pack("<Q", 2**40))}),
        gguf([W], {"a": (9, struct.pack("<IQ", 0, 2**40))}),
        gguf([("w", (2**20, 2**20), 0, ONES)]),
    ):
        path = written(tmp_path, data)
        tracemalloc.start()
        refused(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**18


# -- files in parts ---------------------------------------------------------------------------------------------------


def part(name, number, count, tensors=None, **pairs):
    """The bytes of a part that holds the tensor ``name``, six times its number."""
    said = {"split.no": (2, struct.pack("<H", number)), "split.count": (2, struct.pack("<H", count))}
    if tensors is not None:
        said["split.tensors.count"] = (5, struct.pack("<i", tensors))
    return gguf([(name, (2, 3), "F32", struct.pack("<6f", *[float(number)] * 6))], {**pairs, **said})


def parts(folder, count=3, tensors=3, stem="x"):
    """Write a file in ``count`` parts; return the path of each."""
    pairs = [{"general.architecture": "llama", "llama.block_count": 2}, *[{}] * (count - 1)]
    return [
        written(folder, part(f"w{i}", i, count, tensors, **pairs[i]), f"{stem}-{i + 1:05d}-of-{count:05d}.gguf")
        for i in range(count)
    ]


@pytest.mark.parametrize("tensors", [3, None])
@pytest.mark.parametrize("at", [0, 1, 2, "folder"])
def test_a_part_or_its_folder_stands_for_the_file(tmp_path, at, tensors):
    paths = parts(tmp_path, tensors=tensors)
    with tt.open(tmp_path if at == "folder" else paths[at]) as checkpoint:
        assert {name: checkpoint[name].tolist() for name in checkpoint} == {f"w{i}": [[i] * 3] * 2 for i in range(3)}
        assert json.loads(checkpoint.store.header.metadata[PAIRS]) == {
            "general.architecture": "llama",
            "llama.block_count": 2,
        }


def without(paths):
    paths[1].unlink()


def of_another(paths):
    paths[1].write_bytes(part("w1", 1, 4, 4))


def exchanged(paths):
    first = paths[0].read_bytes()
    paths[0].write_bytes(paths[1].read_bytes())
    paths[1].write_bytes(first)


def whole(paths):
    paths[2].write_bytes(gguf([("w2", (2, 3), "F32", ONES)]))


def fewer(paths):
    paths[2].write_bytes(part("w2", 2, 3, 7))


def twice(paths):
    paths[2].write_bytes(part("w1", 2, 3, 3))


def other_kind(paths):
    tt.save({"w2": torch.ones(2)}, paths[2].with_suffix(".safetensors"))
    paths[2].with_suffix(".safetensors").rename(paths[2])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without, "the part x-00002-of-00003.gguf does not exist. Fetch every part."),
        (of_another, "it says that it is part 2 of 4, here it is 2 of 3"),
        (exchanged, "it says that it is part 2 of 3, here it is 1 of 3"),
        (whole, "its name says that it is one of 3 parts, and it says nothing of parts"),
        (fewer, "it says that all parts have 7 tensors, and they have 3"),
        (twice, "x-00002-of-00003.gguf also stores this name"),
        (other_kind, "does not begin with 'GGUF'"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, change, said):
    paths = parts(tmp_path)
    change(paths)
    for path in (paths[0], tmp_path):
        with pytest.raises(tt.CheckpointError) as caught:
            tt.open(path)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_folder_with_the_parts_of_two_files_names_each_once(tmp_path):
    parts(tmp_path, stem="q4")
    parts(tmp_path, 2, 2, stem="q8")
    assert "several GGUF files: q4-00001-of-00003.gguf, q8-00001-of-00002.gguf" in refused(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "x-00001-of-00001.gguf",
        "x-00003-of-00002.gguf",
        "x-1-of-2.gguf",
        "x-00000-of-00002.gguf",
        "x-0000\u0661-of-00002.gguf",
    ],
)
def test_a_whole_file_may_have_such_a_name(tmp_path, name):
    path = written(tmp_path, gguf([W]), name)
    assert list(tt.open(path)) == list(tt.open(tmp_path)) == ["w"]


@pytest.mark.parametrize("number", [1, 2])
def test_one_line_names_the_part_that_a_folder_lacks(tmp_path, number):
    parts(tmp_path, 2, 2)[number - 1].unlink()
    assert f"the part x-0000{number}-of-00002.gguf does not exist. Fetch every part." in refused(tmp_path)


def test_nothing_is_saved_under_the_name_of_a_part(tmp_path):
    paths = parts(tmp_path)
    for path in (paths[0], tmp_path / "y-00001-of-00002.gguf"):
        with pytest.raises(tt.CheckpointError, match="it is the name of one of several parts"):
            tt.save(torch.nn.Linear(4, 4), path, format="gguf")
    assert sorted(tmp_path.iterdir()) == paths
    assert len(tt.open(tmp_path)) == 3


def test_one_part_is_whole_as_gguf_split_writes_it(tmp_path):
    (path,) = parts(tmp_path, 1, 1)
    assert list(tt.open(path)) == ["w0"]


def test_a_record_in_the_first_part_is_that_of_all(tmp_path):
    """As ``gguf-split`` makes them of a file by ``tt.save``: it copies all pairs to the first part."""
    model = {"a": tt.Weight.encode(torch.randn(4, 64), tt.int8(32, scale_dtype=torch.float16))}
    model["b"] = model["a"]
    tt.save(model, tmp_path / "whole.gguf", format="gguf")
    with Store(tmp_path / "whole.gguf") as store:
        record = store.header.metadata["torchtether"]
        raw = store.files[0].read("a").numpy().tobytes()
    first = gguf([W], {"torchtether": record, "split.no": 0, "split.count": 2})
    second = gguf([("a", (4, 64), "Q8_0", raw)], {"split.no": 1, "split.count": 2})
    written(tmp_path, first, "x-00001-of-00002.gguf"), written(tmp_path, second, "x-00002-of-00002.gguf")
    with tt.open(tmp_path / "x-00001-of-00002.gguf") as checkpoint:
        assert [tie.names for tie in checkpoint.ties] == [("a", "b")]
        assert torch.equal(checkpoint["b"].dequantize(), model["a"].dequantize())
