"""safetensors itself: its own rules for shared tensors beside ours, its loader on our files, its files in our loader.

Every kind of sharing is a row of ``SHARED``.  Where safetensors refuses, loses sharing or writes wrong values, we
restore values and sharing exactly, or refuse with one line that names the tensor.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import torchtether as tt
from tests.checkpoint.test_round_trip import assert_same, bits
from tests.loading.models import Fused, Odd, Slices, Storage, Tied, Turned, build
from torchtether.ties.components import find_components
from torchtether.ties.names import named_tensors

pytestmark = pytest.mark.peers


def values(*shape, dtype=torch.float32):
    """Random bytes that are numbers of ``dtype``."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return whole.to(dtype) if dtype.is_floating_point or dtype.is_complex else (whole * 50).to(dtype)


@dataclass(frozen=True)
class Row:
    """Named tensors by kind of sharing, what safetensors' ``save_file`` does with them, and ours.

    ``theirs``  "ok", "untied" (each name stored, memory no longer shared), "wrong" (other values) or an exception
    ``ours``    names that share memory afterwards, by group; or the text of the error
    """

    make: Any
    theirs: Any
    ours: Any


def _one_parameter():
    weight = nn.Parameter(values(3, 4))
    return {"a": weight, "b": weight}


def _detached():
    weight = values(3, 4)
    return {"a": weight, "b": weight.detach()}


def _of(shape, **views):
    def make():
        whole = values(*shape)
        return {name: view(whole) for name, view in views.items()}

    return make


def _typed(dtype, other=None, count=16):
    def make():
        whole = values(count).to(dtype) if dtype.itemsize > 1 else torch.arange(count, dtype=torch.uint8).view(dtype)
        return {"a": whole, "b": whole.view(other) if other else whole.detach()}

    return make


def _smaller_storage():
    """Memory that two storages claim, one of them a part of the other: as frameworks that manage memory make."""
    whole = values(8)
    part = torch.frombuffer(memoryview(whole.numpy())[2:6], dtype=torch.float32)
    return {"a": whole, "b": part}


def _parameter_and_buffer():
    model = nn.Module()
    model.a = nn.Parameter(values(3, 4))
    model.register_buffer("b", model.a.data)
    return model.state_dict(keep_vars=True)


def _weight():
    return {"a": tt.Weight.encode(values(4, 32), tt.int8())}


def _tied_weight():
    weight = tt.Weight.encode(values(4, 32), tt.int8())
    return {"a": weight, "b": weight}


def _tied_parts():
    weight = tt.Weight.encode(values(4, 32), tt.int8())
    return {"a": weight, "b": weight.t()}


class Named(torch.Tensor):
    """A subclass that only adds methods."""


REFUSED = (RuntimeError, ValueError, KeyError, NotImplementedError)

SHARED = {
    "one Parameter": Row(_one_parameter, RuntimeError, ["a b"]),
    "detached alias": Row(_detached, RuntimeError, ["a b"]),
    "full and transpose": Row(_of((3, 4), a=lambda w: w, b=lambda w: w.t()), RuntimeError, ["a b"]),
    "square and transpose": Row(_of((4, 4), a=lambda w: w.t(), b=lambda w: w), RuntimeError, ["a b"]),
    "full and leading slice": Row(_of((4, 3), a=lambda w: w, b=lambda w: w[:2]), RuntimeError, ["a b"]),
    "full and every second": Row(_of((8,), a=lambda w: w, b=lambda w: w[::2]), RuntimeError, ["a b"]),
    "overlapping slices": Row(_of((6, 4), b=lambda w: w[:3], c=lambda w: w[2:5]), RuntimeError, ["b c"]),
    "disjoint rows": Row(_of((4, 3), b=lambda w: w[:2], c=lambda w: w[2:]), "ok", []),
    "disjoint columns": Row(_of((4, 4), b=lambda w: w[:, :2], c=lambda w: w[:, 2:]), RuntimeError, []),
    "expanded": Row(_of((4,), a=lambda w: w.expand(3, 4)), ValueError, []),
    "full and expanded": Row(
        _of((4,), a=lambda w: w, b=lambda w: w.expand(3, 4)), RuntimeError, "b: it shares memory with a",
    ),
    "interleaved": Row(_of((8,), a=lambda w: w[::2], b=lambda w: w[1::2]), RuntimeError, []),
    "fused with q, k, v": Row(
        _of((6, 2), qkv=lambda w: w, q=lambda w: w[:2], k=lambda w: w[2:4], v=lambda w: w[4:]), RuntimeError,
        ["qkv q k v"],
    ),
    "fused with q, k": Row(
        _of((6, 2), qkv=lambda w: w, q=lambda w: w[:2], k=lambda w: w[2:4]), RuntimeError, ["qkv q k"]
    ),
    "reshaped": Row(_of((3, 4), a=lambda w: w.view(12), b=lambda w: w, c=lambda w: w.view(2, 6)), RuntimeError,
                    ["a b c"]),
    "stride 0 before its base": Row(
        _of((4,), a=lambda w: w.as_strided((4,), (0,)), b=lambda w: w), RuntimeError,
        "a: it shares memory with b",
    ),
    "a slice of large memory": Row(_of((100, 4), b=lambda w: w[3:5]), "ok", []),
    "empty tie": Row(lambda: dict.fromkeys("ab", torch.empty(0, 3)), "ok", ["a b"]),
    "full and empty view": Row(_of((3, 4), a=lambda w: w, b=lambda w: w[:0]), "ok", []),
    "rank 0": Row(_of((), a=lambda w: w, b=lambda w: w.detach()), RuntimeError, ["a b"]),
    "float32 and int32": Row(_typed(torch.float32, torch.int32), RuntimeError, ["a b"]),
    "float32 and bfloat16": Row(_typed(torch.float32, torch.bfloat16), RuntimeError, ["a b"]),
    "float8 and uint8": Row(_typed(torch.float8_e4m3fn, torch.uint8), RuntimeError, ["a b"]),
    **{
        str(dtype).removeprefix("torch."): Row(_typed(dtype), RuntimeError, ["a b"])
        for dtype in (
            torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
            torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
        )
    },
    "complex and its real view": Row(
        lambda: (lambda w: {"a": w, "b": torch.view_as_real(w)})(values(4, dtype=torch.complex64)), RuntimeError,
        ["a b"],
    ),
    "lazy conjugate": Row(lambda: {"a": values(4, dtype=torch.complex64).conj()}, "wrong", []),
    "lazy negative": Row(lambda: {"a": values(4, dtype=torch.complex64).conj().imag.contiguous()}, "ok", []),
    "lazy negative view": Row(lambda: {"a": torch._neg_view(values(4))}, "wrong", []),
    "Parameter and buffer": Row(_parameter_and_buffer, RuntimeError, ["a b"]),
    "smaller storage": Row(_smaller_storage, "untied", ["a b"]),
    "subclass without data of its own": Row(lambda: {"a": values(3).as_subclass(Named)}, "ok", []),
    "quantized": Row(_weight, RuntimeError, []),
    "quantized tie": Row(_tied_weight, RuntimeError, ["a b"]),
    "quantized tie of parts": Row(_tied_parts, RuntimeError, ["a b"]),
    "meta": Row(lambda: {"a": torch.empty(3, device="meta")}, NotImplementedError, "a: it is on meta"),
    "sparse COO": Row(lambda: {"a": values(3, 3).to_sparse()}, ValueError, "store a torch.sparse_coo tensor"),
    "sparse CSR": Row(lambda: {"a": values(3, 3).to_sparse_csr()}, ValueError, "store a torch.sparse_csr tensor"),
    "qint8": Row(lambda: {"a": torch.quantize_per_tensor(values(3), 0.1, 0, torch.qint8)}, KeyError, "a: "),
    "complex128 of float64": Row(
        lambda: (lambda w: {"a": nn.Parameter(torch.view_as_real(w)), "b": w})(values(3, dtype=torch.complex128)),
        KeyError, "b: safetensors has no dtype",
    ),
    "complex128": Row(lambda: {"a": values(3, dtype=torch.complex128)}, KeyError, "a: safetensors has no dtype"),
    "nested": Row(
        lambda: {"a": torch.nested.nested_tensor([values(2), values(3)], layout=torch.jagged)}, REFUSED, "a: "
    ),
    "lazy module": Row(lambda: nn.LazyLinear(3).state_dict(keep_vars=True), ValueError, "weight: |bias: "),
}  # fmt: skip


def resolved(named):
    return {name: tensor.resolve_conj().resolve_neg() for name, tensor in named.items()}


@pytest.mark.filterwarnings("ignore")  # torch warns of sparse, nested and quantized tensors
@pytest.mark.parametrize("row", SHARED)
@pytest.mark.parametrize("aliases", ["drop", "copy"])
def test_shared_tensors_come_back_exactly_or_are_refused(tmp_path, row, aliases):
    row, path = SHARED[row], tmp_path / "x.safetensors"
    named = row.make()
    if isinstance(row.ours, str):
        with pytest.raises(tt.TetherError, match=row.ours) as caught:
            tt.save(named, path, aliases=aliases)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []
        return
    tt.save(named, path, aliases=aliases)
    for shift in range(len(named)):  # in any order of asking
        with tt.open(path) as checkpoint:
            order = [*sorted(named)[shift:], *sorted(named)[:shift]]
            found = {name: checkpoint[name] for name in order}
            assert sorted(checkpoint) == sorted(named)
            assert_same(dict(sorted(resolved(named).items())), dict(sorted(found.items())), strides=False)
            recorded = [{name for name in tie.names if name in named} for tie in checkpoint.ties]
        shared = [set(group.split()) for group in row.ours]
        assert recorded == shared
        if not any(tensor.numel() for tensor in named.values()):
            continue  # nothing to share
        live = [set(component.names) for component in find_components(found) if len(component.names) > 1]
        assert live == shared


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", SHARED)
def test_what_safetensors_does_with_them(tmp_path, row):
    """So that a new version of it that behaves otherwise is noticed, and the table stays true."""
    row, path = SHARED[row], tmp_path / "x.safetensors"
    named = row.make()
    if not isinstance(row.theirs, str):
        with pytest.raises(row.theirs):
            safetensors.torch.save_file(named, path)
        return
    safetensors.torch.save_file(named, path)
    found = safetensors.torch.load_file(path)
    same = all(torch.equal(bits(tensor), bits(found[name])) for name, tensor in resolved(named).items())
    assert same == (row.theirs != "wrong")
    if row.theirs == "untied":
        found["a"].zero_()
        assert not torch.equal(found["b"], torch.zeros_like(found["b"]))
    if row.theirs == "ok":
        with tt.open(path) as checkpoint:
            assert_same(dict(sorted(found.items())), {name: checkpoint[name] for name in sorted(checkpoint)})


# -- its loader on our files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aliases", ["drop", "copy"])
def test_load_model_reads_ours_and_ties_hold(tmp_path, aliases):
    """It derives ties from the model, so it takes ours with aliases dropped, and calls copies unexpected."""
    source, model = build(Tied), build(Tied, seed=4)
    tt.save(source, tmp_path / "x.safetensors", aliases=aliases)
    missing, unexpected = safetensors.torch.load_model(model, tmp_path / "x.safetensors", strict=aliases == "drop")
    assert (missing, unexpected) == (set(), [] if aliases == "drop" else ["head.weight"])
    assert_same(named_tensors(source), named_tensors(model))
    assert tt.find_ties(model) == tt.find_ties(source)


@pytest.mark.parametrize("kind", [Tied, Turned, Fused, Slices, Storage])
def test_load_file_gives_every_key_of_copies(tmp_path, kind):
    source = build(kind)
    tt.save(source, tmp_path / "x.safetensors", aliases="copy")
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    for name, tensor in source.state_dict().items():
        assert torch.equal(found.pop(name), tensor)
    assert all(name.startswith("torchtether.") for name in found)


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_load_model_into_weights_is_refused_with_the_call_that_reads(tmp_path):
    safetensors.torch.save_model(build(Tied), str(tmp_path / "x.safetensors"))
    model = tt.quantize(build(Tied, seed=4), "int8")
    with pytest.raises(RuntimeError, match=r"load a file into it by tt\.load\.$") as caught:
        safetensors.torch.load_model(model, tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value)


# -- its files in our loader ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meta", [True, False])
def test_what_save_model_writes_loads_tied(tmp_path, meta):
    source, model = build(Tied), build(Tied, meta=meta, seed=4)
    safetensors.torch.save_model(source, str(tmp_path / "x.safetensors"))
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint["head.weight"].data_ptr() == checkpoint["emb.weight"].data_ptr()
    optimizer = torch.optim.AdamW(model.parameters())
    report = tt.load(model, tmp_path / "x.safetensors")
    assert (report.missing_keys, report.unexpected_keys) == ((), ())
    assert_same(named_tensors(source), named_tensors(model))
    assert model.head.weight is model.emb.weight
    tt.check_optimizer(model, optimizer)


@pytest.mark.parametrize("meta", [True, False])
def test_what_save_file_writes_loads(tmp_path, meta):
    source, model = build(Odd), build(Odd, meta=meta, seed=4)
    named = {name: tensor.detach().contiguous() for name, tensor in source.state_dict().items()}
    safetensors.torch.save_file(named, tmp_path / "x.safetensors", {"format": "pt", "note": "other", "who": "we"})
    tt.load(model, tmp_path / "x.safetensors")
    assert_same(named_tensors(source), named_tensors(model), strides=False)


def test_a_tie_to_stride_0_that_save_model_loses_is_refused_here(tmp_path):
    """safetensors keeps the name that sorts first, calls it complete, and drops the values."""
    model = nn.Module()
    model.b = nn.Parameter(torch.arange(1.0, 5.0))
    model.a = nn.Parameter(model.b.data.as_strided((4,), (0,)))
    safetensors.torch.save_model(model, str(tmp_path / "theirs.safetensors"))
    with safetensors.safe_open(tmp_path / "theirs.safetensors", "pt") as file:
        assert list(file.keys()) == ["a"]
    with pytest.raises(tt.TetherError, match="a: it shares memory with b, and with size .* it overlaps itself"):
        tt.save(model, tmp_path / "ours.safetensors")
