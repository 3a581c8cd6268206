"""Random products with quantized weights, in a child process, because a kernel that reads out of bounds may crash it.

    python -m tests.weights.kernel_cases SEED COUNT FAST

prints a JSON list of the cases that were wrong, on a machine with fast products of 16 bits (``FAST`` is 1) or without.
The number of each case is written to stderr before it runs, so that a crash names it.
"""

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch

import torchtether as tt
from tests.catalog import SCHEMES
from torchtether import compiled
from torchtether.schemes import Biased
from torchtether.weights.ops import graph_ops
from torchtether.weights.products import layout, table

F = torch.nn.functional
ROWS = [row for row in SCHEMES if 2 in row.ranks and not row.scheme.transparent]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
EPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20, torch.float64: 2.0**-20}
"""Twice what one rounding costs, for torch's own products round partial sums; of float32, a few additions more."""


@contextmanager
def as_on(fast, is_compiled=True):
    """The table answers as on a machine with fast products of 16 bits or without, with the compiled room or without."""
    layout._found.cache_clear()  # which keep what it has answered
    graph_ops._known.cache_clear()
    says = {"has_fast_halves": mock.Mock(return_value=fast), "compiled": mock.Mock(wraps=compiled)}
    says["compiled"].native = compiled.native if is_compiled else lambda: None
    try:
        with mock.patch.multiple(table, **says):
            yield
    finally:
        layout._found.cache_clear()
        graph_ops._known.cache_clear()


def choose(layout, dtype, rows):
    """The name of the kernel that the table names first for ``rows`` rows of input on the CPU, or ``chunks``."""
    fitting = table.kernels_for(layout, dtype) if layout is not None else ()
    return next((kernel for kernel, most in fitting if rows <= most), "chunks")


def pick(generator, values):
    return values[int(torch.randint(len(values), (), generator=generator))]


def moved(part, generator):
    """The same numbers elsewhere: at any address that the dtype allows, as a slice of a file would be."""
    offset = int(torch.randint(1, 17, (), generator=generator))
    room = torch.zeros(part.numel() + offset, dtype=part.dtype)
    there = room[offset:].view(part.shape)
    there.copy_(part)
    return there


def inputs(generator, count, columns, dtype, kind):
    """``count`` rows of inputs, in the geometry that ``kind`` names."""
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    if kind == "vector":
        return draw(columns)
    if kind == "cube":
        return draw(2, count, columns)
    if kind == "turned":
        return draw(columns, count).t()
    if kind == "every other":
        return draw(count, 2 * columns)[:, ::2]
    if kind == "wide rows":
        return draw(count, columns + 3)[:, 1 : columns + 1]
    if kind == "expanded":
        return draw(1, columns).expand(count, columns)
    if kind == "turned cube":
        return draw(count, 2, columns).transpose(0, 1)
    if kind == "outliers":
        return draw(count, columns) * torch.where(torch.rand(columns, generator=generator) < 0.05, 300.0, 1.0).to(dtype)
    return moved(draw(count, columns), generator)


def rounded(x, activations):
    """``x`` as float64, each row rounded to 8 bits, or as it is; a step is found in float32 where ``x`` is no wider."""
    if activations is None or not x.numel():
        return x.double()
    x = x.double() if x.dtype == torch.float64 else x.float()
    step = x.abs().amax(-1, keepdim=True) / {"int8": 127, "float8": 448}[activations]
    step = step.clamp_min(torch.finfo(torch.float32).tiny)
    codes = x / step
    return (codes.round() if activations == "int8" else codes.to(torch.float8_e4m3fn)).double() * step.double()


def unrounded(weight):
    """The values as float64, without what the scheme rounds to 16 bits on its way to them."""
    scheme, spec = weight.spec.scheme, weight.spec
    if isinstance(scheme, Biased):
        spec = spec.replace(scheme=replace(scheme, arithmetic=torch.float32))
    return tt.Weight(weight.parts, spec).to(torch.float32).dequantize().double()


KINDS = ("plain", "vector", "cube", "turned", "every other", "wide rows", "expanded", "turned cube", "outliers")


def in_graph(x, weight, bias):
    """The op of compiled graphs, which is given an ``x`` with a batch of its own."""
    parts, told = list(weight.parts.values()), graph_ops.text_of(weight.spec)
    return torch.ops.torchtether.linear.default(x, bias, parts, told)


def case(seed):
    """What was computed, the largest error in units of what is allowed, and a description."""
    generator = torch.Generator().manual_seed(seed)
    row = pick(generator, ROWS)
    rows, columns = pick(generator, (1, 2, 3, 16, 17, 65)), pick(generator, (1, 7, 16, 33, 64, 100, 128, 200, 256, 384))
    count, dtype, kind = pick(generator, (0, 1, 1, 2, 3, 4, 5, 9)), pick(generator, DTYPES), pick(generator, KINDS)
    weight = tt.Weight.encode(torch.randn(rows, columns, generator=generator), row.scheme).to(dtype)
    place = pick(generator, ("whole", "moved", "cut", "turned"))
    if place == "moved":
        weight = weight.map(lambda part: moved(part, generator))
    if place == "cut":
        try:
            weight = weight[rows // 2 :]
        except tt.UnsupportedOpError:
            place = "whole"
    if place == "turned":
        weight = weight.t()
    weight.set_activations(pick(generator, (None, None, "int8", "int8", "float8")))
    x = inputs(generator, count, weight.shape[1], dtype, kind)
    bias = pick(generator, (None, "plain", "strided"))
    if bias is not None:
        bias = torch.randn(2 * weight.shape[0], generator=generator).to(dtype)[:: 2 if bias == "strided" else 1]
        bias = bias[: weight.shape[0]]
    with torch.no_grad():
        got = F.linear(x, weight, bias)
        again = F.linear(x, weight, bias)  # by another way: the kernel is known now
    if not torch.equal(got.nan_to_num(), again.nan_to_num()):
        return float("inf"), f"{seed}: not the same again"
    if dtype == weight.dtype and weight.spec.is_contiguous:
        for _ in range(2):  # the second time without Python, where a kernel took it
            again = in_graph(x, weight, bias)
            if again.shape != got.shape or not torch.equal(got.nan_to_num(), again.nan_to_num()):
                return float("inf"), f"{seed}: not the same in a graph"
    values = weight.to(torch.float32).dequantize().double()
    meant = rounded(x, weight.spec.activations)
    expected = F.linear(meant, values, None if bias is None else bias.double())
    what = f"{seed}: {row.id} {rows}x{columns} {place}, {kind} {tuple(x.shape)} {dtype} {weight.spec.activations}"
    if got.shape != expected.shape or got.dtype != dtype:
        return float("inf"), f"{what}: {tuple(got.shape)} {got.dtype}"
    # weights rounded to the dtype, or 16-bit inputs rounded to 2**-15 of the largest; then one rounding of the result
    # where torch multiplies rounded inputs, the product, its multiple and the sum with the bias are rounded
    eps, wide = EPS[dtype] * (1 if weight.spec.activations is None else 2), meant.abs()
    allowed = eps * (F.linear(wide, values.abs()) + expected.abs()) + 1e-6
    if dtype.itemsize == 2 and x.numel():
        allowed = allowed + F.linear(wide, (unrounded(weight) - values).abs())
        allowed = allowed + 2.0**-15 * F.linear(wide.amax(-1, keepdim=True).expand_as(wide), values.abs())
    error = ((got.double() - expected).abs() / allowed).nan_to_num(float("inf"))
    return float(error.max()) if error.numel() else 0.0, what


def main(seed, count, fast):
    wrong = []
    with as_on(fast):
        for number in range(seed, seed + count):
            print(number, file=sys.stderr, flush=True)
            error, what = case(number)
            if not error <= 1:
                wrong.append([error, what])
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")
