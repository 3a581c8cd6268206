"""``weight.data = tensor``, as PEFT, diffusers and transformers assign it: the table of ``ops/data.py``."""

import weakref

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torchtether as tt
from tests.catalog import each_scheme


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(scheme=None, shape=(16, 64), **kwargs):
    return tt.Weight.encode(rand(*shape), scheme or tt.int8(), **kwargs)


def parameter(scheme=None, requires_grad=True, **kwargs):
    return torch.nn.Parameter(weight_of(scheme, **kwargs), requires_grad=requires_grad)


def test_a_weight_gives_its_parts_scheme_and_dtype_and_the_object_keeps_its_names():
    tie = tt.Tie(("a", "b"))
    weight = parameter(tie=tie)
    weight.mine, hooked, ref = "mine", [], weakref.ref(weight)
    weight.register_hook(lambda grad: hooked.append(grad.dtype))
    other = weight_of(tt.int4(32)).to(torch.bfloat16)
    weight.data = other
    assert torch.equal(weight.dequantize(), other.dequantize())
    assert weight.spec == other.spec.replace(tie=tie)
    assert weight.dtype == torch.bfloat16
    assert weight.parts["qdata"].data_ptr() == other.parts["qdata"].data_ptr()
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.requires_grad
    assert weight.mine == "mine"
    assert ref() is weight
    weight.dequantize().sum().backward()
    assert hooked == [torch.bfloat16]
    assert weight.grad.dtype == torch.bfloat16


def test_values_are_encoded_in_the_held_scheme_on_their_device_and_in_their_dtype():
    tie = tt.Tie(("a", "b"))
    weight = parameter(tt.int4(32), tie=tie)
    weight.set_activations("int8")
    values = rand(16, 64, seed=1).bfloat16()
    weight.data = values
    assert type(weight) is tt.Weight
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.spec == tt.WeightSpec.of((16, 64), torch.bfloat16, tt.int4(32), tie).replace(activations="int8")
    assert torch.equal(weight.dequantize(), tt.Weight.encode(values, tt.int4(32)).dequantize())


def test_memory_that_others_see_is_not_written_to():
    """People keep ``weight.data`` aside, give the Weight other values, and put it back."""
    weight = parameter()
    before, kept = weight.dequantize().detach(), weight.data
    weight.data = weight.data * 2
    assert torch.equal(kept.dequantize(), before)
    weight.data = kept
    assert torch.equal(weight.dequantize(), before)
    assert weight.parts["qdata"].data_ptr() == kept.parts["qdata"].data_ptr()


def test_a_transposed_weight_keeps_its_order():
    weight = torch.nn.Parameter(weight_of().t(), requires_grad=False)
    values = rand(64, 16, seed=1)
    weight.data = values
    assert weight.stride() == (1, 64)
    assert torch.equal(weight.dequantize(), tt.Weight.encode(values.t(), tt.int8()).t().dequantize())


def test_views_of_one_memory_stay_tied():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(8, 8)})
    model["b"].weight = torch.nn.Parameter(model["a"].weight.detach().t())
    tt.quantize(model, "int8")
    ties = tt.find_ties(model)
    assert ties
    values = rand(8, 8)
    model["a"].weight.data = values
    assert tt.find_ties(model) == ties
    assert torch.equal(model["b"].weight.t(), tt.Weight.encode(values, tt.int8()))
    before = model["a"].weight.dequantize()
    for given in (values.bfloat16(), rand(4, 8)):
        with pytest.raises(tt.TieError, match="shares memory"):
            model["a"].weight.data = given
    assert torch.equal(model["a"].weight, before)


@pytest.mark.parametrize("shape", [(20, 64), (12, 64), (2, 4, 64), (0,)])
def test_another_shape_is_taken_as_of_a_plain_tensor(shape):
    """``resize_token_embeddings`` gives the old embedding the values of the new one."""
    weight = parameter()
    values = rand(*shape)
    weight.data = values
    assert weight.shape == shape
    assert torch.equal(weight.dequantize(), tt.Weight.encode(values, tt.int8()).dequantize())
    weight.data = weight_of(tt.nf4())
    assert weight.scheme == tt.nf4()
    assert weight.shape == (16, 64)


@each_scheme
def test_what_cannot_be_taken_changes_nothing(row):
    weight = torch.nn.Parameter(tt.Weight.encode(rand(16, 64), row.scheme))
    before, spec, fields = weight.dequantize().detach(), weight.spec, dict(weight.__dict__)
    meta = tt.Weight.encode(rand(16, 64).to("meta"), row.scheme)
    refused = [meta, meta.dequantize(), torch.ones(16, 64, dtype=torch.int32)]
    if not row.scheme.transparent:
        refused += [torch.full((16, 64), torch.nan), torch.ones(()), rand(16, 64).to(torch.float8_e4m3fn)]
    for given in refused:
        with pytest.raises((tt.TetherError, RuntimeError)) as caught:
            weight.data = given
        assert "\n" not in str(caught.value)
        assert weight.spec == spec
        assert weight.device.type == "cpu"
        assert weight.__dict__ == fields
        assert torch.equal(weight.dequantize(), before)


@each_scheme
def test_other_devices_and_back(row):
    """torch allows all devices but meta; without one of them, they are fake."""
    real = tt.Weight.encode(rand(16, 64), row.scheme)
    with FakeTensorMode() as mode:
        weight = torch.nn.Parameter(real.map(mode.from_tensor), False)
        for device, dtype in (("cuda:0", torch.float32), ("cuda:0", torch.bfloat16), ("cpu", torch.float32)):
            weight.data = weight.data.to(device, dtype, non_blocking=True)
            assert weight.device == torch.device(device)
            assert weight.dtype == dtype
            assert {part.device for part in weight.parts.values()} == {torch.device(device)}
            assert isinstance(weight, torch.nn.Parameter)
        assert weight.dequantize().dtype == torch.float32


def test_a_subclass_of_others_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    weight = parameter()
    with pytest.raises(tt.UnsupportedOpError, match="cannot become a TwoTensor"):
        weight.data = TwoTensor(rand(16, 64), rand(16, 64))
    assert torch.equal(weight.dequantize(), weight_of().dequantize())


@each_scheme
def test_a_stream_is_recorded_for_every_part(row, monkeypatch):
    """On a processor there is nothing to record, so a stand-in notes what it is asked."""
    weight, library, found = tt.Weight.encode(rand(16, 64), row.scheme), torch.library.Library("aten", "IMPL"), []
    try:
        library.impl("record_stream", lambda tensor, stream: found.append(tensor.data_ptr()), "CPU")
        assert weight.record_stream(torch.Stream(device="cpu")) is None
    finally:
        library._destroy()
    assert found == [part.data_ptr() for part in weight.parts.values()]


@each_scheme
def test_a_number_tells_the_memory_of_weights_apart(row):
    one, two = (tt.Weight.encode(rand(16, 64), row.scheme) for _ in range(2))
    assert 0 < one.data_ptr() != two.data_ptr() > 0
    assert one.data_ptr() == one.detach().data_ptr() == one.t().data_ptr() == torch.nn.Parameter(one).data_ptr()
    assert one.clone().data_ptr() != one.data_ptr()
    assert one.to("meta").data_ptr() == 0
    held = one.parts["tensor"].data_ptr() if row.scheme.transparent else 0
    assert not held or one.data_ptr() == held


@each_scheme
def test_a_weight_is_made_of_the_type_of_another(row):
    """accelerate makes a parameter over other data so: ``type(parameter)(data, requires_grad=...)``."""
    old = torch.nn.Parameter(tt.Weight.encode(rand(16, 64), row.scheme))
    for given in (old, old.detach(), old.to("meta")):
        for requires_grad in (True, False):
            made = type(old)(given, requires_grad=requires_grad)
            assert isinstance(made, torch.nn.Parameter)
            assert made.requires_grad is requires_grad
            assert made.spec == given.spec
            assert made.device == given.device
            assert made.data_ptr() == given.data_ptr()
    with pytest.raises(
        tt.ArgumentError, match=r"parts: is a Tensor without a spec, so its scheme is not known\. Use Weight\.encode"
    ):
        type(old)(rand(16, 64), requires_grad=False)
    with pytest.raises(tt.ArgumentError, match=r"are a Tensor and a str, not .* To encode values, use Weight\.encode"):
        type(old)(rand(16, 64), "int8")


@each_scheme
@pytest.mark.parametrize("count", [20, 12])
def test_rows_that_stay_keep_their_values_where_rows_share_no_part(row, count):
    weight = torch.nn.Parameter(tt.Weight.encode(rand(16, 64), row.scheme), False)
    values = weight.dequantize()
    given = torch.cat([values, rand(4, 64)])[:count]
    weight.data = given
    rows = min(count, 16)
    fresh = tt.Weight.encode(given, row.scheme).dequantize()[:rows]
    kept = weight.dequantize()[:rows]
    assert torch.equal(kept, values[:rows]) or torch.equal(kept, fresh)
    if row.scheme in (tt.int8(), tt.nf4()):
        assert torch.equal(kept, values[:rows])
