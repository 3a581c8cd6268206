"""The Triton encoders give the bits of torch ops. ``test_gpu_encoding.py`` runs this under Triton's interpreter."""

import itertools
import os

import pytest
import torch

from tests.schemes import laws
from tests.weights.triton_cases import interpret_rightly
from torchtether import compiled, gpu
from torchtether.errors import SchemeError
from torchtether.gpu import serving
from torchtether.schemes import Affine, Codebook, ScaledFloat, codebook, fp4, fp8, int4, int8, mxfp4, mxfp8, nf4, nvfp4
from torchtether.schemes.blocks import Grid
from torchtether.schemes.tables import NF4

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of what is not finite
if os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("Triton would compile for a GPU that is not there")
interpret_rightly()

KERNELS = {
    "int8": int8(),
    "int8 groups of 5": Affine(symmetric=False, reciprocal=True, block=(1, 5)),
    "int8 tensor": Affine(block=(None, None), scale_dtype=torch.bfloat16),
    "int8 narrow": Affine(narrow_range=True, unit=1 / 127),
    "int8 tall": Affine(block=(2, 16)),
    "uint8": Affine(signed=False, symmetric=False),
    "int4": int4(),
    "int4 ragged": int4(24),
    "int4 symmetric": int4(None, True),
    "uint4": Affine(bits=4, signed=False, symmetric=False, scale_dtype=torch.bfloat16, block=(1, 32)),
    "fp8": fp8(),
    "fp8 tensor": fp8("tensor"),
    "fp8 block": ScaledFloat("e4m3", block=(4, 16)),
    "e5m2": ScaledFloat("e5m2", block=(1, 32)),
    "nf4": nf4(),
    "nf4 nested": nf4(double_quant=True),
    "nf4 rows": Codebook(NF4, block_size=16, flat=False),
    "nf4 blocks of 8": nf4(block_size=8),
    "fp4": fp4(),
    "mxfp8": mxfp8(),
    "mxfp4": mxfp4(),
    **{
        f"{element} {rounding}": ScaledFloat(element, (1, 32), torch.float8_e8m0fnu, scale_rounding=rounding)
        for element, rounding in (("e4m3", "rceil"), ("e5m2", "even"), ("e2m1", "floor"), ("e2m1", "rceil"))
    },
    "mx rows": ScaledFloat("e2m1", (1, None), torch.float8_e8m0fnu),
    "nvfp4": nvfp4(),
    "nvfp4 divides": nvfp4(global_divides=True),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((6, 64), (3, 40), (5, 13), (96,), (2, 3, 32))


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setattr(serving, "DEVICES", {"cuda", "cpu"})


def with_torch_ops(work):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "DEVICES", {"cuda"})
        patch.setattr("torchtether.compiled.room._module", None)
        return work()


def check(scheme, x):
    laws.assert_same_parts(scheme.encode(x), with_torch_ops(lambda: scheme.encode(x)))


def draws(name):
    """Shapes, dtypes and patterns that suit a scheme, in an order of its own."""
    first, tall = list(KERNELS).index(name), getattr(KERNELS[name], "block", (1,))[0] not in (1, None)
    shapes = [shape for shape in SHAPES if len(shape) > 1 or not tall]
    for i in range(len(shapes) * len(DTYPES) * len(laws.PATTERNS)):
        at = first + i
        yield (
            shapes[at % len(shapes)],
            laws.PATTERNS[at * 5 % len(laws.PATTERNS)],
            DTYPES[at // len(shapes) % len(DTYPES)],
        )


@pytest.mark.parametrize("name", KERNELS)
def test_codes_are_those_of_torch_ops(name):
    for shape, pattern, dtype in itertools.islice(draws(name), 3):
        check(KERNELS[name], laws.make(shape, pattern, 7, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_codes_are_those_of_torch_ops_over_all_dtypes_and_patterns(name):
    for shape, pattern, dtype in draws(name):
        check(KERNELS[name], laws.make(shape, pattern, 7, dtype))


@pytest.mark.parametrize("name", ["int8", "uint8", "int4 ragged", "fp8", "nf4", "mxfp4", "e4m3 rceil"])
def test_numbers_at_the_ends_of_their_range(name):
    check(
        KERNELS[name], torch.cat([laws.make((1, 48), p, 3, torch.bfloat16) for p in ("zeros", "tiny", "large", "ties")])
    )


@pytest.mark.parametrize("name", ["int8 groups of 5", "uint4", "fp8", "nf4", "mxfp4", "nvfp4"])
def test_codes_under_given_scales(name):
    scheme, x = KERNELS[name], laws.make((4, 64), "spike", 3)
    like = {name: part / 2 if part.dtype == torch.float32 else part for name, part in scheme.encode(x).items()}
    laws.assert_same_parts(scheme.encode(x, like=like), with_torch_ops(lambda: scheme.encode(x, like=like)))


@pytest.mark.parametrize("name", ["int8", "uint8", "int4 symmetric", "fp8 tensor", "nf4 rows", "mxfp8", "mxfp4"])
def test_no_torch_op_walks_the_values(name, monkeypatch):
    """Without this the kernels might stand aside, and all of the above compare torch ops with themselves."""

    def walk(*_):
        raise AssertionError("it was computed with torch ops")

    monkeypatch.setattr(Grid, "chunks", walk)
    monkeypatch.setattr(codebook, "flat_ranges", walk)
    KERNELS[name].encode(laws.make((4, 64), "normal", 3, torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "columns"), [("int8", 9000), ("uint8", 12288), ("int4 symmetric", 9001), ("fp8", 9000), ("mx rows", 9000)]
)
def test_rows_that_one_program_reads_piece_by_piece(name, columns):
    check(KERNELS[name], laws.make((2, columns), "spike", 3, torch.bfloat16))


@pytest.mark.parametrize("name", ["int8", "int8 narrow", "uint8", "fp8"])
def test_middles_of_codes_in_long_rows_of_any_scale(name):
    """One program takes a row, and divides once where its scale is neither tiny nor huge."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *ends: torch.randint(*ends, (2100,), generator=generator).float()  # noqa: E731
    middles = (draw(0, 16) + 0.5) * draw(-9, 6).exp2() if name == "fp8" else draw(0, 127) + 0.5
    middles = middles.clamp_max(448) * (draw(0, 2) * 2 - 1)
    middles[0] = {"fp8": 448.0, "uint8": 127.5}.get(name, 127.0)
    middles[1] = -middles[0]
    sizes = torch.tensor([-124.0, -120.0, -81.0, -80.0, 0.0, 90.0]).exp2().view(-1, 1)
    for odd in (3.0, 5.0, 11.0, 13.0, 2 - 2.0**-23):
        check(KERNELS[name], middles * odd * sizes)


@pytest.mark.parametrize("name", ["int8", "uint8", "fp8", "nf4", "mxfp4"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_what_is_not_finite_is_refused_as_by_torch_ops(name, bad):
    x = laws.make((3, 40), "normal", 3)
    x[2, 39] = bad
    with pytest.raises(SchemeError, match="1 of 120 values are not finite"):
        KERNELS[name].encode(x)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "nf4"])
def test_values_anywhere_in_memory(name):
    base = laws.make((8, 65), "normal", 3, torch.bfloat16)
    for x in (base.view(-1)[1:513].view(8, 64), base[:, 1:], base.t()):
        check(KERNELS[name], x)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "nf4 rows"])
def test_encode_into_rows_of_larger_parts(name):
    scheme, x = KERNELS[name], laws.make((4, 64), "normal", 3)
    whole = scheme.encode(torch.zeros(8, 64))
    scheme.encode_into(x, {name: part[2:6] for name, part in whole.items()})
    for name, part in scheme.encode(x).items():
        assert laws.same(whole[name][2:6], part)


@pytest.mark.parametrize(
    "name", [name for name, scheme in KERNELS.items() if getattr(scheme, "scale_dtype", None) == torch.float8_e8m0fnu]
)
def test_every_power_of_two_as_a_scale(name):
    """Also subnormal ones; and blocks whose largest number lies just before, on and after the middle of two."""
    ones = torch.tensor([1.0, 1 + 2.0**-23, 1.75, 1.75 - 2.0**-23, 1.5, 1.9375, 2 - 2.0**-23, -1.25])
    x = ones.view(-1, 1, 1) * torch.arange(-149, 127).double().exp2().view(1, -1, 1)
    x = (x * torch.tensor([1.0, 0.3, -0.07])).float().view(-1, 3)
    check(KERNELS[name], torch.nn.functional.pad(x[x[:, 0].abs() < 2.0**127], (0, 1)))


def every_number():
    """All finite numbers of 16 bits, as bfloat16."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    return x[x.isfinite()].view(1, -1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_number_becomes_the_float8_that_torch_makes_of_it(dtype):
    x, largest = every_number(), torch.finfo(dtype).max
    codes = torch.empty(x.shape, dtype=dtype)
    assert gpu.encode_float8(x, x.shape[1], torch.ones(1, 1), codes, divides=True, largest=largest)
    assert laws.same(codes, x.float().clamp(-largest, largest).to(dtype))


@pytest.mark.parametrize("scheme", [nf4(), fp4(), Codebook(NF4[:11])], ids=["nf4", "fp4", "11 codes"])
def test_every_number_becomes_the_nearest_of_a_table(scheme):
    x, (thresholds, order) = every_number(), scheme._nearest
    codes = torch.empty((1, -(-x.shape[1] // 2)), dtype=torch.uint8)
    assert gpu.encode_nearest(x, x.shape[1], torch.ones(1, 1), codes, divides=False, thresholds=thresholds, order=order)
    place = torch.bucketize(x.float(), torch.tensor(thresholds))
    wanted = torch.tensor(order, dtype=torch.uint8)[place]
    assert torch.equal(torch.stack((codes & 15, codes >> 4), -1).view(1, -1)[:, : x.shape[1]], wanted)


@pytest.mark.parametrize(("width", "dtype"), list(zip([5, 64, 9000], DTYPES, strict=True)), ids=str)
def test_extremes(width, dtype):
    x = laws.make((3, 9000 if width == 9000 else 64), "mixed", 3, dtype)
    x[1, 3], x[2, 63] = torch.nan, -torch.nan
    found = [gpu.magnitudes(x, width), *gpu.extremes(x, width)]
    runs = [run.float() for run in x.split(width, 1)]
    assert laws.same(found[0], torch.stack([run.abs().amax(1) for run in runs], 1))
    low, high = (torch.stack([op(run, 1) for run in runs], 1) for op in (torch.amin, torch.amax))
    is_nan = low.isnan()
    assert torch.equal(found[1].isnan() | found[2].isnan(), is_nan)
    assert torch.equal(found[1][~is_nan], low[~is_nan])
    assert torch.equal(found[2][~is_nan], high[~is_nan])


def test_what_does_not_suit_is_left_to_others():
    x = torch.ones(4, 64)
    assert not gpu.can_read(x.double())
    assert not gpu.can_read(x.t())
    assert not gpu.can_read(torch.ones(0, 4))
    assert not gpu.can_read(x.requires_grad_())
    codes = torch.empty(4, 32, dtype=torch.uint8)
    assert not gpu.encode_nearest(
        x.detach(), 5, torch.ones(4, 13), codes, divides=True, thresholds=(0.5,), order=(0, 1)
    )
    assert compiled.recipe(compiled.AFFINE, torch.float64, 64, 64, parts=("qdata", "scale"), bits=8) is None
