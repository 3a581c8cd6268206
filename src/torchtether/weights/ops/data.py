"""The rule for ``weight.data = tensor``: the object stays and gets other contents."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...errors import SchemeError, UnsupportedOpError
from ...torch_private.dispatching import is_traceable_wrapper_subclass
from ...torch_private.tensors import is_fake
from ..contents import contents_of, put_contents
from ..dispatch import rule
from ..module_load import encoded_as, is_written_in_place
from ..weight import Weight


@rule(Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(op: Any, held: Weight, given: Tensor) -> None:
    """Set ``held.data`` as ``load_state_dict(assign=True)`` does: the old memory is not written.

    ======  ==========================================================================
    given   contents of ``held`` afterwards
    ======  ==========================================================================
    Weight  the given parts, scheme, dtype, device and shape
    plain   the given values, encoded in the held scheme, on the given device and dtype
    ======  ==========================================================================

    The tie record, attributes, hooks, ``requires_grad`` and the grad stay those of ``held``, also if the shape changes;
    the first rows then keep their codes if their values are unchanged.  Where other tensors share the parts (a
    transposed alias), plain values are written into the held storage, because only such a write reaches them.

    Raises:
        SchemeError: the held scheme cannot hold the given values or shape; ``held`` is unchanged.
        TieError: other tensors share the parts, and the given shape, device or dtype is not the held one.
        UnsupportedOpError: ``given`` is a wrapper subclass of another library.
        ConversionError: only one of the two is on ``meta``, which torch refuses for plain tensors, too.

    ``plain.data = weight`` has no rule: torch dispatches on the held tensor only, and leaves it without memory.
    """
    if isinstance(given, Weight):
        activations = given.spec.activations or held.spec.activations
        put_contents(held, contents_of(given, given.spec.replace(tie=held.tie, activations=activations)))
        return
    if is_traceable_wrapper_subclass(given):
        raise UnsupportedOpError(
            f".data of a Weight cannot become a {type(given).__name__}", fix="Give a Weight or a plain tensor."
        )
    if given.dtype.itemsize < 2 and not held.scheme.transparent:
        raise SchemeError(
            f".data of a Weight cannot become {given.dtype} values, which were rounded by an unknown scale",
            fix="Give float32, bfloat16 or float16.",
        )
    if is_written_in_place(held, given):
        with torch.no_grad():
            held.copy_(given)
    elif _is_alike(held, given) and not held.scheme.transparent:
        made = held.map(torch.clone, cut=())
        with torch.no_grad():
            made.copy_(given)
        put_contents(held, made)
    else:
        made = encoded_as(held, given)
        if held.shape != given.shape:
            _keep_rows(made, held, given)
        put_contents(held, made)


def _is_alike(held: Weight, given: Tensor) -> bool:
    """Return whether ``given`` could be copied into ``held`` and nothing but values would change."""
    if held.is_meta or is_fake(held) or is_fake(given):
        return False
    return (held.shape, held.device, held.dtype) == (given.shape, given.device, given.dtype)


def _keep_rows(made: Weight, held: Weight, given: Tensor) -> None:
    """Copy the first rows of ``held`` into ``made`` if ``given`` has their values, as a resized embedding has.

    Encoding the values again could change codes and scales.  Nothing is copied where rows share a part, or where the
    dtypes or devices differ.
    """
    count = min(len(held), len(given))
    if held.shape[1:] != given.shape[1:] or not count or (held.device, held.dtype) != (given.device, given.dtype):
        return
    if held.is_meta or is_fake(given):
        return
    with torch.no_grad(), suppress(UnsupportedOpError):
        rows = held.detach()[:count]
        if torch.equal(rows.dequantize(), given[:count]):
            made[:count].copy_(rows)
