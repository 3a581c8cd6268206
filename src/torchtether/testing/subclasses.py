"""Does a tensor subclass survive what torch does to parameters? The laws, run on any class."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from ..errors import LawError
from .law import chosen, quiet, run
from .report import Report
from .tensors import LAWS, Subject


def check_tensor_subclass(
    make: Callable[[], Tensor],
    *,
    laws: Iterable[str] | str | None = None,
    values: Callable[[Tensor], Tensor] | None = None,
    linear: Callable[[Tensor, Tensor], Tensor] | None = None,
    name: str | None = None,
) -> Report:
    """Check which laws of ``nn.Module``, optimizers, checkpoints and compilers a tensor subclass keeps.

    Nothing is assumed of the class but that ``make`` makes one: it may be ours, torchao's, a DTensor or your own.
    torch's process-wide flags and random numbers are as they were afterwards.  A class that crashes the process in
    ``share_memory_`` does so in another one.

    Args:
        make: gives a *new* tensor of the class at each call: two-dimensional, (N, K), on the CPU, not requiring grad,
            with a floating-point ``dtype`` to the outside.  Draw its values from torch's generator, which is seeded
            before each call, so that they differ; keep N and K small.
        laws: ids of the laws to run; all but the optional ones if absent. Optional: ``"fsdp2"``, which starts two
            processes, and for which ``make`` has to be a function of a module.
        values: reads the values of a tensor of the class into a plain one; needed if it is no DTensor and has neither a
            ``dequantize()`` nor inner tensors that are its values.
        linear: ``linear(x, weight)`` is ``x @ weight.T``; ``torch.nn.functional.linear`` if absent.
        name: how the report calls it; the name of the class if absent.

    Raises:
        LawError: there is no law of that id, or ``make`` does not give a two-dimensional tensor.

    >>> import torch, torchtether as tt
    >>> report = check_tensor_subclass(lambda: tt.Weight.encode(torch.randn(8, 16), tt.int8()), laws=["clone", "swap"])
    >>> print(report)
    Weight: 2 of 2 laws hold
      ok       clone            clone() keeps class, metadata and values, in memory of its own
      ok       swap             torch.utils.swap_tensors exchanges it with a plain Parameter
    """
    picked = chosen(LAWS, laws)
    subject = Subject(make, values, linear)
    with quiet():
        first = subject.make_tensor()
    if not isinstance(first, Tensor) or first.dim() != 2:
        got = f"one of shape {tuple(first.shape)}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
        raise LawError(f"make() must give a tensor of two dimensions, it gives {got}")
    return run(picked, subject, name or type(first).__name__)
