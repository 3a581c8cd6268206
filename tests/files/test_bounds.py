"""Files that claim much memory or time are refused, or read within a small multiple of their size."""

import json
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import torchtether as tt
from torchtether.files import KEY, Record, record, strict_json
from torchtether.files.strict_json import VALUES, parse_object

_MB = 2**20
_ROOM = 60 * _MB  # what the first opening of any file takes, modules and all

_OPEN = """
import sys, torchtether as tt
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
before = peak()
try:
    with tt.open(sys.argv[1]) as checkpoint:
        said = repr(checkpoint)
except tt.CheckpointError as error:
    said = str(error)
print(peak() - before, said[:1000])
"""


def file(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


def with_record(record):
    entries = {"__metadata__": {KEY: record.decode()}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    return file(json.dumps(entries).encode(), b"\0")


def many(unit, count):
    return b"{" + b",".join(unit % i for i in range(count)) + b"}"


WIDE = "more than 131072 values in one object or list"

FILES = {
    "deep objects": (lambda size: file(b'{"a":' * (size // 5)), "nested too deeply"),
    "deep lists": (lambda size: file(b'{"a":' + b"[" * size), "nested too deeply"),
    "one string": (lambda size: file(b'{"__metadata__":{"a":"%s"}}' % (b"x" * size)), "0 tensors"),
    "wide": (lambda size: file(b'{"__metadata__":{"a":"%s"}}' % (b"x" * size + "\U0001f600".encode())), "0 tensors"),
    "one key": (lambda size: file(b'{"%s":{}}' % (b"x" * size)), "characters, more than 65536"),
    "escapes": (
        lambda size: file(b'{"a\\\\":"%s"}' % (b"\\u0041" * (size // 6))),
        "its entry in the header lacks dtype",
    ),
    "keys": (lambda size: file(many(b'"%x":{}', size // 14)), f"more than {VALUES} values"),
    "metadata": (lambda size: file(b'{"__metadata__":%s}' % many(b'"%x":""', size // 14)), WIDE),
    "lists": (lambda size: file(b'{"a":[' + b"[]," * (size // 3) + b"[]]}"), WIDE),
    "numbers": (lambda size: file(b'{"a":[' + b"999," * (size // 4) + b"1]}"), WIDE),
    "one number": (lambda size: file(b'{"a":' + b"9" * size + b"}"), "not JSON"),
    "spaces": (lambda size: file(b"{" + b" " * size + b"}"), "0 tensors"),
    "tensors": (
        lambda size: file(many(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}', size // 56)),
        f"more than {VALUES} values",
    ),
    "record of lists": (lambda size: with_record(b'{"v":1,"ties":[' + b"[]," * (5 * _MB) + b"[]]}"), "values"),
    "record, deep": (lambda size: with_record(b"[" * (15 * _MB)), "nested too deeply"),
    "record, large": (lambda size: with_record(b'"' + b"x" * (17 * _MB) + b'"'), "the torchtether record is a str"),
    "record of keys": (
        lambda size: with_record(b'{"v":1,"crc32":%s}' % many(b'"%x":""', size // 20)),
        f"record holds more than {2**18 + 32} values",
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("kind", FILES)
def test_a_header_of_95_megabytes_takes_a_small_multiple_of_its_size(tmp_path, kind):
    """At most ten times: the bytes, the text (four bytes a character if one is rare), and what it says."""
    make, what = FILES[kind]
    data = make(95 * 10**6)
    (tmp_path / "x.safetensors").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, str(tmp_path / "x.safetensors")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    peak, said = done.stdout.split(" ", 1)
    assert what in said
    assert int(peak) < 10 * len(data) + _ROOM


@pytest.mark.parametrize("kind", FILES)
def test_the_same_files_when_small(tmp_path, kind):
    make, _ = FILES[kind]
    (tmp_path / "x.safetensors").write_bytes(make(20_000))
    try:
        tt.open(tmp_path / "x.safetensors").close()
    except tt.CheckpointError as error:
        assert len(str(error)) < 2**16 + 1000
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "count"),
    [('{"a": 1}', 1), ('{"a,[{": "\\",[{\\\\"}', 1), ('{"a": [[], {}, "x"], "b": 2}', 7), ("{}", 1)],
)
def test_values_are_counted_outside_of_strings(text, count):
    parse_object(text, name="f", what="text", values=count)
    if count > 1:
        with pytest.raises(tt.CheckpointError, match=f"f: the text holds more than {count - 1} values"):
            parse_object(text, name="f", what="text", values=count - 1)


def test_half_a_character_is_not_text(tmp_path):
    """An escape can spell it, and whoever prints such a name fails."""
    whole = json.dumps({"\U0001f600": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(file(whole))
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert list(checkpoint) == ["\U0001f600"]
    (tmp_path / "x.safetensors").write_bytes(file(whole.replace(b"\\ud83d", b"")))
    with pytest.raises(tt.CheckpointError, match="the header holds text that is not Unicode"):
        tt.open(tmp_path / "x.safetensors")


def test_what_cannot_be_read_back_is_not_written(tmp_path):
    tensors = dict.fromkeys(map(str, range(VALUES // 8 + 1)), torch.ones(1))
    with pytest.raises(tt.CheckpointError, match="tensors in one file are more than 262144. Save in shards"):
        tt.files.writer.format_header({k: (t.dtype, (1,)) for k, t in tensors.items()}, {}, name="x")
    with pytest.raises(tt.CheckpointError, match=f"x: the header holds {WIDE}"):
        tt.files.writer.format_header({}, dict.fromkeys(map(str, range(2**17 + 1)), ""), name="x")
    with pytest.raises(tt.CheckpointError, match=f"x: the torchtether record holds more than {2**18 + 32} values"):
        Record(copies=frozenset(map(str, range(2**18 + 40)))).check_extent(1, name="x")


@pytest.mark.parametrize(("shards", "what"), [(None, "model.safetensors"), (60, "model.safetensors.index.json")])
def test_saving_asks_for_the_limits_of_the_record(tmp_path, monkeypatch, shards, what):
    monkeypatch.setattr(record, "_values", lambda count: 5)
    tied = dict.fromkeys("abcdefg", torch.ones(10))
    with pytest.raises(tt.CheckpointError, match=f"{what}: the torchtether record holds more than 5 values"):
        tt.save({**tied, "x": torch.ones(10)}, tmp_path, max_shard_size=shards)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_is_written_is_read_back_up_to_the_limits(tmp_path):
    """A checksum takes its key and 14 bytes; these alone are more than 16 MiB."""
    names = [f"{'a' * 2000}.{i}" for i in range(10_000)]
    tt.save({name: torch.ones(1) for name in names}, tmp_path / "x.safetensors")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert len(checkpoint) == len(names)
        assert checkpoint.store.record.checksums.keys() == set(names)


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 9), st.integers(1, 7))
@example([3, 2], 9, 1)
def test_the_widest_inner_object_is_counted_over_pieces(sizes, widest, piece):
    """Whatever the pieces in which the text is looked at."""
    text = json.dumps({str(i): {str(j): [[j], {"a": j}] for j in range(size)} for i, size in enumerate(sizes)}).encode()
    stock, strict_json._PIECE = strict_json._PIECE, piece
    try:
        pairs = strict_json.check_extent(text, 10**9, widest, name="f", what="text")
    except tt.CheckpointError:
        assert max(sizes) > widest
    else:
        assert max(sizes, default=0) <= widest
        assert pairs == len(sizes) + 2 * sum(sizes)
    finally:
        strict_json._PIECE = stock
