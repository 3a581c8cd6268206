"""Test cases, and the laws that every scheme keeps; the tests of each family run them over its schemes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from torchtether.errors import SchemeError
from torchtether.geometry.views import Shape
from torchtether.schemes import Parts, Scheme, blocks, scheme_from_json

PATTERNS = (
    "normal",
    "tiny",
    "small",
    "large",
    "spike",
    "positive",
    "negative",
    "zeros",
    "zero rows",
    "constant",
    "ties",
    "mixed",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def slow_if_searching(schemes: Sequence[Scheme]) -> list[object]:
    """Return the schemes as parameters; those that look for their scales take long, and are slow."""
    searching = [getattr(scheme, "fit", "range") != "range" for scheme in schemes]
    return [pytest.param(one, marks=[pytest.mark.slow] * slow) for one, slow in zip(schemes, searching, strict=True)]


def slow_after_the_first(schemes: Sequence[Scheme]) -> list[object]:
    """Return the schemes of one family as parameters; all but the first are slow: each compiles several graphs."""
    return [pytest.param(one, marks=[pytest.mark.slow] * (i > 0)) for i, one in enumerate(schemes)]


def make(shape: Shape, pattern: str, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of a known pattern; finite in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if pattern == "tiny":
        x = x * (1e-4 if dtype == torch.float16 else 1e-39)
    elif pattern == "small":
        x = x * 1e-6  # scales in float16 are subnormal
    elif pattern == "large":
        x = x * (1e3 if dtype == torch.float16 else 1e30)
    elif pattern == "spike":
        x = x * (1 + 500 * (torch.rand(shape, generator=generator) < 0.05))
    elif pattern in ("positive", "negative"):
        x = x.abs() * (1 if pattern == "positive" else -1)
    elif pattern == "zeros":
        x = x * 0
    elif pattern == "zero rows":
        x = x * (torch.rand((*shape[:-1], 1), generator=generator) < 0.5)
    elif pattern == "constant":
        x = torch.full(shape, 0.3)
    elif pattern == "ties":
        x = torch.randint(-8, 9, shape, generator=generator) / 2
    elif pattern == "mixed":
        x = x * 10.0 ** torch.randint(-3, 3, (*shape[:-1], 1), generator=generator)
    return x.to(dtype)


@st.composite
def shapes(draw: st.DrawFn, least: int = 1, most: int = 3) -> Shape:
    lead = draw(st.lists(st.integers(1, 5), min_size=max(least, 1) - 1, max_size=most - 1))
    return (*lead, draw(st.sampled_from((1, 2, 5, 8, 13, 16, 31, 32, 40, 64, 96))))


@st.composite
def values(draw: st.DrawFn, least: int = 1, dtypes: Sequence[torch.dtype] = DTYPES) -> Tensor:
    """A tensor by its facts: shape, pattern, dtype and seed."""
    pattern, dtype = draw(st.sampled_from(PATTERNS)), draw(st.sampled_from(dtypes))
    return make(draw(shapes(least)), pattern, draw(st.integers(0, 2**31 - 1)), dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, the sign of zero included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind)) if a.dim() else bool(a == b)


def assert_same_parts(a: Parts, b: Parts, names: Sequence[str] = ()) -> None:
    for name in names or a.keys() | b.keys():
        assert same(a[name], b[name]), name


def check_layout(scheme: Scheme, w: Tensor) -> None:
    """``encode`` gives what ``layout`` says, on meta too, and ``nbytes`` counts it."""
    layout, parts = scheme.layout(tuple(w.shape)), scheme.encode(w)
    assert list(parts) == list(layout)
    for some in (parts, scheme.encode(w.to("meta"))):
        assert [(p.shape, p.dtype) for p in some.values()] == [(p.shape, p.dtype) for p in layout.values()]
    assert all(part.is_contiguous() for part in parts.values())
    assert scheme.nbytes(tuple(w.shape), w.dtype) == sum(p.numel() * p.dtype.itemsize for p in parts.values())


def check_bound(scheme: Scheme, w: Tensor) -> None:
    """The error is within the stated bound, elementwise, and nothing is NaN; zeros stay zeros."""
    parts = scheme.encode(w)
    decoded, bound = scheme.decode(parts, tuple(w.shape), torch.float32), scheme.bound(parts, tuple(w.shape))
    assert bound.dtype == torch.float32
    assert torch.broadcast_shapes(bound.shape, w.shape) == w.shape
    error = (decoded.double() - w.double()).abs()
    assert bool((error <= bound.double() + 2.0**-149).all()), (error - bound).max()
    assert not (w.any() or decoded.any()) or bool(w.any())


def check_dtypes(scheme: Scheme, w: Tensor) -> None:
    """Decoding rounds once, and starts from float32 whatever the source."""
    shape, parts = tuple(w.shape), scheme.encode(w)
    assert_same_parts(parts, scheme.encode(w.float()))
    exact = scheme.decode(parts, shape, torch.float32)
    for dtype in DTYPES:
        decoded = scheme.decode(parts, shape, dtype)
        assert decoded.is_contiguous()
        assert same(decoded, exact.to(dtype))


def check_like(scheme: Scheme, w: Tensor) -> None:
    """Encoding decoded values with the held scales keeps every part."""
    parts = scheme.encode(w)
    again = scheme.encode(scheme.decode(parts, tuple(w.shape), torch.float32), like=parts)
    assert_same_parts(parts, again)


def check_strides(scheme: Scheme, w: Tensor) -> None:
    """Strides of the source do not matter."""
    parts = scheme.encode(w)
    wide = torch.stack((w, w * 0 + 1), -1)[..., 0]
    turned = w.movedim(-1, 0).contiguous().movedim(0, -1)
    flipped = w.transpose(0, -1).contiguous().transpose(0, -1)
    for other in (wide, turned, flipped):
        assert_same_parts(parts, scheme.encode(other))


def check_chunks(scheme: Scheme, w: Tensor, monkeypatch, chunk: int) -> None:
    """Working in small pieces changes no bit."""
    shape, parts = tuple(w.shape), scheme.encode(w)
    decoded = scheme.decode(parts, shape, torch.bfloat16)
    turned = w.movedim(-1, 0).contiguous().movedim(0, -1)
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "CHUNK", chunk)
        assert_same_parts(parts, scheme.encode(w))
        assert_same_parts(parts, scheme.encode(turned))
        assert same(decoded, scheme.decode(parts, shape, torch.bfloat16))


def check_decode_into(scheme: Scheme, w: Tensor) -> None:
    """Some rows, decoded into a buffer, are those rows of the decoded tensor, and nothing else is written."""
    shape, parts = tuple(w.shape), scheme.encode(w)
    for dtype in DTYPES:
        whole = scheme.decode(parts, shape, dtype).reshape(-1, shape[-1])
        count = whole.shape[0]
        some = {(0, count), (0, 0), (count // 3, count), (count // 2, count // 2 + 1), (0, max(count - 1, 1))}
        for start, stop in sorted(some):
            room = torch.full((stop - start + 2, shape[-1]), 7.0, dtype=dtype)
            scheme.decode_into(parts, shape, start, stop, room[1:-1])
            assert same(room[1:-1], whole[start:stop])
            assert bool((room[0] == 7).all() and (room[-1] == 7).all())


def check_gather(scheme: Scheme, w: Tensor, seed: int) -> None:
    """Gathering slices is indexing the decoded tensor."""
    shape, parts = tuple(w.shape), scheme.encode(w)
    index = torch.randint(0, shape[0], (5,), generator=torch.Generator().manual_seed(seed))
    for dtype in (torch.float32, torch.bfloat16):
        assert same(scheme.gather(parts, shape, index, dtype), scheme.decode(parts, shape, dtype)[index])
    assert scheme.gather(parts, shape, index[:0], torch.float32).shape == (0, *shape[1:])


def cut(scheme: Scheme, parts: Parts, shape: Shape, start: int, stop: int) -> dict[str, Tensor] | None:
    """The parts of the rows ``start`` to ``stop`` by the rule of ``Part.span``; None where it cuts a block."""
    each = math.prod(shape[1:])
    taken = {}
    for name, (_, _, span) in scheme.layout(shape).items():
        if span == 0:
            taken[name] = parts[name]
        elif (start * each) % span or ((stop * each) % span and stop != shape[0]):
            return None
        else:
            taken[name] = parts[name][start * each // span : -(-stop * each // span)]
    return taken


def check_cuts(scheme: Scheme, w: Tensor) -> int:
    """Every legal cut of rows is a valid encoding of the cut tensor; returns how many cuts are legal."""
    shape, parts = tuple(w.shape), scheme.encode(w)
    decoded, legal = scheme.decode(parts, shape, torch.float32), 0
    for start in range(shape[0]):
        for stop in range(start + 1, shape[0] + 1):
            taken = cut(scheme, parts, shape, start, stop)
            if taken is None:
                continue
            legal += 1
            new = (stop - start, *shape[1:])
            assert [p.shape for p in taken.values()] == [p.shape for p in scheme.layout(new).values()]
            assert same(scheme.decode(taken, new, torch.float32), decoded[start:stop])
    assert cut(scheme, parts, shape, 0, shape[0]) is not None
    return legal


def check_views(scheme: Scheme, w: Tensor, new: Shape) -> None:
    """Where ``can_view`` says so, reshaped parts decode to the reshaped values."""
    shape, parts = tuple(w.shape), scheme.encode(w)
    assert scheme.can_view(shape, shape)
    if scheme.can_view(shape, new):
        viewed = {name: parts[name].view(part.shape) for name, part in scheme.layout(new).items()}
        decoded = scheme.decode(viewed, new, torch.float32)
        assert same(decoded, scheme.decode(parts, shape, torch.float32).view(new))


def check_not_finite(scheme: Scheme) -> None:
    for bad, said in ((math.nan, "1 nan, 0 inf"), (math.inf, "0 nan, 1 inf"), (-math.inf, "0 nan, 1 inf")):
        w = torch.ones(4, 32)
        w[2, 3] = bad
        with pytest.raises(SchemeError, match=re.escape(f"1 of 128 values are not finite ({said})")):
            scheme.encode(w)


def check_empty(scheme: Scheme) -> None:
    """Tensors without elements have parts, and decode to themselves."""
    for shape in ((0,), (0, 8), (3, 0), (2, 0, 8)):
        parts = scheme.encode(torch.empty(shape))
        assert [p.shape for p in parts.values()] == [p.shape for p in scheme.layout(shape).values()]
        assert scheme.decode(parts, shape, torch.float16).shape == shape
        assert scheme.bound(parts, shape).numel() <= 1


def check_json(scheme: Scheme) -> None:
    assert scheme_from_json(json.loads(json.dumps(scheme.to_json()))) == scheme


def check_compiles(scheme: Scheme, w: Tensor) -> None:
    """Encoding and decoding are one graph each, and give the same bits."""
    parts, shape = scheme.encode(w), tuple(w.shape)
    torch._dynamo.reset()  # families share code, and the compiler counts by code how often it was compiled
    assert_same_parts(torch.compile(scheme.encode, backend="aot_eager", fullgraph=True)(w), parts)
    compiled = torch.compile(scheme.decode, backend="aot_eager", fullgraph=True)
    assert same(compiled(parts, shape, torch.bfloat16), scheme.decode(parts, shape, torch.bfloat16))


def check_parts(scheme, w):
    """Every law of parts that needs no more than values."""
    for law in (check_layout, check_bound, check_dtypes, check_decode_into, check_cuts, check_strides):
        law(scheme, w)
    check_gather(scheme, w, 0)
