"""Wrapper subclasses on ``tt.WrapperTensor``: optional parts, subclasses of subclasses, constructors."""

import copy

import pytest
import torch

import torchtether as tt
from torchtether.testing import check_tensor_subclass


class Affinely(tt.WrapperTensor):
    """int8 codes, a scale per row, perhaps a zero point per row, and the range of codes."""

    inner_names, metadata_names = ("codes", "scale", "zero_point"), ("lowest",)

    def decode(self):
        codes = self.codes.to(self.dtype)
        return (codes if self.zero_point is None else codes - self.zero_point) * self.scale.to(self.dtype)

    def encode(self, values):
        low, high = values.float().aminmax(dim=1, keepdim=True)
        if self.zero_point is None:
            scale = torch.maximum(-low, high).clamp_min(1e-9) / 127
            return {"codes": (values / scale).round().clamp(self.lowest, 127).to(torch.int8), "scale": scale}
        scale = (high - low).clamp_min(1e-9) / 255
        zero_point = self.lowest - (low / scale).round()
        codes = ((values / scale).round() + zero_point).clamp(self.lowest, 127)
        return {"codes": codes.to(torch.int8), "scale": scale, "zero_point": zero_point}


class Named(Affinely):
    """A subclass of that subclass, with a constant of its own."""

    metadata_names = ("lowest", "origin")


class FromValues(Affinely):
    """Its constructor takes values, by keyword only."""

    def __new__(cls, *, values, symmetric=False):
        zero_point = None if symmetric else torch.zeros(values.shape[0], 1)
        room = {"codes": torch.zeros(values.shape, dtype=torch.int8), "scale": torch.ones(values.shape[0], 1)}
        made = super().__new__(cls, **room, zero_point=zero_point, lowest=-128, dtype=values.dtype)
        made.copy_(values)
        return made


def _parts(symmetric):
    made = FromValues(values=torch.randn(8, 16), symmetric=symmetric)
    return {"codes": made.codes, "scale": made.scale, "zero_point": made.zero_point, "lowest": -128}


MAKERS = {
    "both": lambda: Affinely(**_parts(False), dtype=torch.float32),
    "one": lambda: Affinely(**_parts(True), dtype=torch.float32),
    "of a subclass": lambda: Named(**_parts(True), origin="a", dtype=torch.float32),
    "constructor": lambda: FromValues(values=torch.randn(8, 16)),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_it_keeps_every_law(make):
    assert not check_tensor_subclass(make).check().skipped


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "way", [torch.nn.functional.linear, lambda x, w: x @ w.t(), lambda x, w: torch.matmul(w, x.mT)]
)
def test_products_with_batches_of_any_stride(way, trains):
    """Torch may repeat a matrix for each one of a batch, by a view that no wrapper has."""
    held = MAKERS["both"]().requires_grad_(trains)
    plain = held.dequantize().requires_grad_(trains)
    given = torch.randn(5, 2, 16)
    for compiled in (way, torch.compile(way, backend="aot_eager", fullgraph=True)):
        for turn in (lambda x: x, lambda x: x.transpose(0, 1), lambda x: x[:, :1].transpose(0, 1)):
            x, same = (turn(given).detach().requires_grad_() for _ in range(2))
            made, wanted = compiled(x, held), way(same, plain)
            torch.testing.assert_close(made, wanted)
            made.square().sum().backward()
            wanted.square().sum().backward()
            torch.testing.assert_close(x.grad, same.grad)
    if trains:
        torch.testing.assert_close(held.grad, plain.grad)


def test_a_part_that_is_none_stays_so():
    plain, shifted = MAKERS["one"](), MAKERS["both"]()
    assert plain.__tensor_flatten__()[0] == ["codes", "scale"]
    assert copy.deepcopy(plain).clone().zero_point is None
    values = shifted.dequantize()
    plain.copy_(shifted)  # of other parts: encoded anew, not copied
    assert plain.zero_point is None
    assert (plain.dequantize() - values).abs().max() <= values.abs().max() / 127
    assert (values - FromValues(values=values).dequantize()).abs().max() < 0.02


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"codes": None}, r"^Affinely: codes is None, not an inner tensor\. Give a tensor\.$"),
        ({"scale": 0.1}, r"^Affinely: scale is a float, not an inner tensor\. Give a tensor, or None\.$"),
        ({"lowest": torch.tensor(1)}, r"^Affinely: lowest is a tensor, not metadata\. Name it in inner_names\.$"),
        ({"extra": 1}, r"^Affinely: needs the fields \['codes', .*\], got \['codes', 'extra'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_fields_that_are_wrong_are_named(fields, said):
    with pytest.raises(tt.TetherError, match=said):
        Affinely(**{**_parts(False), **fields}, dtype=torch.float32)


def test_names_are_a_tuple():
    with pytest.raises(tt.TetherError, match=r"^Wrong: 'codes' is not a tuple of names\."):
        type("Wrong", (tt.WrapperTensor,), {"inner_names": "codes"})


def test_a_class_without_inner_tensors_is_refused():
    with pytest.raises(tt.TetherError, match=r"^Empty: inner_names is empty, .*\. Name its inner tensors, as in .*\.$"):
        type("Empty", (tt.WrapperTensor,), {})(dtype=torch.float32)


def test_what_is_not_written_yet_is_said():
    made = type("Bare", (tt.WrapperTensor,), {"inner_names": ("codes",)})(codes=torch.ones(2), dtype=torch.float32)
    with pytest.raises(NotImplementedError, match=r"^Bare: it has no decode\(\)"):
        made + 1


class ByHand(tt.WrapperTensor):
    """Written as the tutorials of torch write such classes."""

    inner_names = ("codes",)

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    def decode(self):
        return self.codes.to(self.dtype) / 16

    def encode(self, values):
        return {"codes": (values * 16).round().clamp(-128, 127).to(torch.int8)}


def test_a_class_may_make_its_tensors_as_torch_does():
    made = ByHand(torch.arange(6, dtype=torch.int8).view(2, 3))
    assert torch.equal(made.t().bfloat16() + 1, (made.codes.t() / 16 + 1).bfloat16())
    check_tensor_subclass(lambda: ByHand(torch.randint(-128, 128, (8, 16), dtype=torch.int8))).check()


class Masked(tt.WrapperTensor):
    """Multiples of a step that stays, and zeros outside of a mask that stays: ``encode`` reads inner tensors."""

    inner_names = ("mask", "codes", "step")

    def decode(self):
        return self.codes.to(self.dtype) * self.step.to(self.dtype) * self.mask

    def encode(self, values):
        codes = (values / self.step).round().clamp(-128, 127).to(torch.int8)
        return {"mask": self.mask, "codes": codes, "step": self.step}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_encode_reads_of_the_tensor_is_there_when_floats_are_loaded(assign, dtype):
    mask, step = torch.eye(8).bool(), torch.full((8, 1), 1 / 16)
    given, layer = torch.randn(8, 8).to(dtype), torch.nn.Linear(8, 8, bias=False)
    made = Masked(mask=mask, codes=torch.zeros(8, 8, dtype=torch.int8), step=step, dtype=torch.float32)
    layer.weight = torch.nn.Parameter(made)
    with tt.swapping(layer):
        layer.load_state_dict({"weight": given}, assign=assign)
    assert isinstance(layer.weight, Masked)
    assert layer.weight.dtype == (dtype if assign else torch.float32)
    assert torch.allclose(layer.weight.dequantize().float(), given.float() * mask, atol=1 / 16)
    assert layer.weight.step.data_ptr() != step.data_ptr() or not assign


class Sparse(tt.WrapperTensor):
    """A mask, and as many values as it has bits."""

    inner_names = ("mask", "kept")

    def decode(self):
        return torch.zeros(self.base, dtype=self.dtype).masked_scatter(self.mask, self.kept.to(self.dtype))

    def encode(self, values):
        return {"mask": values != 0, "kept": values[values != 0]}


def test_the_error_of_an_encode_that_changes_shapes_says_what_to_do():
    held = Sparse(mask=torch.eye(2).bool(), kept=torch.ones(2), dtype=torch.float32)
    with pytest.raises(tt.TetherError, match=r"'kept' of shape \(4,\), not \(2,\). Inner tensors keep their shapes"):
        held.copy_(torch.ones(2, 2))


def test_a_load_into_one_names_the_call_that_loads_it(tmp_path):
    layer, path = torch.nn.Linear(2, 2, bias=False), tmp_path / "a.safetensors"
    tt.save(layer, path)
    held = torch.nn.Linear(2, 2, bias=False)
    held.weight = torch.nn.Parameter(FromValues(values=torch.zeros(2, 2)))
    with pytest.raises(tt.LoadError, match=r"Use load_state_dict\(dict\(tt.open\(path\)\)\)"):
        tt.load(held, path)
    held.load_state_dict(dict(tt.open(path)))
    assert torch.allclose(held.weight.dequantize(), layer.weight, atol=0.01)
