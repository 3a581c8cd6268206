"""``verify`` finds every flipped bit, and comparing in pieces finds the same as comparing whole tensors."""

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import torchtether as tt
from tests.catalog import FEW, SCHEMES
from tests.strategies import examples
from torchtether.cli import verify
from torchtether.cli.main import main
from torchtether.cli.verify import verify_checkpoint
from torchtether.files import KEY

# -- checksums --------------------------------------------------------------------------------------------------------


def everything():
    """Every kind of stored tensor: plain, parts of a Weight, a hidden storage, turned, copies, empty, a scalar."""
    torch.manual_seed(0)
    emb, block = torch.randn(6, 4), torch.randn(8)
    return {
        "emb": emb,
        "head": emb,
        "weight": tt.Weight.encode(torch.randn(4, 8), tt.nf4(double_quant=True)),
        "left": block[:5],
        "right": block[3:],
        "turned": torch.randn(3, 5).t(),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "none": torch.empty(0, 3),
        "one": torch.tensor(1.5, dtype=torch.bfloat16),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tt.save(everything(), folder, aliases="copy", max_shard_size=200)
    return folder


def test_every_stored_tensor_has_the_checksum_of_its_bytes(saved):
    report = verify_checkpoint(saved)
    assert report.faults == ()
    assert report.without_checksum == 0
    with tt.open(saved) as checkpoint:
        assert report.stored == len(checkpoint.store.record.checksums) == len(checkpoint.store.header.tensors)
        assert report.bytes == sum(one.nbytes for one in checkpoint.store.header.tensors.values())


@examples(50)
@given(st.data())
def test_a_flipped_bit_is_found_with_file_and_key(saved, tmp_path_factory, data):
    with tt.open(saved) as checkpoint:
        stored = {key: one for key, one in checkpoint.store.header.tensors.items() if one.nbytes}
        key = data.draw(st.sampled_from(sorted(stored)))
        file = checkpoint.store.file_of(key).path
    folder = tmp_path_factory.mktemp("flipped")
    for one in saved.iterdir():
        (folder / one.name).write_bytes(one.read_bytes())
    content = bytearray(file.read_bytes())
    content[stored[key].start + data.draw(st.integers(0, stored[key].nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / file.name).write_bytes(content)
    faults = verify_checkpoint(folder).faults
    assert [fault for fault in faults if fault.startswith(f"{file.name}: {key}: its bytes have the checksum ")]
    assert len(faults) == 1


def test_a_flipped_bit_is_one_line_and_exit_1(saved, tmp_path, capsys):
    tt.save({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content[:-1] + b"\x40")
    assert main(["verify", str(tmp_path / "x.safetensors")]) == 1
    error = capsys.readouterr().err
    assert "x.safetensors: a: its bytes have the checksum" in error
    assert error.count("\n") == 1


def test_files_without_checksums_verify_and_are_counted(saved, tmp_path, capsys):
    """Those of other tools, and ours from before there were checksums."""
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "theirs.safetensors")
    assert main(["verify", str(tmp_path / "theirs.safetensors")]) == 0
    assert "2 of 2 stored tensors have no checksum" in capsys.readouterr().out
    weight = tt.Weight.encode(torch.randn(4, 8), tt.int8())
    tt.save({"w": weight, "b": torch.ones(2)}, tmp_path / "ours.safetensors")
    assert main(["verify", str(tmp_path / "ours.safetensors")]) == 0
    assert "checksum" not in capsys.readouterr().out
    with tt.open(tmp_path / "ours.safetensors") as checkpoint:
        record = json.loads(checkpoint.store.header.metadata[KEY])
    del record["crc32"]["b"]
    tensors = load_file(tmp_path / "ours.safetensors")
    save_file(tensors, tmp_path / "partly.safetensors", metadata={KEY: json.dumps(record)})
    assert main(["verify", str(tmp_path / "partly.safetensors")]) == 0
    assert "1 of 3 stored tensors have no checksum" in capsys.readouterr().out


def test_reading_computes_no_checksum(tmp_path):
    """It is said in the docs; who wants it asks verify."""
    tt.save({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content[:-1] + b"\x40")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint["a"][:2].tolist() == [1, 1]


# -- comparing in pieces ----------------------------------------------------------------------------------------------

FEW_IDS = {row.id for row in FEW}
QUANTIZED = {row.id: row.scheme for row in SCHEMES if not row.scheme.transparent}
SHAPES = [(7, 64), (64, 7), (300,), (2, 5, 33), (3, 20, 129), (1, 400), (2, 1, 96)]


def by_whole(one, two):
    """The same figures from whole tensors: the specification."""
    mine, theirs = (t.to(torch.float32).dequantize() if isinstance(t, tt.Weight) else t for t in (one, two))
    error = (mine.double() - theirs.double()).abs()
    noise, signal = float(error.square().sum()), float(theirs.double().square().sum())
    sqnr = math.inf if noise == 0 else 10 * math.log10(signal / noise)
    bound = one.scheme.bound(one.parts, one.spec.base).expand(one.spec.base).permute(one.spec.order)
    return float(error.max()), sqnr, bool((error <= bound.double() * (1 + 1e-6)).all())


@given(st.sampled_from(sorted(QUANTIZED)), st.sampled_from(SHAPES), st.booleans(), st.integers(0, 3), st.data())
def test_pieces_give_what_whole_tensors_give(tmp_path_factory, kind, shape, is_turned, broken, data):
    """For every scheme, each with rows, blocks and streams of its own; a few values are moved far off."""
    scheme = QUANTIZED[kind]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randn(shape)
    try:
        weight = tt.Weight.encode(values, scheme)
    except tt.SchemeError:
        return
    for _ in range(broken):
        values.view(-1)[data.draw(st.integers(0, values.numel() - 1))] += 9
    if is_turned:
        weight, values = weight.transpose(0, -1), values.transpose(0, -1)
    folder = tmp_path_factory.mktemp("pieces")
    tt.save({"w": weight}, folder / "q.safetensors")
    tt.save({"w": values.contiguous() if data.draw(st.booleans()) else values}, folder / "x.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_PIECE", data.draw(st.sampled_from([1, 50, 300, 10**6])))
        (found,) = verify_checkpoint(folder / "q.safetensors", against=folder / "x.safetensors").differences
    largest, sqnr, is_expected = by_whole(weight, values)
    assert (found.largest, found.is_expected) == (largest, is_expected)
    assert found.sqnr == pytest.approx(sqnr)


KINDS = (torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.uint8, torch.bool)


@pytest.mark.parametrize("mine", KINDS)
@pytest.mark.parametrize("theirs", KINDS)
@pytest.mark.parametrize("values", [[0, 1], [0, 3], [1, 2.5], [0, math.inf], [0, 2j]])
def test_a_change_of_dtype_is_expected_where_it_keeps_values(tmp_path, mine, theirs, values):
    source = torch.tensor(values, dtype=torch.complex128)
    source = (source if theirs.is_complex else source.real).to(theirs)
    made = (source if mine.is_complex or not theirs.is_complex else source.real).to(mine).contiguous()
    save_file({"t": source}, tmp_path / "source.safetensors")
    save_file({"t": made}, tmp_path / "made.safetensors")
    report = verify_checkpoint(tmp_path / "made.safetensors", against=tmp_path / "source.safetensors")
    kept = made.tolist() == source.tolist()  # Python compares numbers of all kinds exactly
    assert (report.faults == ()) == kept


@pytest.mark.parametrize("kept", ["emb.weight", "head.weight"])
def test_a_name_that_is_tied_to_one_in_both_files_is_not_missing(tmp_path, kept):
    """As of a folder of transformers, which has one of the names, and a save of ours, which has both."""
    values = torch.randn(8, 4)
    tt.save({"emb.weight": values, "head.weight": values, "rows": values[:2], "b": torch.ones(1)}, tmp_path / "tied")
    tt.save({kept: values.clone(), "rows": values[:2].clone(), "b": torch.ones(1)}, tmp_path / "plain")
    for one, other in (("tied", "plain"), ("plain", "tied")):
        assert not verify_checkpoint(tmp_path / one, against=tmp_path / other).faults


def test_names_that_one_file_lacks_are_faults(tmp_path):
    values = torch.randn(8, 4)
    tt.save({"a": values, "rows": values[:2], "other": torch.ones(1)}, tmp_path / "more")
    tt.save({"a": values.clone()}, tmp_path / "less")
    missing = [f"{name}: it is missing in {tmp_path / 'less'}" for name in ("rows", "other")]
    assert sorted(verify_checkpoint(tmp_path / "more", against=tmp_path / "less").faults) == sorted(missing)
    here = [f"{name}: it is in {tmp_path / 'more'}, but not here" for name in ("rows", "other")]
    assert sorted(verify_checkpoint(tmp_path / "less", against=tmp_path / "more").faults) == sorted(here)


def test_what_differs_in_bits_alone_is_said_to(tmp_path):
    for name, zero in {"made": -0.0, "source": 0.0}.items():
        save_file({"t": torch.tensor([zero])}, tmp_path / f"{name}.safetensors")
    report = verify_checkpoint(tmp_path / "made.safetensors", against=tmp_path / "source.safetensors")
    assert report.faults == ("t: its values are equal as float64, not bit for bit, but should be equal",)


@pytest.mark.parametrize("one", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FEW_IDS)) for n in QUANTIZED])
def test_quantized_against_quantized_and_plain_against_quantized(tmp_path, one, monkeypatch):
    """Their pieces end at different places; decoded values are what they were decoded from."""
    monkeypatch.setattr(verify, "_PIECE", 100)
    weight = tt.Weight.encode(torch.randn(96, 160), QUANTIZED[one])
    tt.save({"w": weight, "v": weight.t()}, tmp_path / "q.safetensors")
    tt.save({"w": weight.dequantize(), "v": weight.t().dequantize()}, tmp_path / "x.safetensors")
    other = tt.Weight.encode(weight.dequantize(), tt.Affine(bits=8, block=(32, 40)))
    tt.save({"w": other, "v": other.t()}, tmp_path / "y.safetensors")
    for path in ("q", "x"):
        report = verify_checkpoint(tmp_path / f"{path}.safetensors", against=tmp_path / "q.safetensors")
        assert report.faults == ()
        assert {difference.largest for difference in report.differences} == {0}
    report = verify_checkpoint(tmp_path / "y.safetensors", against=tmp_path / "q.safetensors")
    assert report.faults == ()


def test_a_bound_that_all_rows_share_is_not_taken_from_some(tmp_path, monkeypatch):
    """Under one scale of 1, rows that decode to zeros look like a tensor of zeros, which may not be off at all."""
    monkeypatch.setattr(verify, "_PIECE", 8)
    values = torch.full((4, 8), 0.25)
    values[0, 0] = 127.5
    weight = tt.Weight.encode(values, tt.Affine(block=(None, None)))
    assert weight.parts["scale"].item() == 1
    tt.save({"w": weight}, tmp_path / "q.safetensors")
    tt.save({"w": values}, tmp_path / "x.safetensors")
    assert verify_checkpoint(tmp_path / "q.safetensors", against=tmp_path / "x.safetensors").faults == ()


_PEAK = """
import sys
from torchtether.progress import Meter
from torchtether.cli.verify import verify_checkpoint
verify_checkpoint(sys.argv[3], against=sys.argv[4])  # imports, and what torch sets up once
with Meter() as meter:
    report = verify_checkpoint(sys.argv[1], against=sys.argv[2])
assert not report.faults, report.faults
print(meter.peak)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8", "nf4", "mxfp4"])
def test_scratch_is_at_most_the_largest_tensor_and_some(tmp_path, scheme):
    """Fused experts, so that one entry of the first dimension is large as well."""
    paths = []
    for name, shape in (("large", (2, 4096, 2048)), ("small", (64, 64))):
        values = torch.randn(shape)
        tt.save({"w": values}, tmp_path / f"{name}.safetensors")
        tt.save({"w": tt.Weight.encode(values, getattr(tt, scheme)())}, tmp_path / f"{name}-q.safetensors")
        paths += [str(tmp_path / f"{name}-q.safetensors"), str(tmp_path / f"{name}.safetensors")]
    done = subprocess.run([sys.executable, "-c", _PEAK, *paths], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * values.new_empty(2, 4096, 2048).numel() + 64 * 2**20


@pytest.mark.parametrize("scheme", [tt.int8(), tt.mxfp4()], ids=str)
def test_values_that_the_compute_dtype_cannot_hold_are_a_fault(scheme, tmp_path):
    """The largest float16 is rounded up by most schemes; in bfloat16 the same parts are right."""
    values = torch.full((4, 64), -65504.0)
    for dtype, expected in ((torch.float16, "too large for float16"), (torch.bfloat16, ""), (torch.float32, "")):
        weight = tt.Weight.encode(values, scheme).to(dtype)
        assert bool(weight.dequantize().isinf().any()) == bool(expected)
        tt.save({"w": weight}, path := tmp_path / f"{str(dtype)[6:]}.safetensors")
        faults = verify_checkpoint(path).faults
        assert len(faults) == bool(expected)
        assert all(fault == f"w: it decodes to values that are {expected}" for fault in faults)
