"""A tensor object, the C++ implementation behind it, and references to either."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

as_plain = torch._C.DisableTorchFunctionSubclass
"""A context manager in which attributes of tensor subclasses are read as ``Tensor``'s, without running their code."""


def call_plain(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)`` as computed inside ``as_plain``, in one step that no interrupt can divide.

    An interrupt may come just before the ``__exit__`` of a context manager, and ``as_plain`` would stay in force.
    """
    return torch._C._disabled_torch_function_impl(function, (), args, {})  # type: ignore[attr-defined]


def swap_impl(one: Tensor, two: Tensor) -> None:
    """Exchange the implementations of two objects: storage, dtype, device, layout, autograd state; not class or dict.

    ``torch.utils.swap_tensors`` swaps class and attributes first and the implementations last, although only the last
    step can be refused, so a refusal leaves a torn object; it also poisons a graph that may still be needed.  This
    raises RuntimeError only if C++ holds a weak reference.
    """
    torch._C._swap_tensor_impl(one, two)  # type: ignore[attr-defined]


def impl_id(tensor: Tensor) -> int:
    """Return the identity of the object's current implementation; there is no public way to compare two."""
    with as_plain():
        return tensor._cdata  # type: ignore[no-any-return]


def find_cpp_weakly_held(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Find the tensors to which C++ (CUDA graphs, an autocast cache) holds a weak reference, which forbids exchange.

    Only an exchange detects it, so each tensor is exchanged with itself.
    """
    found, swap = [], torch._C._swap_tensor_impl  # type: ignore[attr-defined]
    for tensor in tensors:
        try:
            swap(tensor, tensor)
        except RuntimeError:
            found.append(tensor)
    return found


def reset(held: Tensor, new: Tensor) -> bool:
    """Assign ``held.data = new`` and return True, if that does all that an exchange would do; else return False.

    It suffices for nearly all parameters, and keeps the implementation with its hooks, as stock conversions do.
    Cases in which it does not suffice: a grad would have to be converted too; a view would stay a view of its base; a
    buffer would share its version counter with the tensor that it was detached from; compressed sparse layouts take
    the new dtype and keep the old values.  Torch itself refuses, before any change, another kind of memory and
    integers that would require grad.
    """
    if type(held) is not nn.Parameter or type(new) is not Tensor or held.size() != new.size():
        return False
    if held.grad is not None or held._base is not None or held.layout is not torch.strided:
        return False
    try:
        held.data = new
    except RuntimeError:
        return False
    return True


def is_same_kind(one: Tensor, two: Tensor) -> bool:
    """Return whether torch allows ``one.data = two``: all devices with memory are one kind, ``meta`` is another."""
    return bool(call_plain(torch._has_compatible_shallow_copy_type, one, two))


def set_data(held: Tensor, new: Tensor) -> None:
    """Assign ``held.data = new`` as for plain tensors: class and attributes of a wrapper stay as they are."""
    call_plain(Tensor.data.__set__, held, new)  # type: ignore[attr-defined]


def use_counts(tensors: Iterable[Tensor]) -> list[int]:
    """Return ``use_count`` of each of ``tensors``."""
    with as_plain():
        return [tensor._use_count() for tensor in tensors]  # type: ignore[attr-defined]


def use_count(tensor: Tensor) -> int:
    """Return the number of owners of the implementation: 1 for the object itself, more for views, graphs and C++."""
    with as_plain():
        return tensor._use_count()  # type: ignore[no-any-return, attr-defined]


def has_gradient_edge(tensor: Tensor) -> bool:
    """Return whether an AccumulateGrad node exists for this leaf, so that some graph, freed or not, leads to it."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    before = use_count(tensor)
    edge = torch.autograd.graph.get_gradient_edge(tensor)  # makes the node if there is none
    existed = use_count(tensor) == before
    del edge
    return existed


def has_own_grad_dtype(tensor: Tensor) -> bool:
    """Return whether the user chose another dtype for the grads of this leaf, by ``grad_dtype``, than its own."""
    return tensor.is_leaf and call_plain(_grad_dtype.__get__, tensor) is not tensor.dtype


def set_grad_dtype(tensor: Tensor, like: Tensor) -> None:
    """Give ``tensor`` the ``grad_dtype`` of ``like``."""
    call_plain(_grad_dtype.__set__, tensor, call_plain(_grad_dtype.__get__, like))


_grad_dtype: Any = Tensor.grad_dtype


def as_class(kind: type[Tensor], data: Tensor, requires_grad: bool) -> Tensor:
    """Return a new object of ``kind`` over the memory of ``data``.

    There is no public way to make an object of a subclass without its constructor, whose arguments are unknown.
    """
    made: Tensor = Tensor._make_subclass(kind, data, requires_grad)  # type: ignore[attr-defined]
    return made


def hooks_of(tensor: Tensor) -> tuple[Any, Any]:
    """Return the dictionaries of gradient hooks and post-accumulate hooks; ``None`` where none was ever registered."""
    with as_plain():
        return tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def seat_hooks(tensor: Tensor) -> None:
    """Connect the object's gradient hooks of both kinds, and those registered later, to its new implementation.

    The dictionaries belong to the object, but the implementation calls them.  After an exchange the new implementation
    does not have them until they are assigned.
    """
    with as_plain():
        hooks, post = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if hooks is not None:
            tensor._backward_hooks = hooks
        if post is not None:
            tensor._post_accumulate_grad_hooks = post  # type: ignore[attr-defined]


def is_in_backward() -> bool:
    """Return whether this thread runs a backward: hooks may be running, and must not be taken from under themselves."""
    return int(torch._C._current_graph_task_id()) != -1


def _find_empty() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    try:
        return torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[no-any-return, attr-defined]
    except AttributeError:
        return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


empty_on_cpu = _find_empty()
"""``torch.empty_strided(shape, stride, dtype=dtype, device="cpu")`` past the dispatcher, in half the time; compiled
graphs call it for their results. Only for use while ``is_observed`` is false."""


def _ask_each(*tensors: Any) -> bool:
    with as_plain():
        return any(isinstance(one, Tensor) and one.requires_grad for one in tensors)


any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _ask_each)
"""Return whether one of the arguments is a tensor that requires grad, without running Python code of subclasses."""


def storage_id(tensor: Tensor) -> int:
    """Return the identity of the storage under a strided tensor, also on ``meta``, where there is no address."""
    return int(tensor.untyped_storage()._cdata)


def local_or_itself(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, any other tensor itself; ``to_local`` would record an autograd graph."""
    return getattr(tensor, "_local_tensor", tensor)


make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
"""``make_wrapper(cls, size, strides=..., dtype=..., device=..., requires_grad=...)``: a tensor without memory.

Torch documents this function for wrapper subclasses; it has no public name.
"""

typed_storage: Callable[[Tensor], Any] = Tensor._typed_storage  # type: ignore[attr-defined]
"""Return the typed storage without the warning of ``Tensor.storage``; torch's own code calls it."""


def is_fake(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a FakeTensor, which has no values."""
    return isinstance(tensor, torch._subclasses.FakeTensor)


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""Return the tensor of which the argument is a view, as autograd records it; ``None`` if it is not a view."""


def checkpoint_offset_of(storage: torch.UntypedStorage) -> int | None:
    """Return the byte of its file at which ``storage`` begins, which ``torch.load`` notes if it loads to ``meta``."""
    return getattr(storage, "_checkpoint_offset", None)


def has_hooks(tensor: Tensor) -> bool:
    """Return whether a gradient hook of either kind was ever registered on ``tensor``."""
    return tensor._backward_hooks is not None or tensor._post_accumulate_grad_hooks is not None  # type: ignore[attr-defined]
