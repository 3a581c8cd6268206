"""ScaledFloat: the laws over its fields, and its own promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.schemes import laws
from tests.strategies import examples
from torchtether.errors import SchemeError
from torchtether.schemes import ScaledFloat, fp8, mxfp4, mxfp8, nvfp4
from torchtether.schemes.bits import unpack
from torchtether.schemes.scaled_float import ELEMENTS

SCHEMES = (
    fp8("row"),
    fp8("tensor", scale_dtype=torch.bfloat16),
    ScaledFloat("e4m3", block=(2, 16)),
    ScaledFloat("e5m2", block=(1, 32), scale_dtype=torch.float16),
    mxfp8(),
    mxfp8("e5m2", scale_rounding="floor"),
    mxfp8(scale_rounding="even"),
    mxfp4(),
    mxfp4(scale_rounding="floor"),
    mxfp4(scale_rounding="rceil"),
    nvfp4(),
    ScaledFloat("e2m1", block=(1, 16), scale_dtype=torch.float8_e4m3fn, global_scale=True, global_divides=True),
    ScaledFloat("e2m1", block=(1, 16), scale_dtype=torch.float8_e4m3fn),
    ScaledFloat("e2m3", block=(1, 32), scale_dtype=torch.float8_e8m0fnu),
    ScaledFloat("e2m3", block=(1, 16), scale_rounding="rceil", scale_dtype=torch.float8_e8m0fnu),
    ScaledFloat("e4m3", block=(1, 16), scale_dtype=torch.float8_e4m3fn, global_scale=True),
)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: "-".join(map(str, s.to_json().values())))


def fits(scheme, w):
    if (scheme.block[0] or 1) > 1 and w.dim() < 2:
        return False
    if scheme.scale_dtype == torch.float8_e4m3fn and not scheme.global_scale:
        return float(w.abs().max()) <= 448 * 6
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
@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 24), (33,)], ids=str)
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


@pytest.mark.parametrize("scheme", SCHEMES[:-1], ids=lambda s: "-".join(map(str, s.to_json().values())))
@given(w=laws.values(dtypes=(torch.float32,)))
def test_encoding_decoded_values_afresh_keeps_them(scheme, w):
    """Codes stay, and values up to a rounding of the scale; "rceil" may halve a scale and double its codes."""
    if not fits(scheme, w) or 0 < float(w.abs().max()) < 1e-30:
        w = laws.make((4, 40), "mixed", 0)
    if float((scheme.encode(w)["scale"].float()).min()) < torch.finfo(scheme.scale_dtype).smallest_normal:
        w = 1000 * laws.make((4, 40), "normal", 0)  # subnormal scales have few bits: another one may be nearer
    shape, parts = tuple(w.shape), scheme.encode(w)
    decoded = scheme.decode(parts, shape, torch.float32)
    again = scheme.encode(decoded)
    torch.testing.assert_close(scheme.decode(again, shape, torch.float32), decoded, rtol=1e-6, atol=0)
    if scheme.scale_rounding != "rceil":
        laws.assert_same_parts(parts, again, ["qdata"])


@given(x=st.floats(-7, 7, width=32))
def test_e2m1_goes_to_the_nearest_and_halfway_to_even(x):
    scheme = ScaledFloat("e2m1", block=(1, None))
    like = scheme.encode(torch.tensor([6.0]))  # a scale of 1
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    distance = [abs(min(abs(x), 6.0) - value) for value in table]
    best = [code for code in range(8) if distance[code] == min(distance)]
    expected = next(code for code in best if len(best) == 1 or code % 2 == 0)
    sign = 8 if torch.tensor(x).signbit() else 0
    assert scheme.encode(torch.tensor([x]), like=like)["qdata"].item() == expected + sign


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@given(seed=st.integers(0, 2**31 - 1))
def test_fp8_codes_are_torch_casts_clamped_by_us(element, seed):
    scheme = ScaledFloat(element, block=(1, None))
    like = scheme.encode(torch.tensor([448.0 if element == "e4m3" else 57344.0]))
    assert like["scale"].item() == 1
    w = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 300
    largest = 448.0 if element == "e4m3" else 57344.0
    codes = scheme.encode(torch.cat((w, torch.tensor([1e30, -1e30]))), like=like)["qdata"]
    assert torch.equal(codes[:-2].float(), w.clamp(-largest, largest).to(codes.dtype).float())
    assert codes[-2:].tolist() == [largest, -largest]


@pytest.mark.parametrize("rounding", ["floor", "even", "rceil"])
@pytest.mark.parametrize("make", [mxfp4, mxfp8])
@given(amax=st.floats(2.0**-100, 2.0**120, width=32))
def test_microscaling_exponents_follow_their_definition(make, rounding, amax):
    scheme = make(scale_rounding=rounding)
    largest, mantissa, high = (6.0, 1, 2) if make is mxfp4 else (448.0, 3, 8)
    fraction, power = torch.frexp(torch.tensor(amax, dtype=torch.float64))
    fraction, power = float(fraction) * 2, int(power) - 1  # amax = fraction * 2**power, 1 <= fraction < 2
    if rounding == "even":
        power += fraction + 2.0 ** -(mantissa + 1) >= 2
    expected = power - high
    if rounding == "rceil":
        ratio, expected = float(torch.tensor(amax) / largest), -200
        while 2.0**expected < ratio:
            expected += 1
    assert scheme.encode(torch.tensor([amax]))["scale"].float().item() == 2.0**expected


@pytest.mark.parametrize("scheme", [mxfp4(), mxfp4(scale_rounding="rceil"), mxfp8(), mxfp8(scale_rounding="floor")])
@pytest.mark.parametrize("extreme", [1.7e38, 1e-38, 1e-45])
def test_power_of_two_scales_are_never_nan(scheme, extreme):
    parts = scheme.encode(torch.tensor([extreme, 0.0]))
    assert int(parts["scale"].view(torch.uint8).max()) <= 254
    assert bool(scheme.decode(parts, (2,), torch.float32).isfinite().all())


def test_the_smallest_power_of_two_decodes_exactly():
    scheme = mxfp4()
    parts = scheme.encode(torch.tensor([6.0, 1.0]))
    parts["scale"] = torch.zeros(1, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert scheme.decode(parts, (2,), torch.float64).tolist() == [6 * 2.0**-127, 2.0**-127]


def test_both_spellings_of_the_global_scale_agree_where_it_is_a_power_of_two():
    multiplied, divided = SCHEMES[10], SCHEMES[11]
    w = laws.make((4, 64), "mixed", 0)
    w[0, 0] = 448 * 6 * 2.0  # global scale 2
    w = w.clamp(-5376, 5376)
    a, b = multiplied.encode(w), divided.encode(w)
    assert (a["global_scale"].item(), b["global_scale"].item()) == (2.0, 0.5)
    laws.assert_same_parts(a, b, ["qdata", "scale"])
    assert torch.equal(multiplied.decode(a, (4, 64), torch.float32), divided.decode(b, (4, 64), torch.float32))


@pytest.mark.parametrize("element", ["e2m1", "e2m3"])
def test_halfway_values_go_to_the_even_code(element):
    """And values just beside them to the nearer one; the largest value is there so that the scale is 1."""
    table = torch.tensor(ELEMENTS[element].table)
    table = table[: len(table) // 2]
    middles = (table[1:] + table[:-1]) / 2
    scheme = ScaledFloat(element, scale_dtype=torch.float8_e8m0fnu, scale_rounding="floor")

    def codes(values):
        parts = scheme.encode(torch.cat((values, table[-1:])).view(1, -1))
        assert parts["scale"].float().item() == 1.0
        return unpack(parts["qdata"], ELEMENTS[element].bits, len(values))[0].tolist()

    lower = list(range(len(middles)))
    assert codes(middles) == [code + code % 2 for code in lower]
    assert codes(middles * (1 - 2**-20)) == lower
    assert codes(middles * (1 + 2**-20)) == [code + 1 for code in lower]
    assert codes(-middles) == [code + code % 2 + len(table) for code in lower]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"element": "e3m2"}, "element must be one of e4m3, e5m2, e2m3, e2m1, got 'e3m2'"),
        ({"block": (1, 0)}, "block must be"),
        ({"scale_dtype": torch.float64}, "scale_dtype must be one of"),
        ({"scale_dtype": "float32"}, "scale_dtype must be one of torch.float32, .*, got 'float32'"),
        ({"global_scale": "no"}, "global_scale must be True or False, got 'no'"),
        ({"scale_rounding": "up"}, "scale_rounding must be one of even, floor, rceil, got 'up'"),
        ({"global_scale": True}, "global_scale needs scale_dtype float8_e4m3fn"),
        ({"global_divides": True}, "global_divides needs global_scale"),
    ],
)
def test_fields_are_checked(fields, said):
    with pytest.raises(SchemeError, match=said):
        ScaledFloat(**fields)


def test_scales_that_do_not_fit_are_refused():
    with pytest.raises(SchemeError, match="does not fit float8_e4m3fn"):
        SCHEMES[12].encode(torch.tensor([3000.0]))
    with pytest.raises(SchemeError, match="does not fit float16"):
        SCHEMES[3].encode(torch.tensor([1e30]))


def test_float8_values_are_encoded_as_their_float32():
    w = laws.make((4, 64), "normal", 0).to(torch.float8_e4m3fn)
    for scheme in (SCHEMES[0], SCHEMES[7], SCHEMES[10]):
        laws.assert_same_parts(scheme.encode(w), scheme.encode(w.float()))


def test_names_of_granularities():
    assert fp8("block").layout((300, 200))["scale"].shape == (3, 2)
    with pytest.raises(SchemeError, match="granularity must be one of row, tensor, block, got 'channel'"):
        fp8("channel")
