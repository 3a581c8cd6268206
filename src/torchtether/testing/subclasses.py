"""``check_tensor_subclass``: run the laws of tensor subclasses on any class."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from .._checks import check_callable, describe
from ..errors import ArgumentError, LawError
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

    The only assumption about the class is that ``make`` makes a tensor of it: it may be ours, torchao's, a DTensor or
    your own.  torch's process-wide flags and random state are restored afterwards.  ``share_memory_``, which crashes
    the process with some classes, runs in a child process.

    Args:
        make: returns a *new* tensor of the class at each call: two-dimensional, (N, K), on the CPU, not requiring grad,
            with a floating-point outer ``dtype``.  Draw its values from torch's generator, which is seeded before each
            call, so that they differ; keep N and K small.
        laws: ids of the laws to run; by default all but the optional one, ``"fsdp2"``, which starts two processes, and
            for which ``make`` must be a module-level function.
        values: returns the values of a tensor of the class as a plain tensor; needed unless it is a DTensor, has
            ``dequantize()``, or has an inner tensor that is its values.
        linear: ``linear(x, weight)`` returns ``x @ weight.T``; by default ``torch.nn.functional.linear``.
        name: the title of the report; by default the name of the class.

    Raises:
        LawError: there is no law of that id, or ``make`` does not return a two-dimensional tensor.
        ArgumentError: ``make``, ``values`` or ``linear`` is no function.

    >>> import torch, torchtether as tt
    >>> report = check_tensor_subclass(lambda: tt.Weight.encode(torch.randn(8, 16), tt.int8()), laws=["clone", "swap"])
    >>> print(report)
    Weight: 2 of 2 laws hold
      ok       clone            clone() keeps class, metadata and values, in memory of its own
      ok       swap             torch.utils.swap_tensors exchanges it with a plain Parameter
    """
    picked = chosen(LAWS, laws)
    if not callable(make):
        fix = "Give a function that returns a new tensor at each call."
        raise ArgumentError(f"is {describe(make)}, not a function", name="make", fix=fix)
    check_callable(values, "values")
    check_callable(linear, "linear")
    subject = Subject(make, values, linear)
    with quiet():
        first = subject.make_tensor()
    if not isinstance(first, Tensor) or first.dim() != 2:
        got = f"one of shape {tuple(first.shape)}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
        raise LawError(f"make() must return a tensor of two dimensions, it returns {got}")
    return run(picked, subject, name or type(first).__name__)
