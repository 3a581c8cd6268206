"""Quantizing activations: Weights whose products round their inputs to 8 or 4 bits, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from .._checks import Model, as_module
from ..errors import ConversionError, RuleError
from ..ties.names import named_tensors
from ..torch_private.tensors import local_or_itself
from ..weights.spec import check_activations
from ..weights.weight import Weight
from .selection import matched_names

Activations = Literal["int8", "float8", "mxfp8", "mxfp4", "nvfp4"] | None


def quantize_activations(model: Model, to: Activations = "int8", *, only: str | Sequence[str] | None = None) -> Model:
    """Round the inputs of ``F.linear`` with the Weights of ``model`` to 8 or 4 bits, until this is called again.

        "int8"      each row (token) in 255 steps: an error of at most 1/254 of its largest value
        "float8"    each row to float8_e4m3fn, scaled by its largest value to 448: an error of at most 1/16 of a value
        "mxfp8"     32 columns of a row as ``mxfp8()`` rounds weights: float8_e4m3fn times a power of two
        "mxfp4"     32 columns of a row as ``mxfp4()`` does: 4 bits times a power of two
        "nvfp4"     16 columns of a row: 4 bits times a scale in e4m3, and a power of two for the row
        None        no rounding

    This is dynamic activation quantization, per token and symmetric.  For Gaussian inputs the error of a product is
    0.7 to 1 % (int8), 2 to 3 % (float8, mxfp8), 8 to 10 % (nvfp4) or 11 to 13 % (mxfp4) of its norm; inputs with a few
    large values lose more if their row has one scale.  With AVX2 it makes products with 4-bit integers faster; on CUDA
    devices Weights of the same kind (for "int8" and "float8": with a scale per row) go to torch's products of codes
    with codes; elsewhere it gains no time.

    ``only``: globs over the names of Weights; by default all Weights of two dimensions.  Stacks of matrices, which
    ``F.grouped_mm`` multiplies (experts), are included only if a glob matches their name.  The setting is part of the
    Weight, as its tie is: it stays through conversions, loads, quantizing again, copies and files of ``tt.save``, and
    ends with ``dequantize``.  Gradients pass as if nothing were rounded.  A row with a value that is not finite gives
    nan.  The products of convolutions, embeddings, recurrent modules and ``x @ weight`` are not affected.

    Raises:
        ArgumentError: ``to`` is none of these values.
        RuleError: a glob matches no Weight, or there is none.
        ConversionError: a Weight is sharded. In each case nothing has changed.

    >>> import torch, torchtether as tt
    >>> layer = tt.quantize(torch.nn.Linear(64, 8), tt.int4(32))
    >>> x = torch.linspace(-1, 1, 64)
    >>> exact = layer(x).detach(); rounded = tt.quantize_activations(layer, "int8")(x).detach()
    >>> bool(0 < (rounded - exact).norm() / exact.norm() < 0.02)
    True
    """
    given, model = model, as_module(model)
    check_activations(to, "to")
    dims = (2,) if only is None else (2, 3)
    weights = {name: held for name, held in named_tensors(model).items() if _is_weight(held, dims)}
    if not weights:
        few = "two" if only is None else "two or three"
        raise RuleError(f"the model has no Weight of {few} dimensions", fix="Quantize its linear layers first.")
    chosen: list[Weight] = []
    for name in matched_names("*" if only is None else only, weights, RuleError, "only= matches no Weight"):
        held = weights[name]
        if not isinstance(held, Weight):
            fix = "Call quantize_activations before fully_shard."
            raise ConversionError(
                "is sharded, and the tensors that FSDP2 gathers would keep the old setting", name=name, fix=fix
            )
        chosen.append(held)
    for held in chosen:
        held.set_activations(to)
    return given


def _is_weight(tensor: Tensor, dims: tuple[int, ...]) -> bool:
    inner = local_or_itself(tensor)
    return isinstance(inner, Weight) and inner.dim() in dims and not inner.scheme.transparent
