"""Models with random ties: ``find_ties`` finds exactly those, whatever the order of names."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchtether.ties.components import find_components
from torchtether.ties.records import check_ties, find_ties
from torchtether.ties.spans import member_view, span_tensor


@st.composite
def models(draw):
    """Draw random strided views over a few memories of 24 floats, and the elements that each covers."""
    memories = [torch.arange(24.0) + 100 * i for i in range(draw(st.integers(1, 3)))]
    model, covered = nn.Module(), {}
    for index in range(draw(st.integers(1, 7))):
        which = draw(st.integers(0, len(memories) - 1))
        if index and draw(st.booleans()) and draw(st.booleans()):
            name = draw(st.sampled_from(sorted(covered)))
            tensor, covers = getattr(model, name), covered[name]
        else:
            rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
            stride = draw(st.sampled_from([(columns, 1), (1, rows), (2, 5), (0, 1), (3, 2)]))
            last = (rows - 1) * stride[0] + (columns - 1) * stride[1]
            offset = draw(st.integers(0, 23 - last))
            view = memories[which].as_strided((rows, columns), stride, offset)
            tensor = nn.Parameter(view) if draw(st.booleans()) else view
            covers = {(which, int(e) % 100) for e in view.flatten()}
        name = f"t{index}"
        model.register_parameter(name, tensor) if isinstance(tensor, nn.Parameter) else model.register_buffer(
            name, tensor
        )
        covered[name] = covers
    return model, covered


def _groups(covered):
    """Return the connected components of "shares an element", by brute force."""
    groups = [{name} for name in covered]
    merged = True
    while merged:
        merged = False
        for one in groups:
            for two in groups:
                if one is not two and any(covered[a] & covered[b] for a in one for b in two):
                    one |= two
                    groups.remove(two)
                    merged = True
                    break
            if merged:
                break
    return sorted(sorted(group) for group in groups)


@given(models())
def test_components_are_the_connected_components_of_shared_elements(drawn):
    model, covered = drawn
    assert sorted(sorted(component.names) for component in find_components(model)) == _groups(covered)


@given(models())
def test_a_tie_says_how_to_make_every_alias_from_the_owner(drawn):
    """Each view of the record, laid over the owner, has the alias's very elements; and check_ties agrees."""
    model, _ = drawn
    ties = find_ties(model)
    for tie in ties:
        owner = getattr(model, tie.owner)
        for name, view in zip(tie.names, tie.views, strict=True):
            held = getattr(model, name)
            if view is None:
                assert torch.equal(held, owner)
                assert held.data_ptr() == owner.data_ptr()
            else:
                made = owner.as_strided(view.size, view.stride, owner.storage_offset() + view.offset)
                assert torch.equal(made, held)
                assert made.data_ptr() == held.data_ptr()
    check_ties(model, ties)


@given(models())
def test_a_moved_span_has_every_member(drawn):
    model, _ = drawn
    for component in find_components(model):
        span = span_tensor(component).double()
        for member in component.members:
            assert torch.equal(member_view(span, member), member.tensor.double())
