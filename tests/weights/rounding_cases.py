"""Triton's kernels that round inputs, without a GPU, in a child process: as ``triton_cases``.

    TRITON_INTERPRET=1 python -m tests.weights.rounding_cases interpret SEED [every]
    python -m tests.weights.rounding_cases compile CAPABILITY [every]

With ``every``, each shape has every dtype; without, one.
"""

import json
import math
import sys
from functools import partial
from unittest import mock

import torch

import torchtether as tt
from tests.weights.kernel_cases import pick
from tests.weights.test_gpu_products import by_recipe
from tests.weights.triton_cases import DTYPES, compiled_only, encoded, interpret_rightly
from torchtether.gpu import rounding as kernels
from torchtether.gpu import serving
from torchtether.schemes.bits import same_bits
from torchtether.weights.products import fitting, int_mm, rounding, scaled_mm
from torchtether.weights.products.layout import layout_of

KINDS = ("int8", "float8", "mxfp8", "mxfp4", "nvfp4")
SHAPES = [(1, 1), (1, 64), (3, 70), (5, 33), (16, 96), (2, 2, 40), (200,), (0, 64)]


def with_torch_ops(work, *args):
    with mock.patch.object(serving, "DEVICES", set()):
        return work(*args)


def same(got, expected):
    """The same bits; of nan there are many, and they may differ."""
    if got is None or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if got.dtype is torch.float8_e4m3fn:
        got, expected = got.float(), expected.float()
    is_nan = got.isnan()
    return torch.equal(is_nan, expected.isnan()) and same_bits(got[~is_nan], expected[~is_nan])


def numbers(generator, shape, dtype):
    """Rows of many sizes: wide, of zeros, subnormal, near the largest number, not finite, and all halfway cases."""
    x = torch.randn(shape, generator=generator)
    x = x * (torch.randn(shape, generator=generator) * 3).exp()
    rows, info = x.view(-1, shape[-1]), torch.finfo(dtype)
    for number, row in enumerate(rows):
        kind = int(torch.randint(16, (), generator=generator)) if len(rows) < 16 else number
        if kind == 0:
            row *= 0.0
        elif kind == 1:
            row *= info.tiny / 64
        elif kind == 2:
            row *= info.smallest_normal * info.eps
        elif kind == 3:
            row.clamp_(-1, 1).mul_(info.max)
        elif kind in (4, 5, 6):
            row[int(torch.randint(len(row), (), generator=generator))] = (torch.inf, -torch.inf, torch.nan)[kind - 4]
        elif kind in (7, 8, 9):  # quotients are multiples of a quarter, of a sixteenth of a power of two, of a 512th
            top, step = ((127.0, 0.25), (448.0, 2.0), (6.0, 0.125))[kind - 7]
            row.copy_((torch.rand(len(row), generator=generator) * 2 - 1).mul(top).div(step).round().mul(step))
            row[0] = top
            if kind == 8:
                row *= (torch.randint(18, row.shape, generator=generator).float().neg()).exp2()
                row[0] = top
        elif kind == 10:
            row[: len(row) // 2] = -0.0
        elif kind in (11, 12, 13, 14):
            row.copy_(between_codes(generator, len(row), info, is_int=kind < 13, is_exact=kind % 2 == 0))
    return x.to(dtype)


def between_codes(generator, count, info, is_int, is_exact):
    """Multiples of a divisor of any size: the middles of two codes, or numbers next to these."""
    draw = lambda *ends: torch.randint(*ends, (count,), generator=generator).float()  # noqa: E731
    middles = draw(0, 127) + 0.5 if is_int else ((draw(0, 16) + 0.5) * draw(-9, 6).exp2()).clamp_max(448)
    middles[0] = 127 if is_int else 448
    size = max(pick(generator, (-125, -81, -80, 0, 90)), math.log2(info.tiny) + 1)
    size = min(size, math.log2(info.max) - 13)
    odd = pick(generator, (3.0, 5.0, 11.0, 13.0)) if is_exact else 2 - info.eps
    near = middles * odd if is_exact else middles * odd * (1 + draw(-1, 2) * info.eps)
    return near * draw(0, 2).sub(0.5).sign() * 2.0**size


FORMS = {
    "as is": lambda x: x,
    "of wider rows": lambda x: torch.nn.functional.pad(x, (0, 7), value=torch.inf)[..., : x.shape[-1]],
    "turned": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "repeated": lambda x: x[:1].expand(3, *x.shape[1:]) if len(x) else x,
    "negated": lambda x: torch._neg_view(-x),
}
"""The same numbers in other places of the memory."""


def wrong_rounding(generator, shape, dtype):
    form = pick(generator, list(FORMS))
    x = FORMS[form](numbers(generator, shape, dtype))
    for kind in KINDS:
        for call in (rounding.units_of, rounding.codes_of)[: 1 + (kind in rounding.ROWS)]:
            pairs = zip(call(x, kind), with_torch_ops(call, x, kind), strict=True)
            if not all(same(*pair) for pair in pairs):
                yield f"{call.__name__} {kind} {tuple(shape)} {dtype} {form}"
    if x.numel() and kernels.units(x[:1], "int8") is None:
        yield "left to torch ops"
    leaf = x[:1].detach().clone().requires_grad_()
    made = rounding.rounded(leaf, "nvfp4")
    made.sum().backward()
    if not torch.equal(leaf.grad, torch.ones_like(leaf)):
        yield f"gradient {tuple(shape)} {dtype}"


def wrong_scaling(generator, shape, dtype):
    """Sums of each dtype, with a scale per column, one, or none, and biases that lie apart."""
    columns = shape[-1]
    steps = numbers(generator, (*shape[:-1], 1), torch.float32)
    big = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int32)
    bias = torch.randn(2 * columns, generator=generator).to(dtype)[::2]
    scales = (None, torch.rand(columns, 1, generator=generator), torch.rand(1, generator=generator).bfloat16())
    for sums in (big, *(numbers(generator, shape, one) for one in DTYPES)):
        for scale in scales:
            for added in (None, bias):
                made = sums.float() * steps
                made = made if scale is None else made * (scale.float().view(-1) * (1 / 127))
                made = (made if added is None else made + added).to(dtype)
                got = kernels.scaled(sums, steps, dtype, scale=scale, unit=1 / 127, bias=added)
                if not (same(got, made) if sums.numel() else got is None):
                    yield f"scaled {sums.dtype} {tuple(shape)} {dtype} {scale is None} {added is None}"


def wrong_products(generator, dtype):
    """Whole products, by the kernels and by torch ops."""
    x, bias = numbers(generator, (20, 96), dtype), torch.randn(48, generator=generator).to(dtype)
    for scheme in (tt.int8(), tt.Affine(block=(None, None), narrow_range=True, unit=1 / 127)):
        weight, layout = encoded(torch.randn(48, 96, generator=generator), scheme), layout_of(scheme, (48, 96), "int8")
        arguments = layout, layout.pick_from(weight), x, bias
        if not same(int_mm.linear(*arguments), with_torch_ops(int_mm.linear, *arguments)):
            yield f"int_mm {scheme} {dtype}"
    weight, layout = (
        encoded(torch.randn(48, 96, generator=generator), tt.fp8()),
        layout_of(tt.fp8(), (48, 96), "float8"),
    )
    codes, scale = rounding.codes_of(x.clamp(-9, 9).nan_to_num(0.0), "float8")
    arguments = layout, weight.parts["qdata"], weight.parts["scale"], codes, scale, bias.bfloat16()
    with (
        mock.patch.object(scaled_mm, "scaled_mm", by_recipe),
        mock.patch.object(fitting, "capability", return_value=(9, 0)),
    ):
        if not same(scaled_mm.by_rows(*arguments), with_torch_ops(scaled_mm.by_rows, *arguments)):
            yield "scaled_mm"


def interpret(seed, is_every):
    """Run all calls with small tiles, so that rows of the shapes above are longer than some."""
    interpret_rightly()
    generator, wrong = torch.Generator().manual_seed(seed), []
    for number, shape in enumerate(SHAPES):
        wide = (32, 64, 8192)[(number + seed) % 3]
        kernels._WIDE, kernels._TILE, kernels._SUMS = wide, min(wide, 64), (2, 32)
        kernels._tile.cache_clear()
        dtypes = DTYPES if is_every else [DTYPES[(number // 3 + number + seed) % 3]]
        for dtype in dtypes:
            wrong += wrong_rounding(generator, shape, dtype)
        if is_every or number % 3 == 2:
            wrong += wrong_scaling(generator, shape, dtypes[0])
    wrong += wrong_products(generator, DTYPES[seed % 3])
    return wrong


def compile_all(capability, is_every):
    """Compile what rows of up to, and of more than, the columns of a tile start."""
    from torchtether.gpu import rounding_kernels

    texts, wrong = [], []
    found = compiled_only(rounding_kernels, capability, texts.append)
    kernels._kernels = lambda: found
    for columns, one in ((16384, torch.float32), (4096, torch.bfloat16), (33, torch.float16)):
        for dtype in DTYPES if is_every else [one]:
            for name, call in launches(columns, dtype).items():
                texts.clear()
                try:
                    assert call() is not None
                    (text,) = texts
                    assert "div.full" not in text, "a quotient is not rounded correctly"
                    assert "div.approx" not in text, "a quotient is not rounded correctly"
                    assert columns % 16 or "ld.global.v4.b32" in text, "reads fewer than 16 bytes at once"
                except Exception as error:  # of many types
                    wrong.append(f"{name} {columns} {dtype}: {error!r}")
    return wrong


def launches(columns, dtype):
    """Calls that start one kernel each, by names."""
    x, bias = torch.zeros(3, columns, dtype=dtype), torch.zeros(columns, dtype=dtype)
    sums, steps, scale = torch.zeros(3, columns, dtype=torch.int32), torch.ones(3, 1), torch.ones(columns)
    found = {f"units {kind}": partial(kernels.units, x, kind, rounding.BLOCKS.get(kind)) for kind in KINDS}
    found |= {f"codes {kind}": partial(kernels.codes, x, kind) for kind in rounding.ROWS}
    found |= {f"scaled {i}": partial(kernels.scaled, sums, steps, dtype, **some) for i, some in enumerate((
        {}, {"scale": scale[:1]}, {"scale": scale, "bias": bias},
    ))}  # fmt: skip
    return found


if __name__ == "__main__":
    what, number, *every = sys.argv[1:]
    serving.DEVICES.add("cpu")
    print(json.dumps((interpret if what == "interpret" else compile_all)(int(number), bool(every))))
