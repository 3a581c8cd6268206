"""Hypothesis strategies for shapes, dtypes, values, and models with ties.

Hypothesis draws shapes, dtypes, patterns and seeds, and torch draws the numbers, so that failing examples shrink to
short descriptions.  Needs the package ``hypothesis``, which torchtether itself does not: import this module by name.

>>> from hypothesis import given, settings
>>> from torchtether.testing import strategies
>>> @settings(max_examples=3, deadline=None, database=None)
... @given(strategies.tied_models())
... def test_mine(drawn):
...     assert len(drawn.ties) == len(__import__("torchtether").find_ties(drawn.model))
>>> test_mine()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from ..geometry.views import Shape
from .draws import FLOATS, PATTERNS, filled

Draw = Callable[[st.SearchStrategy[Any]], Any]


def dtypes(among: Sequence[torch.dtype] = FLOATS) -> st.SearchStrategy[torch.dtype]:
    """Draw the dtype of values: one of ``among``."""
    return st.sampled_from(tuple(among))


@st.composite
def shapes(draw: Draw, ranks: Sequence[int] = (1, 2, 3), smallest: int = 1, largest: int = 70) -> Shape:
    """Draw the shape of a weight: of any rank in ``ranks``, the last size up to ``largest``, other sizes small."""
    rank = draw(st.sampled_from(tuple(ranks)))
    leading = [draw(st.integers(smallest, max(12, smallest))) for _ in range(rank - 1)]
    return (*leading, draw(st.integers(smallest, largest)))


@st.composite
def tensors(
    draw: Draw,
    ranks: Sequence[int] = (1, 2, 3),
    dtypes: Sequence[torch.dtype] = FLOATS,
    patterns: Sequence[str] = PATTERNS,
    smallest: int = 1,
    largest: int = 70,
) -> Tensor:
    """Draw a finite float tensor of any rank in ``ranks``, any dtype and any pattern."""
    shape = draw(shapes(ranks, smallest, largest))
    dtype, pattern = draw(st.sampled_from(tuple(dtypes))), draw(st.sampled_from(tuple(patterns)))
    return filled(shape, dtype, pattern, draw(st.integers(0, 2**31 - 1)))


def matrices(**kwargs: Any) -> st.SearchStrategy[Tensor]:
    """Draw a float matrix of any pattern; arguments as for ``tensors``."""
    return tensors(ranks=(2,), **kwargs)


class TiedModel(NamedTuple):
    """Hold a model, and the names of each group of its parameters and buffers that share memory."""

    model: nn.Module
    ties: tuple[frozenset[str], ...]


@st.composite
def tied_models(draw: Draw, kinds: Sequence[str] = ("object", "storage", "transposed", "rows", "buffer")) -> TiedModel:
    """Draw a model of a few layers, in each of which two tensors are tied in one of these ways, or not at all.

    ``"object"``: one Parameter under two names; ``"storage"``: two Parameters over one memory; ``"transposed"`` and
    ``"rows"``: Parameters that are views of others; ``"buffer"``: a buffer over a parameter's memory.
    """
    model = nn.Module()
    ties = []
    rows, columns = draw(st.integers(2, 6)), draw(st.integers(2, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    for i in range(draw(st.integers(1, 4))):
        layer = nn.Module()
        owner = nn.Parameter(torch.randn(rows, columns, generator=generator), requires_grad=draw(st.booleans()))
        layer.register_parameter("weight", owner)
        layer.register_parameter("bias", nn.Parameter(torch.zeros(rows)))
        model.add_module(f"layer{i}", layer)
        kind = draw(st.sampled_from(("none", *kinds)))
        if kind == "none":
            continue
        _share(layer, owner, kind)
        ties.append(frozenset({f"layer{i}.weight", f"layer{i}.alias"}))
    return TiedModel(model, tuple(ties))


def _share(layer: nn.Module, owner: nn.Parameter, kind: str) -> None:
    if kind == "buffer":
        layer.register_buffer("alias", owner.detach())
        return
    if kind == "object":
        layer.register_parameter("alias", owner)
        return
    views = {"storage": owner.data, "transposed": owner.data.t(), "rows": owner.data[1:]}
    layer.register_parameter("alias", nn.Parameter(views[kind], requires_grad=owner.requires_grad))
