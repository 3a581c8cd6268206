"""One tensor object, the implementation behind it, and who holds either."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

as_plain = torch._C.DisableTorchFunctionSubclass
"""Inside, tensor subclasses answer as ``Tensor`` does: their attributes are read without running their code."""


def call_plain(function: Callable[..., Any], *args: Any) -> Any:
    """Return what ``function(*args)`` gives inside ``as_plain``, in one step that no interrupt can leave half way.

    Before the ``__exit__`` of a context manager an interrupt can come; then subclasses would stay plain for ever.
    """
    return torch._C._disabled_torch_function_impl(function, (), args, {})  # type: ignore[attr-defined]


def swap_impl(one: Tensor, two: Tensor) -> None:
    """Exchange the contents of two objects: storage, dtype, device, layout, autograd state; nothing of Python's.

    ``torch.utils.swap_tensors`` swaps class and attributes first and this last, although only this can refuse, so a
    refusal leaves a torn object; it also poisons a graph that may still be needed.  Refuses C++ weak references only.
    """
    torch._C._swap_tensor_impl(one, two)  # type: ignore[attr-defined]


def impl_id(tensor: Tensor) -> int:
    """Return which implementation the object has now; there is no public way to tell one from another."""
    with as_plain():
        return tensor._cdata  # type: ignore[no-any-return]


def find_cpp_weakly_held(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Find the tensors to which C++ (CUDA graphs, an autocast cache) holds a weak reference, which forbids exchange.

    Nothing tells but the exchange itself, so each is exchanged with itself.
    """
    found, swap = [], torch._C._swap_tensor_impl  # type: ignore[attr-defined]
    for tensor in tensors:
        try:
            swap(tensor, tensor)
        except RuntimeError:
            found.append(tensor)
    return found


def reset(held: Tensor, new: Tensor) -> bool:
    """Give the leaf ``held`` the contents of ``new``, if ``held.data = new`` does all that an exchange would do.

    So it is for nearly all parameters; for all others nothing happens, and the answer is no.  It keeps the
    implementation with its hooks, as stock conversions do.  A grad would have to follow, a view would stay a view of
    what it was cut from, and a buffer would share its version with what it was detached from.  Torch refuses, before
    it does anything, another kind of memory and whole numbers that would require grad.  Compressed sparse layouts are
    left out: torch would take the new dtype and keep the old values.
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
    """Return whether ``one.data = two`` is allowed: memory on any devices is one kind, ``meta`` is another."""
    return bool(call_plain(torch._has_compatible_shallow_copy_type, one, two))


def set_data(held: Tensor, new: Tensor) -> None:
    """Do ``held.data = new`` as torch does of plain tensors: Python's side of a wrapper stays as it is."""
    call_plain(Tensor.data.__set__, held, new)  # type: ignore[attr-defined]


def use_counts(tensors: Iterable[Tensor]) -> list[int]:
    """Return ``use_count`` of each."""
    with as_plain():
        return [tensor._use_count() for tensor in tensors]  # type: ignore[attr-defined]


def use_count(tensor: Tensor) -> int:
    """Return how many own the implementation: 1 for the object itself, more for views, graphs and C++."""
    with as_plain():
        return tensor._use_count()  # type: ignore[no-any-return, attr-defined]


def has_gradient_edge(tensor: Tensor) -> bool:
    """Return whether an AccumulateGrad node exists for this leaf, that is: some graph, spent or not, leads to it."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    before = use_count(tensor)
    edge = torch.autograd.graph.get_gradient_edge(tensor)  # makes the node if there is none
    existed = use_count(tensor) == before
    del edge
    return existed


def as_class(kind: type[Tensor], data: Tensor, requires_grad: bool) -> Tensor:
    """Return a new object of ``kind`` over the memory of ``data``.

    ``nn.Parameter(...)`` cannot make a subclass without calling its constructor, which may ask for anything.
    """
    made: Tensor = Tensor._make_subclass(kind, data, requires_grad)  # type: ignore[attr-defined]
    return made


def hooks_of(tensor: Tensor) -> tuple[Any, Any]:
    """Return the dictionaries of both kinds of hooks, ``None`` where there was never one."""
    with as_plain():
        return tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def seat_hooks(tensor: Tensor) -> None:
    """Have hooks of both kinds that the object holds fire again, also those registered later.

    The dictionaries belong to the object, but the implementation calls them: after an exchange the new one knows
    nothing of them, and only an assignment tells it.
    """
    with as_plain():
        hooks, post = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if hooks is not None:
            tensor._backward_hooks = hooks
        if post is not None:
            tensor._post_accumulate_grad_hooks = post  # type: ignore[attr-defined]


def _find_empty() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    try:
        return torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[no-any-return, attr-defined]
    except AttributeError:
        return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


empty_on_cpu = _find_empty()
"""``torch.empty_strided(shape, stride, dtype=dtype, device="cpu")`` past the dispatcher, where nothing looks on: what
graphs of the compiler call for their results, at half the price of the public one."""


def _ask_each(*tensors: Any) -> bool:
    with as_plain():
        return any(isinstance(one, Tensor) and one.requires_grad for one in tensors)


any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _ask_each)
"""Whether one of the tensors (others are not) requires grad; a subclass is not asked through its own Python."""


def storage_id(tensor: Tensor) -> int:
    """Return the identity of the memory object under a strided tensor, also on ``meta``, where there is no address."""
    return int(tensor.untyped_storage()._cdata)


def local_or_itself(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, any other tensor itself; ``to_local`` would make a graph of it."""
    return getattr(tensor, "_local_tensor", tensor)


make_wrapper: Callable[..., Any] = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
"""``make_wrapper(cls, size, strides=..., dtype=..., device=..., requires_grad=...)``: a tensor without memory.

It is how torch documents that such subclasses are made; it has no public name.
"""

typed_storage: Callable[[Tensor], Any] = Tensor._typed_storage  # type: ignore[attr-defined]
"""The typed storage without the warning of ``Tensor.storage``; torch's own code calls it."""


def is_fake(tensor: Tensor) -> bool:
    """Return whether ``tensor`` only pretends to have numbers, as tensors inside a ``FakeTensorMode`` do."""
    return isinstance(tensor, torch._subclasses.FakeTensor)


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor of which one is a view, as autograd knows it; ``None`` if it is none."""

checkpoint_offset_of: Callable[[Any], int | None] = attrgetter("_checkpoint_offset")
"""Where in its file a storage lies that ``torch.load`` has read inside a ``FakeTensorMode``."""


def has_hooks(tensor: Tensor) -> bool:
    """Return whether a gradient hook of either kind was ever registered on ``tensor``."""
    return tensor._backward_hooks is not None or tensor._post_accumulate_grad_hooks is not None  # type: ignore[attr-defined]
