"""The schemes by their common names."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch

from .._checks import check_flag, describe
from ..errors import RuleError, SchemeError
from .affine import Affine
from .codebook import Codebook
from .column_scaled import ColumnScaled
from .scaled_float import ScaledFloat
from .scheme import Scheme
from .tables import FP4, NF4


def int8(
    group_size: int | None = None,
    *,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float32,
    fit: str = "range",
) -> Affine:
    """Return eight-bit integers with one scale per row, or per ``group_size`` columns.

    Unless ``symmetric``, each scale has a zero point. Scales have ``scale_dtype``; ``fit="mse"`` searches for better
    ones. Raises SchemeError for an unknown ``scale_dtype`` or ``fit``, or a bad ``group_size``.

    >>> int8().nbytes((64, 64), torch.bfloat16)
    4352
    """
    check_flag(symmetric, "symmetric")
    return Affine(bits=8, symmetric=symmetric, block=(1, group_size), scale_dtype=scale_dtype, fit=fit)


def int4(
    group_size: int | None = 64,
    symmetric: bool = False,
    *,
    scale_dtype: torch.dtype = torch.float32,
    fit: str = "range",
) -> Affine:
    """Return four-bit integers with a scale and (unless symmetric) a zero point per ``group_size`` columns.

    ``None`` is one group per row. Scales of 16 bits make a value 0.25 bits smaller in groups of 64. ``fit="mse"``
    searches for scales with a smaller error. Raises SchemeError for an unknown ``scale_dtype`` or ``fit``, or a bad
    ``group_size``.

    >>> int4(32).nbytes((64, 64), torch.bfloat16)
    2688
    """
    check_flag(symmetric, "symmetric")
    return Affine(bits=4, symmetric=symmetric, block=(1, group_size), scale_dtype=scale_dtype, fit=fit)


def sinq(
    bits: int = 4,
    group_size: int | None = 64,
    symmetric: bool = False,
    *,
    scale_dtype: torch.dtype = torch.float32,
    fit: str = "range",
) -> ColumnScaled:
    """Return integers of 1 to 8 ``bits`` as in ``int4``, with one more scale for each column.

    Columns and rows are balanced by Sinkhorn's iteration before they are rounded (arXiv 2509.22944), which needs no
    data. A group of columns has a zero point unless ``symmetric``. Only for tensors of two dimensions and more.
    Raises SchemeError for an unknown ``scale_dtype`` or ``fit``, or bad ``bits`` or ``group_size``.

    >>> sinq().nbytes((64, 64), torch.bfloat16)
    2624
    """
    check_flag(symmetric, "symmetric")
    return ColumnScaled(Affine(bits=bits, symmetric=symmetric, block=(1, group_size), scale_dtype=scale_dtype, fit=fit))


FP8_BLOCKS: dict[str, tuple[int | None, int | None]] = {
    "row": (1, None),
    "tensor": (None, None),
    "block": (128, 128),
}
"""The block of each granularity."""


def fp8(granularity: str = "row", *, scale_dtype: torch.dtype = torch.float32) -> ScaledFloat:
    """Return float8_e4m3fn with one scale per ``"row"``, ``"tensor"``, or ``"block"`` of 128 by 128 (DeepSeek).

    Raises SchemeError for another ``granularity`` or ``scale_dtype``.

    >>> fp8("block").nbytes((256, 128), torch.bfloat16)
    32776
    """
    if not isinstance(granularity, str) or granularity not in FP8_BLOCKS:
        raise SchemeError(f"granularity must be one of {', '.join(FP8_BLOCKS)}, got {granularity!r}", name="fp8")
    return ScaledFloat("e4m3", block=FP8_BLOCKS[granularity], scale_dtype=scale_dtype)


def nf4(double_quant: bool = False, *, block_size: int = 64, fit: str = "range") -> Codebook:
    """Return the 4-bit NormalFloat of QLoRA, as bitsandbytes computes it.

    There is one scale per ``block_size`` values in row-major order; ``double_quant`` quantizes the scales, too, and
    ``fit="mse"`` searches for better ones. Raises SchemeError for an unknown ``fit`` or a bad ``block_size``.

    >>> nf4().nbytes((64, 64), torch.bfloat16), nf4(double_quant=True).nbytes((64, 64), torch.bfloat16)
    (2304, 2120)
    """
    check_flag(double_quant, "double_quant")
    return Codebook(NF4, block_size=block_size, nested=double_quant, fit=fit)


def fp4(double_quant: bool = False, *, block_size: int = 64) -> Codebook:
    """Return the 4-bit float of bitsandbytes (not E2M1: see ``mxfp4`` and ``nvfp4``), with scales as in ``nf4``.

    Raises SchemeError for a bad ``block_size``.

    >>> fp4().nbytes((64, 64), torch.bfloat16)
    2304
    """
    check_flag(double_quant, "double_quant")
    return Codebook(FP4, block_size=block_size, nested=double_quant)


def mxfp8(element: str = "e4m3", *, scale_rounding: str = "rceil") -> ScaledFloat:
    """Return OCP microscaling fp8: ``"e4m3"`` or ``"e5m2"`` with a power of two per 32 columns.

    The smaller elements of ``ScaledFloat`` are accepted, too: ``"e2m3"`` makes it mxfp6.  ``scale_rounding`` says how
    the power is chosen: by default one that clips nothing.  Raises SchemeError for an unknown ``element`` or
    ``scale_rounding``.

    >>> mxfp8().nbytes((64, 64), torch.bfloat16)
    4224
    """
    return ScaledFloat(element, block=(1, 32), scale_dtype=torch.float8_e8m0fnu, scale_rounding=scale_rounding)


def mxfp4(*, scale_rounding: str = "even") -> ScaledFloat:
    """Return OCP microscaling fp4: E2M1 with a power of two per 32 columns.

    ``scale_rounding`` says how that power is chosen. Raises SchemeError for an unknown one.

    >>> mxfp4().nbytes((64, 64), torch.bfloat16)
    2176
    """
    return ScaledFloat("e2m1", block=(1, 32), scale_dtype=torch.float8_e8m0fnu, scale_rounding=scale_rounding)


def nvfp4(*, global_divides: bool = False) -> ScaledFloat:
    """Return NVIDIA's fp4: E2M1 with an e4m3 scale per 16 columns, and a float32 scale per tensor.

    ``global_divides`` keeps the latter inverted, as compressed-tensors stores it.  Raises ArgumentError unless it is a
    bool.

    >>> nvfp4().nbytes((64, 64), torch.bfloat16)
    2308
    """
    check_flag(global_divides, "global_divides")
    return ScaledFloat(
        "e2m1", block=(1, 16), scale_dtype=torch.float8_e4m3fn, global_scale=True, global_divides=global_divides
    )


NAMED: dict[str, Callable[[], Scheme]] = {
    "int8": int8,
    "int4": int4,
    "sinq": sinq,
    "fp8": fp8,
    "nf4": nf4,
    "fp4": fp4,
    "mxfp8": mxfp8,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
}


def resolve(scheme: str | Scheme) -> Scheme:
    """Return a scheme itself, or the default scheme of that name.

    Raises:
        RuleError: the name is unknown, or the argument is neither a name nor a scheme.
        SchemeError: a file could not name this scheme or hold its fields: found now rather than after training.

    >>> resolve("int8") == int8()
    True
    """
    if isinstance(scheme, Scheme):
        scheme.to_json()
        return scheme
    if isinstance(scheme, str) and scheme in NAMED:
        return NAMED[scheme]()
    if not isinstance(scheme, str):
        raise RuleError(f"a scheme or its name is needed, got {describe(scheme)}", fix="Try 'int8', or tt.int8().")
    if scheme.partition("(")[0] in NAMED:
        raise RuleError(f"{scheme!r} is text with options, and only names are taken as text", fix=f"Give tt.{scheme}.")
    near = difflib.get_close_matches(scheme.lower()[:80], NAMED, n=1, cutoff=0.5)
    fix = f"Did you mean {near[0]!r}?" if near else "Give one of these."
    raise RuleError(f"unknown scheme {scheme[:80]!r}, known are {', '.join(NAMED)}", fix=fix)
