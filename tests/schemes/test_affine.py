"""Affine: the laws over its fields, and its own promises."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.schemes import laws
from tests.strategies import examples
from torchtether.errors import SchemeError
from torchtether.schemes import Affine

SCHEMES = (
    Affine(),
    Affine(bits=8, symmetric=False),
    Affine(bits=8, signed=False, block=(1, 32)),
    Affine(bits=8, signed=False, symmetric=False, block=(None, None)),
    Affine(bits=8, narrow_range=True, block=(None, None)),
    Affine(bits=8, block=(None, 16)),
    Affine(bits=8, reciprocal=True, scale_dtype=torch.bfloat16),
    Affine(bits=4, block=(1, 32)),
    Affine(bits=4, symmetric=False, block=(1, 32)),
    Affine(bits=4, signed=False, symmetric=False, block=(1, 8), scale_dtype=torch.bfloat16),
    Affine(bits=4, block=(2, 16)),
    Affine(bits=4, symmetric=False, block=(3, None), scale_dtype=torch.float16),
    Affine(bits=4, symmetric=False, block=(1, 8), act_order=True),
    Affine(bits=3, symmetric=False, block=(1, 16)),
    Affine(bits=5, narrow_range=True, block=(1, 24)),
    Affine(bits=2, symmetric=False, block=(1, 8)),
    Affine(bits=1, symmetric=False, block=(1, 8)),
    Affine(bits=1),
    Affine(bits=4, block=(1, 16), fit="mse"),
    Affine(bits=3, symmetric=False, block=(2, 8), fit="mse"),
)
every_scheme = pytest.mark.parametrize(
    "scheme", laws.slow_if_searching(SCHEMES), ids=lambda s: "-".join(map(str, s.to_json().values()))
)
a_scheme = st.sampled_from(SCHEMES)


def fits(scheme, w):
    """Whether the scheme takes this tensor: blocks of rows and act_order need a matrix; float16 scales a range."""
    if (scheme.act_order or (scheme.block[0] or 1) > 1) and w.dim() < 2:
        return False
    return scheme.scale_dtype != torch.float16 or float(w.abs().max()) < 60000


@every_scheme
@examples(12)
@given(w=laws.values(), data=st.data())
def test_laws(scheme, w, data):
    if not fits(scheme, w):
        w = laws.make((4, 40), "normal", 0)
    laws.check_layout(scheme, w)
    laws.check_bound(scheme, w)
    laws.check_dtypes(scheme, w)
    laws.check_like(scheme, w)
    laws.check_gather(scheme, w, 0)
    laws.check_decode_into(scheme, w)
    laws.check_cuts(scheme, w)
    laws.check_strides(scheme, w)
    laws.check_views(
        scheme, w, data.draw(st.sampled_from(((*w.shape[:-1], 1, w.shape[-1]), (w.numel(),), (1, *w.shape))))
    )


@every_scheme
@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 24), (2, 1, 16), (33,)], ids=str)
@pytest.mark.parametrize("chunk", [1, 90])
def test_small_pieces_change_no_bit(scheme, shape, chunk, monkeypatch):
    w = laws.make(shape, "mixed", 3)
    if fits(scheme, w):
        laws.check_chunks(scheme, w, monkeypatch, chunk)


@every_scheme
def test_values_that_are_not_finite_are_refused_by_count(scheme):
    laws.check_not_finite(scheme)


@every_scheme
def test_records_survive_json(scheme):
    laws.check_json(scheme)


@every_scheme
def test_empty_tensors(scheme):
    if not scheme.act_order and scheme.block[0] in (None, 1):
        laws.check_empty(scheme)


@pytest.mark.parametrize(
    "scheme", laws.slow_after_the_first([SCHEMES[0], SCHEMES[8], SCHEMES[10], SCHEMES[12], SCHEMES[13]])
)
def test_encode_and_decode_are_one_graph_each(scheme):
    laws.check_compiles(scheme, laws.make((6, 40), "normal", 1))


@given(w=laws.values(dtypes=(torch.float32,)), bits=st.integers(2, 8), width=st.sampled_from((None, 8, 32)))
def test_a_narrow_range_keeps_its_codes_when_encoded_afresh(w, bits, width):
    """The largest value is the code at the end of the range exactly, so the scale comes back and the codes with it."""
    scheme = Affine(bits=bits, narrow_range=True, block=(1, width))
    parts = scheme.encode(w)
    again = scheme.encode(scheme.decode(parts, tuple(w.shape), torch.float32))
    laws.assert_same_parts(parts, again, ["qdata"])


@given(w=laws.values(dtypes=(torch.float32,)), bits=st.integers(2, 8), symmetric=st.booleans())
def test_encoding_decoded_values_afresh_stays_within_the_bound(w, bits, symmetric):
    """The full symmetric range moves its scale each time; the error of each time is still within what it states."""
    scheme, shape = Affine(bits=bits, symmetric=symmetric, block=(1, 16)), tuple(w.shape)
    decoded = scheme.decode(scheme.encode(w), shape, torch.float32)
    laws.check_bound(scheme, decoded)


@given(w=laws.values(least=2), bits=st.integers(1, 8), symmetric=st.booleans(), signed=st.booleans())
def test_decoding_follows_the_contract(w, bits, symmetric, signed):
    """Codes minus zero, exactly; one float32 product; one rounding: recomputed in float64 from the parts."""
    scheme = Affine(bits=bits, symmetric=symmetric, signed=signed, block=(1, 8))
    parts, shape = scheme.encode(w), tuple(w.shape)
    stored = parts["qdata"].to(torch.int64)
    if bits < 8:
        stream = (stored.unsqueeze(-1) >> torch.arange(8)) & 1
        stream = stream.flatten(-2)[..., : shape[-1] * bits].unflatten(-1, (shape[-1], bits))
        stored = (stream << torch.arange(bits)).sum(-1)
    offset = 0 if bits == 8 and signed else 1 << (bits - 1)
    zero = (
        parts["zero_point"].to(torch.int64) if not symmetric else torch.zeros(parts["scale"].shape, dtype=torch.int64)
    )
    zero = zero - (1 << (bits - 1)) if not symmetric and not signed else zero
    column = torch.arange(shape[-1]) // 8
    exact = (stored - offset - zero[..., column]).double() * parts["scale"].double()[..., column]
    assert torch.equal(scheme.decode(parts, shape, torch.float32), exact.float())


@given(w=laws.values(least=2), bits=st.sampled_from((2, 4, 8)), symmetric=st.booleans())
def test_signed_and_unsigned_say_the_same(w, bits, symmetric):
    signed = Affine(bits=bits, symmetric=symmetric, block=(1, 16))
    unsigned = replace(signed, signed=False)
    shape = tuple(w.shape)
    a, b = signed.encode(w), unsigned.encode(w)
    assert laws.same(signed.decode(a, shape, torch.float32), unsigned.decode(b, shape, torch.float32))
    half = 1 << (bits - 1)
    if not symmetric:
        assert torch.equal(a["zero_point"].int() + half, b["zero_point"].int())
    assert torch.equal(a["qdata"].int() + (half if bits == 8 else 0), b["qdata"].int())


def test_act_order_gives_each_column_the_scale_of_its_group():
    w = laws.make((5, 24), "mixed", 0) * torch.logspace(-2, 2, 24)
    order = torch.argsort(torch.rand(24, generator=torch.Generator().manual_seed(0)))
    g_idx = torch.empty(24, dtype=torch.int64)
    g_idx[order] = torch.arange(24) // 8
    scheme, sorted_scheme = Affine(bits=4, block=(1, 8), act_order=True), Affine(bits=4, block=(1, 8))
    parts = scheme.encode(w, g_idx=g_idx)
    grouped = sorted_scheme.encode(w[:, order])
    assert parts["g_idx"].dtype == torch.int32
    assert torch.equal(parts["scale"], grouped["scale"])
    decoded = scheme.decode(parts, (5, 24), torch.float32)
    assert torch.equal(decoded[:, order], sorted_scheme.decode(grouped, (5, 24), torch.float32))
    laws.assert_same_parts(parts, scheme.encode(decoded, like=parts))
    assert bool(((decoded - w).abs() <= scheme.bound(parts, (5, 24))).all())


@pytest.mark.parametrize("g_idx", [torch.zeros(3), torch.full((16,), 2), torch.full((16,), -1), torch.zeros(16)])
def test_an_order_that_names_no_group_is_refused(g_idx):
    with pytest.raises(SchemeError, match="g_idx must hold 16 group numbers below 2"):
        Affine(block=(1, 8), act_order=True).encode(torch.ones(2, 16), g_idx=g_idx)


def test_an_order_without_act_order_is_refused():
    with pytest.raises(SchemeError, match="without act_order"):
        Affine(block=(1, 8)).encode(torch.ones(2, 16), g_idx=torch.zeros(16, dtype=torch.int32))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bits": 0}, "bits must be an int from 1 to 8, got 0"),
        ({"bits": True}, "bits must be an int from 1 to 8, got True"),
        ({"block": (0, 8)}, "block must be"),
        ({"block": 128}, "block must be"),
        ({"block": [1, 8]}, "block must be"),
        ({"scale_dtype": torch.int8}, "must be one of torch.float32, torch.bfloat16, torch.float16, got torch.int8"),
        ({"scale_dtype": "float16"}, "scale_dtype must be one of .*, torch.float16, got 'float16'. Give one of them"),
        ({"narrow_range": True, "symmetric": False}, "narrow_range needs a symmetric scheme"),
        ({"symmetric": "no"}, "symmetric must be True or False, got 'no'"),
        ({"signed": None}, "signed must be True or False, got None"),
        ({"reciprocal": 2}, "reciprocal must be True or False, got 2"),
        ({"act_order": True}, "act_order needs groups of columns"),
    ],
)
def test_fields_are_checked(fields, said):
    with pytest.raises(SchemeError, match=said):
        Affine(**fields)


@pytest.mark.parametrize(
    ("scheme", "shape", "said"),
    [
        (Affine(), (), "without dimensions"),
        (Affine(block=(2, None)), (4,), "blocks of 2 rows need at least 2 dimensions"),
        (Affine(block=(1, 2), act_order=True), (4,), "act_order needs at least 2 dimensions"),
    ],
)
def test_shapes_are_checked(scheme, shape, said):
    with pytest.raises(SchemeError, match=said):
        scheme.check(shape)


def test_a_range_beyond_the_scale_dtype_is_refused():
    with pytest.raises(SchemeError, match="does not fit float16"):
        Affine(scale_dtype=torch.float16).encode(torch.full((2, 8), 1e9))
    with pytest.raises(SchemeError, match="too large for float32"):
        Affine(symmetric=False).encode(torch.tensor([[-1e38, 1e38]]))
    with pytest.raises(SchemeError, match="too large for float32"):
        Affine().encode(torch.tensor([[1e300]], dtype=torch.float64))


def test_integers_are_not_values():
    with pytest.raises(SchemeError, match="got int64"):
        Affine().encode(torch.arange(4))


def test_spans_of_the_documented_layouts():
    spans = {name: part.span for name, part in Affine(bits=4, symmetric=False, block=(1, 8)).layout((6, 24)).items()}
    assert spans == {"qdata": 24, "scale": 24, "zero_point": 24}
    assert [part.span for part in Affine(bits=4, block=(1, 8)).layout((24,)).values()] == [2, 8]
    assert [part.span for part in Affine(bits=3, block=(1, None)).layout((24,)).values()] == [8, 0]
    assert [part.span for part in Affine(block=(None, None)).layout((6, 24)).values()] == [24, 0]
    assert [part.span for part in Affine(block=(2, 8)).layout((6, 24)).values()] == [24, 48]
    assert [part.span for part in Affine(block=(2, 8)).layout((3, 6, 24)).values()] == [144, 144]
    assert laws.check_cuts(Affine(bits=4, block=(1, 8)), laws.make((24,), "normal", 0)) == 6


def test_tall_blocks_keep_the_last_two_dimensions():
    scheme = Affine(block=(2, 8))
    assert scheme.can_view((3, 4, 8), (3, 1, 4, 8))
    assert scheme.can_view((3, 4, 8), (12, 8))  # no block lies in two matrices
    assert not scheme.can_view((3, 5, 8), (15, 8))
    assert not scheme.can_view((6, 8), (2, 3, 8))
    assert not Affine(bits=3).can_view((1, 5), (5,))  # a row of 2 bytes, a run of 3


@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    seed=st.integers(0, 2**31 - 1),
)
def test_foreign_parts_keep_their_values(bits, symmetric, act_order, dtype, seed):
    """Scales of any sign and size, zeros among them, and any codes: writing back what they decode to moves nothing."""
    scheme = Affine(bits, symmetric=symmetric, block=(1, 16), act_order=act_order)
    generator = torch.Generator().manual_seed(seed)
    parts = scheme.empty((4, 48), torch.float32, "cpu")
    for name, part in parts.items():
        if name == "scale":
            part.normal_(generator=generator)[0, 0] = 0
        elif name == "g_idx":
            part.random_(0, 3, generator=generator)
        else:
            part.random_(*((-128, 128) if part.dtype == torch.int8 else (0, 256)), generator=generator)
    if bits < 8 and not symmetric:
        parts["zero_point"] %= 2 ** (bits - 1)
    decoded = scheme.decode(parts, (4, 48), dtype)
    again = scheme.reencode(decoded, parts)
    assert torch.equal(scheme.decode(again, (4, 48), dtype), decoded)
    assert all(laws.same(again[name], part) for name, part in parts.items() if name != "qdata")
    assert bool((scheme.bound(parts, (4, 48)) >= 0).all())
