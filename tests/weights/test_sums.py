"""Products compared with float64: README's bound on sums holds by every row of the table, on any processor."""

import pytest
import torch
import torch.nn.functional as F

import torchtether as tt
from tests.catalog import rand
from tests.weights.kernel_cases import as_on, choose, rounded, unrounded
from torchtether.formats.gguf_blocks import TABLE as IQ4
from torchtether.schemes import Biased, SuperBlocks
from torchtether.weights.ops import graph_ops
from torchtether.weights.products.layout import STREAM
from torchtether.weights.products.table import HALVES, INTEGERS, has_amx, has_fast_halves

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""What one rounding moves a number by, at most, in units of it."""
SCHEMES = {
    "int8": tt.int8(),
    "int8, groups": tt.int8(64, symmetric=False),
    "int4": tt.int4(),
    "int4, small groups": tt.int4(8),
    "fp8": tt.fp8(),
    "nf4": tt.nf4(),
    "3 bits": tt.Affine(bits=3, block=(1, 32)),
    "small groups": tt.Affine(bits=6, block=(1, 16), symmetric=False),
    "Q4_K": SuperBlocks(4, 32, minimum=True),
    "Q6_K": SuperBlocks(6, 16, scale_bits=8, offset=32),
    "tables": SuperBlocks(4, 32, 32, 0, table=IQ4),
    "biased": Biased(4, (1, 64), torch.bfloat16),
    "biased, in 16 bits": Biased(4, (1, 64), torch.bfloat16, torch.bfloat16, bias_first=True),
    "7 bits, biased, in 16 bits": Biased(7, (2, 32), torch.bfloat16, torch.bfloat16),
    "8 bits, biased, in 16 bits": Biased(8, (1, 128), torch.float16, torch.float16, bias_first=True),
    "2 bits, biased in float32": Biased(2, (1, 16), torch.float32),
    "nvfp4": tt.nvfp4(),
    "mxfp6": tt.ScaledFloat("e2m3", (1, 32), torch.float8_e8m0fnu),
    "a table of 200": tt.Codebook(tuple(torch.linspace(-1, 1, 200).tolist()), block_size=64),
    "act_order": tt.Affine(bits=4, block=(1, 32), act_order=True),
}
MACHINES = [(fast, compiled) for fast in (False, True) for compiled in (False, True)]


def allowed(weight, x, bias, fast):
    """The largest error that README has for it: one rounding of the result, and what else it says."""
    layout, dtype, unit, activations = weight.kernel_layout, x.dtype, UNIT[x.dtype], weight.spec.activations
    kernel = choose(layout, dtype, x.shape[0])
    values, meant = weight.dequantize().double().abs(), rounded(x, activations).abs()
    sums = F.linear(meant, values)
    product = F.linear(rounded(x, activations), weight.to(torch.float32).dequantize().double())
    # float32 sums of 512 numbers, in any order; torch's own lose up to 1.4 times as much on ARM
    lost = 2.0**-18 if kernel == "chunks" else 2.0**-19
    most = unit * (product + bias.double()).abs() + lost * (sums + bias.double().abs())
    is_twice = fast and dtype in HALVES and activations is not None and kernel != "blocks"
    if (
        dtype in HALVES
        and kernel == "compiled"
        and layout.kind in (*INTEGERS, STREAM)
        and (activations is None or is_twice)
    ):
        most += 2.0**-15 * F.linear(meant.amax(-1, keepdim=True).expand_as(meant), values)  # inputs as fixed point
    if dtype in HALVES and kernel == "compiled":  # steps of decoding that the scheme rounds
        most += F.linear(meant, (unrounded(weight) - weight.to(torch.float32).dequantize()).abs())
    if is_twice or kernel == "int8pack":
        most += unit * (1 + unit) * product.abs()
    has_codes = layout.kind == "INT4" or (layout.kind == "INT8" and layout.fields["zero"] < 0)
    if has_amx():
        has_codes = has_codes and layout.fields["group"] >= layout.columns  # one scale for each row
    is_codes = kernel == "blocks" and activations == "int8" and has_codes
    if (kernel == "blocks" and not is_codes) or (
        dtype in HALVES and ((activations is None and kernel == "chunks") or is_twice)
    ):
        most += unit * sums  # weights rounded first
    return most + 2.0**-40


@pytest.mark.parametrize(("fast", "compiled"), MACHINES, ids=str)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("activations", [None, "int8", "float8"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_products_are_summed_in_float32_and_rounded_as_promised(
    scheme, activations, dtype, fast, compiled, monkeypatch
):
    with as_on(fast, compiled):
        weight = tt.Weight.encode(rand(40, 512), scheme).to(dtype)
        weight.set_activations(activations)
        values, bias = weight.to(torch.float32).dequantize().double(), (10 * rand(40)).to(dtype)
        parts, told = list(weight.parts.values()), graph_ops.text_of(weight.spec)
        for rows in (1, 3, 5, 8, 16, 17, 64):
            x = (rand(rows, 512) * torch.logspace(-2, 2, rows).view(-1, 1)).to(dtype)
            expected = F.linear(rounded(x, activations), values, bias.double())
            most = allowed(weight, x, bias, fast)
            with torch.no_grad():
                found = {"eager": F.linear(x, weight, bias), "by addmm": torch.addmm(bias, x, weight.t())}
                if activations is None:
                    found["in a graph"] = torch.ops.torchtether.linear.default(x, bias, parts, told)
            for way, got in found.items():
                assert got.dtype == dtype
                off = (got.double() - expected).abs() / most
                assert off.max() <= 1, (way, rows, choose(weight.kernel_layout, dtype, rows), float(off.max()))


@pytest.mark.parametrize("activations", [None, "int8"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_thousands_of_rows(scheme, activations):
    """Kernels that copy inputs multiply so many in several turns."""
    weight = tt.Weight.encode(rand(20, 64), scheme).to(torch.bfloat16)
    weight.set_activations(activations)
    x, bias = rand(4200, 64).to(torch.bfloat16), rand(20).to(torch.bfloat16)
    expected = F.linear(rounded(x, activations), weight.to(torch.float32).dequantize().double(), bias.double())
    off = (F.linear(x, weight, bias).double() - expected).abs()
    assert (off <= allowed(weight, x, bias, has_fast_halves(torch.bfloat16))).all()


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("columns", [256, 608])
def test_float32_products_lose_nothing_where_values_are_nearly_0(bits, columns):
    """Biases all but cancel codes: sums of each alone would be a thousand times what is left of them."""
    scheme = Biased(bits, (1, 32), torch.float16)
    weight = tt.Weight.encode(rand(40, columns), scheme).to(torch.float32)
    parts = weight.parts
    parts["qdata"].fill_(0xFF)  # the highest code everywhere
    parts["bias"].copy_(-((1 << bits) - 1) * parts["scale"].float() * (1 + 2.0**-10 * rand(*parts["bias"].shape)))
    x = 1e3 * rand(3, columns)
    values = weight.dequantize().double()
    assert values.abs().max() < 2.0**-6 * ((1 << bits) - 1) * parts["scale"].float().abs().max()
    off = (F.linear(x, weight).double() - F.linear(x.double(), values)).abs()
    assert (off <= 2.0**-19 * F.linear(x.double().abs(), values.abs()) + 2.0**-40).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_after_the_end_of_a_row_do_not_count(bits):
    """Kernels read them with the last ones of the row, whose scale they could take beyond float16."""
    scheme = Biased(bits, (1, 128), torch.float16, torch.float16)
    weight = tt.Weight.encode(rand(40, 100), scheme).to(torch.float32)
    parts, highest = weight.parts, (1 << bits) - 1
    parts["bias"].fill_(0)
    parts["scale"].fill_(40000 / highest)  # the highest code fits; with the scale of the other rows it does not
    parts["scale"][::2] = 60000
    parts["qdata"].fill_(0xFF)
    parts["qdata"][::2] = 0
    x = rand(3, 100)
    expected = F.linear(x.double(), weight.dequantize().double())
    assert expected.isfinite().all()
    assert not expected[:, ::2].any()
    torch.testing.assert_close(F.linear(x, weight).double(), expected, rtol=1e-4, atol=1)


@pytest.mark.parametrize("columns", [608, 576, 488])
def test_products_do_not_depend_on_what_was_computed_before(columns):
    """Kernels that read memory before they write it, or beyond what they wrote, find what other products left there."""
    cases = []
    for scheme in SCHEMES.values():
        weight = tt.Weight.encode(rand(256, columns), scheme)
        cases += [(rand(rows, columns).to(dtype), weight.to(dtype)) for dtype in UNIT for rows in (1, 3)]
    found = [F.linear(x, weight) for x, weight in cases]
    for turn in (list(reversed(range(len(cases)))), list(range(0, len(cases), 3))):
        for i in turn:
            assert torch.equal(F.linear(*cases[i]), found[i]), (cases[i][1].spec, cases[i][0].dtype, len(cases[i][0]))


@pytest.mark.parametrize("columns", [608, 576, 384])
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_scale_or_bias_that_is_not_finite_stays_in_its_row(scheme, dtype, columns):
    weight = tt.Weight.encode(rand(256, columns), scheme).to(dtype)
    x, others = rand(1, columns).to(dtype), torch.arange(256) != 7
    rows = [part for part in weight.parts.values() if part.dtype in UNIT and part.dim() and part.shape[0] == 256]
    expected = F.linear(x, weight)
    for part in rows:
        kept = part[7].clone()
        part[7] = float("inf")
        found = F.linear(x, weight)
        part[7] = kept
        assert not found[:, 7].isfinite().any()
        assert torch.equal(found[:, others], expected[:, others])
    if not rows:
        pytest.skip("its rows have no scales that can be infinite")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [(1, 32, 1), (33, 64, 7), (70, 256, 1030), (300, 96, 40), (1100, 1056, 33), (40, 2048, 600)],
)
def test_gradients_of_inputs_are_summed_in_float32(scheme, dtype, rows, columns, count):
    weight = tt.Weight.encode(rand(rows, columns), scheme).to(dtype)
    values, grown = weight.dequantize().double(), rand(count, rows).to(dtype)
    expected = grown.double() @ values
    allowed = UNIT[dtype] * expected.abs() + 2.0**-19 * (grown.double().abs() @ values.abs())
    if count >= 512 or dtype is torch.float32:
        allowed += UNIT[dtype] * expected.abs()  # torch's own product of some pieces
    for given in (grown, grown.t().contiguous().t(), torch.cat([grown, grown], 1)[:, :rows]):
        x = rand(count, columns).to(dtype).requires_grad_()
        F.linear(x, weight).backward(given)
        assert ((x.grad.double() - expected).abs() <= allowed + 2.0**-40).all()
