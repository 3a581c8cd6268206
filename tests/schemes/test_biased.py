"""Biased: the laws over its fields, and its own promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchtether as tt
from tests.schemes import laws
from tests.strategies import examples
from torchtether.errors import SchemeError
from torchtether.schemes import Biased

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCHEMES = (
    Biased(),
    Biased(8, (1, None)),
    Biased(8, (1, 64), BF16, BF16),
    Biased(8, (1, 64), FP16, FP16),
    Biased(8, (1, 32), BF16, BF16, bias_first=True),
    Biased(6, (None, 16), BF16, BF16),
    Biased(5, (1, 32), FP16, FP32),
    Biased(4, (1, 64), BF16, BF16, bias_first=True),
    Biased(4, (1, 24), FP32, FP32, bias_first=True),
    Biased(4, (2, 16), FP16, FP16),
    Biased(3, (1, 64), BF16, BF16),
    Biased(2, (1, 8), BF16, BF16),
    Biased(1, (1, 8)),
    Biased(4, (None, None), FP16, FP16, bias_first=True),
    Biased(6, (1, 8), FP16, bias_first=True),
    Biased(8, (4, 8), FP32, BF16),
    Biased(5, (1, 128), FP32, FP16, bias_first=True),
    Biased(4, (1, 64), BF16, FP16),
    Biased(4, (1, 16), fit="mse"),
    Biased(3, (1, 16), BF16, BF16, fit="hqq"),
)
every_scheme = pytest.mark.parametrize(
    "scheme", laws.slow_if_searching(SCHEMES), ids=lambda s: "-".join(map(str, s.to_json().values()))
)


def fits(scheme, w):
    if (scheme.block[0] or 1) > 1 and w.dim() < 2:
        return False
    return FP16 not in (scheme.scale_dtype, scheme.arithmetic) or float(w.abs().max()) < 30000


def keeps_values(scheme, w):
    """Encoding decoded values, with the held scales or as an op writes them, keeps the values."""
    shape, parts = tuple(w.shape), scheme.encode(w)
    for dtype in (FP32, w.dtype):
        decoded = scheme.decode(parts, shape, dtype)
        if not bool(decoded.isfinite().all()):
            continue
        for again in (scheme.encode(decoded, like=parts), scheme.reencode(decoded, parts)):
            assert laws.same(scheme.decode(again, shape, dtype), decoded)


@every_scheme
@examples(12)
@given(w=laws.values(), data=st.data())
def test_laws(scheme, w, data):
    if not fits(scheme, w):
        w = laws.make((4, 40), "normal", 0)
    laws.check_parts(scheme, w)
    keeps_values(scheme, w)
    laws.check_views(
        scheme, w, data.draw(st.sampled_from(((*w.shape[:-1], 1, w.shape[-1]), (w.numel(),), (1, *w.shape))))
    )


def test_the_bound_counts_that_float16_rounds_a_subnormal_scale():
    """It moves the bias, which is in units of the scale, too."""
    laws.check_bound(Biased(5, (1, 128), FP32, FP16, bias_first=True), torch.tensor([[0.006634], [0.002734]]))


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
    if scheme.block[0] in (None, 1):
        laws.check_empty(scheme)


@pytest.mark.parametrize("scheme", laws.slow_after_the_first([SCHEMES[0], SCHEMES[2], SCHEMES[7], SCHEMES[10]]))
def test_encode_and_decode_are_one_graph_each(scheme):
    laws.check_compiles(scheme, laws.make((6, 40), "normal", 1))


@examples(50)
@given(
    bits=st.integers(1, 8),
    dtypes=st.sampled_from(((BF16, BF16), (FP16, FP16), (FP32, FP32), (FP16, FP32))),
    bias_first=st.booleans(),
    offset=st.sampled_from((0.0, 1.0, -30.0, 1000.0)),
    seed=st.integers(0, 2**31 - 1),
)
def test_foreign_parts_keep_their_values(bits, dtypes, bias_first, offset, seed):
    """Scales and biases of any sign and size, and any codes: writing back what they decode to changes nothing."""
    scheme = Biased(bits, (1, 16), *dtypes, bias_first=bias_first)
    generator = torch.Generator().manual_seed(seed)
    parts = scheme.empty((4, 48), FP32, "cpu")
    parts["qdata"].random_(0, 256, generator=generator)
    parts["scale"].normal_(generator=generator)
    parts["scale"][0, 0] = 0
    parts["bias"].normal_(generator=generator).add_(offset)
    decoded = scheme.decode(parts, (4, 48), FP32)
    again = scheme.reencode(decoded, parts)
    assert torch.equal(scheme.decode(again, (4, 48), FP32), decoded)
    assert torch.equal(again["scale"][:, 1:], parts["scale"][:, 1:])
    assert bool((scheme.bound(parts, (4, 48)) >= 0).all())


@given(bits=st.integers(1, 8), dtype=st.sampled_from((BF16, FP16, FP32)), first=st.booleans(), seed=st.integers(0, 999))
def test_decoding_rounds_twice(bits, dtype, first, seed):
    """Recomputed from the parts, element by element, in float64 with a rounding to ``arithmetic`` after each step."""
    scheme = Biased(bits, (1, 8), dtype, dtype, bias_first=first)
    w = laws.make((5, 24), "normal", seed)
    parts = scheme.encode(w)
    stream = (parts["qdata"].to(torch.int64).unsqueeze(-1) >> torch.arange(8)) & 1
    codes = (stream.flatten(-2)[:, : 24 * bits].unflatten(-1, (24, bits)) << torch.arange(bits)).sum(-1)
    column = torch.arange(24) // 8
    scale, bias = parts["scale"].double()[:, column], parts["bias"].double()[:, column]

    def rounded(x):
        return x.to(dtype).double()

    expected = rounded(rounded(codes + bias) * scale) if first else rounded(rounded(codes * scale) + bias)
    assert torch.equal(scheme.decode(parts, (5, 24), FP32).double(), expected)


def test_the_bias_follows_values_far_from_zero():
    """No code is spent on the way from zero: the error is that of the range, not that of the magnitude."""
    w = 5 + laws.make((4, 64), "normal", 0) / 100
    error = (Biased().decode(Biased().encode(w), (4, 64), FP32) - w).abs().max()
    assert float(error) < float(w.max() - w.min()) / 30 * 1.01


def test_neighbours_keep_their_values_when_the_largest_one_moves_a_little():
    scheme = Biased(4, (1, 16))
    parts = scheme.encode(laws.make((2, 32), "normal", 0))
    before = scheme.decode(parts, (2, 32), FP32)
    largest = int(before[0, :16].argmax())
    changed = before.clone()
    changed[0, largest] -= 0.3 * parts["scale"][0, 0]
    after = scheme.decode(scheme.reencode(changed, parts), (2, 32), FP32)
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bits": 9}, "bits must be an int from 1 to 8, got 9"),
        ({"bits": True}, "bits must be an int from 1 to 8, got True"),
        ({"block": (0, 8)}, "block must be"),
        ({"scale_dtype": torch.int8}, "scale_dtype must be one of torch.float32, .*, got torch.int8"),
        ({"arithmetic": torch.float64}, "arithmetic must be one of torch.float32, .*, got torch.float64"),
        ({"bias_first": "no"}, "bias_first must be True or False, got 'no'"),
        ({"arithmetic": "bfloat16"}, "arithmetic must be one of .*, torch.bfloat16, .*, got 'bfloat16'"),
    ],
)
def test_fields_are_checked(fields, said):
    with pytest.raises(SchemeError, match=said):
        Biased(**fields)


def test_a_range_beyond_its_dtypes_is_refused():
    w = torch.tensor([[-60000.0, 60000.0]])
    with pytest.raises(SchemeError, match="a range of 1.2e\\+05 does not fit float16"):
        Biased(arithmetic=FP16).encode(w)
    with pytest.raises(SchemeError, match="does not fit float16"):
        Biased(scale_dtype=FP16).encode(w * 1e9)


@pytest.mark.parametrize(
    "scheme", [Biased(4, (1, 64), FP16, bias_first=True), Biased(8, (1, 32), FP16, bias_first=True)]
)
def test_a_bias_in_units_of_the_scale_fits(scheme):
    """Where the values of a block are nearly equal, its scale is small, and the bias counts in units of it."""
    for values in (torch.ones(2, 64), 1 + 1e-3 * torch.rand(2, 64), 1e-3 * torch.ones(2, 64)):
        made = tt.Weight.encode(values, scheme)
        assert ((made.dequantize() - values).abs() <= scheme.bound(dict(made.parts), (2, 64))).all()
        assert torch.isfinite(made.clone().fill_(0.5).dequantize()).all()


def test_a_bias_that_does_not_fit_is_an_error():
    with pytest.raises(SchemeError, match=r"a bias of 1e\+05 does not fit float16"):
        tt.Weight.encode(torch.full((2, 32), 1e5), Biased(4, (1, 32), FP16))
