"""One exchange: the new contents of a tensor object are made first, then set in steps that can be undone."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConversionError, TetherError
from ..geometry.blocks import STOCK
from ..torch_private.dispatching import is_traceable_wrapper_subclass
from ..torch_private.tensors import (
    as_class,
    base_of,
    has_hooks,
    has_own_grad_dtype,
    impl_id,
    seat_hooks,
    set_grad_dtype,
    swap_impl,
)
from ..weights.contents import can_put, contents_of, put_contents
from ..weights.spec import WeightSpec
from ..weights.weight import Weight

_CLASS = "_tether_class"  # the attribute in which a Weight keeps the Parameter subclass that it replaces


def is_simple(held: Tensor, new: Tensor) -> bool:
    """Return whether a plain tensor or Parameter gets plain contents, and has no grad, its dtype, or hook to keep."""
    if type(held) not in STOCK or type(new) is not Tensor or new.requires_grad or not held.is_leaf:
        return False
    if has_hooks(held) or has_own_grad_dtype(held):
        return False
    return held.grad is None and (not held.requires_grad or new.is_floating_point() or new.is_complex())


class Replacement:
    """One tensor object and its new contents; all memory is allocated first, and every step can be undone."""

    def __init__(
        self,
        held: Tensor,
        new: Tensor,
        new_grad: Tensor | None = None,
        is_own: bool = False,
        replaced: Collection[str] | None = None,
    ) -> None:
        """Allocate all memory. ``new_grad`` is the new grad, by default the old one in the dtype and device of ``new``.

        With ``is_own`` the caller gives ``new`` away, and it may be changed. ``replaced`` names the attributes that the
        class of ``held`` keeps on it: then neither the class nor these attributes are kept.
        """
        self.held, self.grad = held, held.grad if held.is_leaf else None
        if held.requires_grad and not (new.is_floating_point() or new.is_complex()):
            raise ConversionError(f"requires grad, which {new.dtype} does not support", fix="Freeze it first.")
        with torch.no_grad():
            self.shell = _shell(held, new, is_own)
            if has_own_grad_dtype(held):
                set_grad_dtype(self.shell, held)
            self.new_grad = None if self.grad is None else _new_grad(held, self.grad, new, new_grad)
        if self.grad is not None:
            try:
                self.shell.grad = self.grad if self.new_grad is None else self.new_grad  # swapped with the contents
            except RuntimeError as error:
                raise ConversionError(
                    f"has a grad of layout {self.grad.layout}, which cannot become {new.layout} ({error})",
                    fix="Set its grad to None first.",
                ) from None
        self.old = (type(held), held.__dict__, impl_id(held), self.grad is not None and impl_id(self.grad))
        self.old_slots: dict[str, Any] = {}
        self.new_dict: dict[str, Any] | None = None
        if is_wrapper(held) or is_wrapper(new):
            self.old_slots = _slots(held)
            self.new_dict = {**user_attributes(held, new), **self.shell.__dict__}
            if replaced is not None:
                kept = {name: value for name, value in held.__dict__.items() if name not in replaced}
                self.new_dict = {**kept, **self.shell.__dict__}
            elif isinstance(held, nn.Parameter) and not is_wrapper(held) and type(held) is not nn.Parameter:
                self.new_dict[_CLASS] = type(held)
            elif not is_wrapper(new):
                self.new_dict.pop(_CLASS, None)

    def apply(self) -> None:
        """Swap the implementation first, because only this step can fail; then set class, attributes, hooks, grad."""
        swap_impl(self.held, self.shell)
        if self.new_dict is not None:
            self.held.__class__ = type(self.shell)
            self.held.__dict__ = self.new_dict
            _fill_slots(self.held, _slots(self.shell))
        seat_hooks(self.held)
        if self.grad is not None and self.new_grad is not None:
            swap_impl(self.grad, self.new_grad)

    def undo(self) -> None:
        """Restore the state before ``apply``, however many of its steps have run."""
        kind, attributes, impl, grad_impl = self.old
        if self.grad is not None and self.new_grad is not None and impl_id(self.grad) != grad_impl:
            swap_impl(self.grad, self.new_grad)
        if impl_id(self.held) != impl:
            swap_impl(self.held, self.shell)
        if self.new_dict is not None:
            self.held.__class__ = kind
            self.held.__dict__ = attributes
            _fill_slots(self.held, self.old_slots)
        seat_hooks(self.held)


class Refill:
    """One Weight and its new contents, which are set inside the object: its implementation, class and hooks stay.

    No reference to the Weight can forbid that, not even a weak reference in C++.
    """

    def __init__(self, held: Weight, new: Weight, new_grad: Tensor | None = None) -> None:
        """Allocate all memory, as ``Replacement`` does."""
        self.held, self.grad = held, held.grad if held.is_leaf else None
        with torch.no_grad():
            self.new = contents_of(new, _spec_for(held, new))
            self.new_grad = None if self.grad is None else _new_grad(held, self.grad, new, new_grad)
        self.old, self.old_dict = contents_of(held), held.__dict__
        self.old_grad = self.grad is not None and impl_id(self.grad)

    def apply(self) -> None:
        """Set the contents, then those of the grad, which stays the same object."""
        put_contents(self.held, self.new)
        if self.grad is not None and self.new_grad is not None and self.new_grad is not self.grad:
            self.held.grad = self.new_grad
            swap_impl(self.grad, self.new_grad)

    def undo(self) -> None:
        """Restore the state before ``apply``, however many of its steps have run."""
        if self.grad is not None and self.new_grad is not None and impl_id(self.grad) != self.old_grad:
            swap_impl(self.grad, self.new_grad)
        put_contents(self.held, self.old)
        self.held.__dict__ = self.old_dict
        if self.grad is not None:
            self.held.grad = self.grad


def can_refill(held: Weight) -> bool:
    """Return whether ``held`` can get contents by ``Refill``; both must be on ``meta`` or neither.

    A view cannot: it would stay a view of its old base.
    """
    return base_of(held) is None and not held.is_inference()


def replace(
    held: Tensor,
    new: Tensor,
    new_grad: Tensor | None = None,
    *,
    is_own: bool = False,
    replaced: Collection[str] | None = None,
) -> Replacement | Refill:
    """Return the step that gives ``held`` the contents of ``new``, a Refill if possible; nothing has changed yet."""
    if isinstance(held, Weight) and can_refill(held) and can_put(held, new) and not new.is_inference():
        assert isinstance(new, Weight)
        return Refill(held, new, new_grad)
    return Replacement(held, new, new_grad, is_own, replaced)


def run_each(steps: Iterable[Callable[[], None]], errors: list[BaseException]) -> None:
    """Run all ``steps``, which may be repeated; append what they raise to ``errors``, which the caller clears.

    A step that fails runs once more, because the failure has freed its memory.
    """
    for step in steps:
        try:
            step()
        except TetherError as error:
            errors.append(error)
        except BaseException as error:
            errors.append(error)
            try:
                step()
            except BaseException as again:
                errors.append(again)


def _spec_for(held: Tensor, new: Weight) -> WeightSpec:
    """Return the spec of ``new``, with the tie and the activations of ``held`` where it has none."""
    tie, activations = new.tie, new.spec.activations
    if isinstance(held, Weight):
        tie, activations = tie or held.tie, activations or held.spec.activations
    return new.spec.replace(tie=tie, activations=activations)


def _shell(held: Tensor, new: Tensor, is_own: bool) -> Tensor:
    """Return an object of the class that ``held`` will have, over the memory of ``new``.

    It is ``new`` itself if ``is_own``.
    """
    is_parameter = isinstance(held, nn.Parameter)
    if isinstance(new, Weight):
        spec = _spec_for(held, new)
        if is_own and spec == new.spec and new.is_leaf and base_of(new) is None:
            made: Tensor = new
        else:
            made = new.map(Tensor.detach, spec)
    elif is_wrapper(new):
        made = new.detach()
    else:
        kind: type[Tensor] = type(held)
        if is_wrapper(held):
            kind = held.__dict__.get(_CLASS, nn.Parameter) if is_parameter else Tensor
        made = new.detach() if kind is Tensor else as_class(kind, new, False)
    made.requires_grad_(held.requires_grad)
    if is_parameter and is_wrapper(new):
        made._is_param = True
    return made


def _new_grad(held: Tensor, grad: Tensor, new: Tensor, given: Tensor | None) -> Tensor | None:
    """Return ``given``, by default ``grad`` as ``grad_shell`` makes it; in the old dtype if the user chose that."""
    is_kept = has_own_grad_dtype(held)
    if given is None:
        return grad_shell(grad, new, grad.dtype if is_kept else new.dtype)
    if given is grad:
        return grad
    return given.detach().to(grad.dtype if is_kept else given.dtype).requires_grad_(grad.requires_grad)


def grad_shell(grad: Tensor, new: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return ``grad`` in ``dtype`` on the device of ``new``; ``None`` if it has both already."""
    if grad.dtype == dtype and grad.device == new.device:
        return None
    made: Tensor
    if grad.is_meta:
        made = torch.zeros_like(grad, dtype=dtype, device=new.device)
    else:
        made = grad.detach().to(new.device, dtype)
    return made.requires_grad_(grad.requires_grad)


def restore_grad(held: Tensor, grad: Tensor) -> None:
    """Make ``grad`` that of ``held`` again, in its dtype and on its device."""
    with torch.no_grad():
        shell = grad_shell(grad, held, held.dtype)
    if shell is not None:
        swap_impl(grad, shell)
    held.grad = grad


def user_attributes(held: Tensor, new: Tensor | None) -> dict[str, Any]:
    """Return the attributes that users have set on ``held``, without those that its class keeps there.

    The attributes of a wrapper class of another library are known from ``new`` only: without it they are included.
    """
    if isinstance(held, Weight):
        return held._attributes()
    if not is_wrapper(held):
        return dict(held.__dict__)
    names = held.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    kept_by_class = new.__dict__ if new is not None and type(new) is type(held) else {}
    own = {*names, *kept_by_class, "_is_param"}
    return {key: value for key, value in held.__dict__.items() if key not in own}


def is_wrapper(tensor: Tensor) -> bool:
    return type(tensor) not in STOCK and (isinstance(tensor, Weight) or is_traceable_wrapper_subclass(tensor))


def _slots(tensor: Tensor) -> dict[str, Any]:
    """Return the fields that a class keeps in slots, as DTensor does."""
    names = copyreg._slotnames(type(tensor))  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names if hasattr(tensor, name)}


def _fill_slots(tensor: Tensor, slots: dict[str, Any]) -> None:
    for name, value in slots.items():
        setattr(tensor, name, value)
