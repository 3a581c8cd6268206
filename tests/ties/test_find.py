"""find_ties and find_components see every kind of sharing, on the CPU and on meta."""

import mmap
import warnings

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.ties.models import MODELS, dtypes, fused, overlapping, six_way, transposed, two_way
from torchtether.ties.components import find_components, shared_components
from torchtether.ties.names import named_tensors
from torchtether.ties.records import find_ties
from torchtether.ties.spans import member_view, span_tensor

each_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
each_device = pytest.mark.parametrize("device", ["cpu", "meta"])


def _build(make, device):
    with torch.device(device):
        return make()


@each_device
@each_model
def test_ties_are_those_that_were_made(make, device):
    expected = [group.split() for group in MODELS[make].split("; ") if group]
    found = [list(tie.names) for tie in find_ties(_build(make, device))]
    assert [sorted(names) for names in found] == [sorted(names) for names in expected]
    assert [names[0] for names in found] == [names[0] for names in expected]


@each_device
@each_model
def test_every_name_is_in_one_component(make, device):
    model = _build(make, device)
    names = [name for component in find_components(model) for name in component.names]
    assert sorted(names) == sorted(named_tensors(model))


@each_device
@each_model
def test_member_views_rebuild_the_members(make, device):
    """The span of a component, seen through each member, is that member: same memory, same geometry."""
    for component in find_components(_build(make, device)):
        span = span_tensor(component)
        for member in component.members:
            made, held = member_view(span, member), member.tensor
            assert (made.dtype, made.shape, made.stride()) == (held.dtype, held.shape, held.stride())
            assert made.untyped_storage()._cdata == held.untyped_storage()._cdata or not held.numel()
            assert made.storage_offset() == held.storage_offset() or not held.numel()
            if component.nbytes:
                assert span.dim() == 1
                assert span.nbytes == component.nbytes


@each_model
def test_a_copied_span_keeps_the_ties(make):
    """What convert does: one copy of the span, every member a view of it."""
    model = make()
    before = find_ties(model)
    for component in find_components(model):
        span = span_tensor(component).clone()
        for member in component.members:
            values = member.tensor.detach().clone()
            made = member_view(span, member)
            assert torch.equal(made, values)
            for path in member.names:
                parent, _, leaf = path.rpartition(".")
                table = model.get_submodule(parent)._parameters
                if leaf in table:
                    table[leaf] = nn.Parameter(made) if made.is_floating_point() or made.is_complex() else made
                else:
                    model.get_submodule(parent)._buffers[leaf] = made
    after = find_ties(model)
    assert [t.names for t in after] == [t.names for t in before]
    assert [t.views for t in after] == [t.views for t in before]


def test_a_span_in_another_dtype_keeps_the_geometry():
    model = fused()
    (component,) = find_components(model)
    span = span_tensor(component).to(torch.bfloat16)
    for member in component.members:
        assert torch.equal(member_view(span, member), member.tensor.detach().to(torch.bfloat16))


def test_a_span_of_several_dtypes_is_bytes():
    (component,) = find_components(dtypes())
    span = span_tensor(component)
    assert component.dtype is None
    assert (span.dtype, span.numel()) == (torch.uint8, 32)
    moved = span.clone()
    for member in component.members:
        assert torch.equal(member_view(moved, member), member.tensor)


def test_geometry_of_views():
    (tie,) = find_ties(fused())
    assert tie.views[2] == tt.View(torch.float32, (4, 4), (4, 1), 16)
    (tie,) = find_ties(transposed())
    assert tie.views[1] == tt.View(torch.float32, (4, 6), (1, 4), 0)
    (tie,) = find_ties(overlapping())
    assert tie.views[1] == tt.View(torch.float32, (6,), (1,), 3)
    (tie,) = find_ties(dtypes())
    assert tie.views[2] == tt.View(torch.bfloat16, (5,), (1,), 2)


def test_the_owner_is_contiguous_and_a_parameter():
    """Whatever comes first: no transposed view beside the whole, and no wider buffer beside a parameter."""
    model = nn.Module()
    memory = torch.randn(6, 4)
    model.first = nn.Parameter(memory.t())
    model.whole = nn.Parameter(memory)
    bits = torch.randn(8)
    model.narrow = nn.Parameter(bits.view(torch.bfloat16))
    model.register_buffer("wide", bits)
    assert [tie.owner for tie in find_ties(model)] == ["whole", "narrow"]
    model.flat = nn.Parameter(memory.view(-1))
    assert find_ties(model)[0].owner == "whole"


def test_objects_and_storage_are_told_apart():
    model = two_way()
    model["again"] = nn.Linear(4, 6, bias=False)
    model["again"].weight = nn.Parameter(model["emb"].weight.data)
    (tie,) = find_ties(model)
    assert tie.names == ("emb.weight", "head.weight", "again.weight")
    assert tie.objects == (True, True, False)
    assert tie.views == (None, None, None)


def test_two_storages_over_one_memory_are_one_component():
    """As numpy, DLPack and shared memory make them: the storage objects differ, the addresses overlap."""
    memory = mmap.mmap(-1, 64)
    model = nn.Module()
    model.register_buffer("whole", torch.frombuffer(memory, dtype=torch.float32))
    model.register_buffer("part", torch.frombuffer(memory, dtype=torch.float32, offset=16, count=4))
    assert model.whole.untyped_storage()._cdata != model.part.untyped_storage()._cdata
    (tie,) = find_ties(model)
    assert tie.names == ("whole", "part")
    assert tie.views[1].offset == 4


def test_freed_memory_is_unknown_not_equal():
    model = untied_pair = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for layer in untied_pair:
        layer.weight.untyped_storage().resize_(0)
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr() == 0
    assert find_ties(model) == ()


def test_sparse_and_lazy_tensors_stand_alone():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("again", model.sparse)
    with warnings.catch_warnings(action="ignore"):
        model.register_buffer("csr", torch.eye(3).to_sparse_csr())
    assert [tie.names for tie in find_ties(model)] == [("sparse", "again")]


def test_weights_are_tied_by_their_parts():
    weight = tt.Weight.encode(torch.randn(6, 4), tt.int8())
    model = nn.Module()
    model.a = nn.Parameter(weight, requires_grad=False)
    model.b = nn.Parameter(weight.detach(), requires_grad=False)
    model.c = nn.Parameter(weight.t(), requires_grad=False)
    model.d = nn.Parameter(weight.clone(), requires_grad=False)
    (tie,) = find_ties(model)
    assert tie.names == ("a", "b", "c")
    assert tie.objects == (True, False, False)
    assert tie.views == (None, None, tt.View(torch.float32, (4, 6), (1, 4)))
    component = find_components(model)[0]
    moved = span_tensor(component).clone()
    again = [member_view(moved, member) for member in component.members]
    assert torch.equal(again[2].dequantize(), weight.t().dequantize())
    assert again[0].parts["qdata"].data_ptr() == again[2].parts["qdata"].data_ptr() == moved.parts["qdata"].data_ptr()


def test_rows_of_a_weight_have_their_offset_and_no_span():
    weight = tt.Weight.encode(torch.randn(6, 4), tt.int8())
    model = nn.Module()
    model.whole = nn.Parameter(weight, requires_grad=False)
    model.rows = nn.Parameter(weight[2:4], requires_grad=False)
    (tie,) = find_ties(model)
    assert tie.views[1] == tt.View(torch.float32, (2, 4), (4, 1), 8)
    with pytest.raises(tt.TieError, match=r"^rows: shares only a part of its memory with whole"):
        span_tensor(find_components(model)[0])


def test_a_plain_weight_is_tied_like_the_tensor_it_wraps():
    model = fused()
    model.q = nn.Parameter(tt.Weight.encode(model.q, tt.Plain()))
    (tie,) = find_ties(model)
    assert tie.names == ("qkv", "q", "k", "v")
    (component,) = find_components(model)
    made = member_view(span_tensor(component).double(), component.members[1])
    assert isinstance(made, tt.Weight)
    assert torch.equal(made.dequantize(), model.q.dequantize().double())


def test_lazy_conjugates_of_shared_memory_are_refused():
    memory = torch.randn(3, dtype=torch.complex64)
    model = nn.Module()
    model.register_buffer("a", memory)
    model.register_buffer("b", memory.conj())
    with pytest.raises(tt.TieError, match=r"^b: is a lazy conjugate"):
        find_ties(model)


def test_order_is_that_of_the_model():
    assert find_ties(six_way()) == find_ties(six_way())
    assert [tie.owner for tie in find_ties(six_way())] == ["head0.weight", "head0.bias"]


def test_a_plain_tensor_over_a_part_of_a_weight_shares_its_memory():
    model = nn.Linear(4, 4)
    tt.quantize(model, "int8")
    model.register_buffer("codes", model.weight.parts["qdata"][1:3])
    (component,) = [c for c in find_components(model) if len(c.names) > 1]
    assert component.names == ("weight", "codes")


@each_model
def test_shared_components_are_the_components_with_several_names(make):
    model = _build(make, "cpu")
    assert [c.names for c in shared_components(model)] == [c.names for c in find_components(model) if len(c.names) > 1]
