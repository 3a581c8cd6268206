"""The exchange: what a parameter or buffer *is* changes, and the object stays.

Everything in this house that changes what a Parameter is goes through ``Exchange``: it finds every refusal first, keeps
hooks, grads, attributes and class, lets optimizer state follow, and can take all of it back.
"""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._signals import Arguments, Deferred, Result, renewed_after_fork, take
from ..errors import ConversionError, TetherError
from ..geometry.blocks import STOCK
from ..ties.names import named_tensors
from ..torch_private.fsdp2 import fsdp2_state, is_forwarded, renew_shards
from ..torch_private.modules import is_parametrization_cached
from ..torch_private.tensors import as_class, impl_id, reset, seat_hooks, swap_impl
from ..torch_private.versions import check_torch
from ..weights.weight import Weight
from .holders import find_holders
from .module_caches import Caches
from .optimizer_state import Before, Journal, Optimizers, check_belongs, follow, optimizers_of

Atomic = Literal["checked", "full"]

LOCK = renewed_after_fork(threading.RLock())
"""Converters take turns. Reading threads do not take it: they can see a Weight that is half exchanged."""

_SHOWN = 8
_CLASS = "_tether_class"  # under this attribute a Weight remembers the Parameter subclass that it stands in for


class Exchange:
    """Inside the ``with`` block, ``put`` gives parameters and buffers new contents; at its end optimizer state follows.

        with Exchange(model, optimizer=optimizer, verb="convert") as exchange:
            exchange.check(tensors)                 every refusal, before the first change
            for held in tensors:
                exchange.put(held, made_from(held))

    ``atomic="checked"`` frees old contents at once; an error inside the block (out of memory, say) leaves what was
    exchanged so far, consistent with its optimizer state, and says so.  ``atomic="full"`` keeps old contents until the
    end; an error leaves everything bit for bit as it was.

    Signals (Ctrl-C) wait inside, and raise where ``safe_point`` is called, inside ``during``, or when all is done: so
    in either mode what is put between two safe points is put whole.

    Raises:
        ConversionError: on entry, in ``inference_mode``, ``parametrize.cached()``, DDP, FSDP1, or a forwarded FSDP2.
        OptimizerError: on entry, the optimizer is that of another model.
    """

    def __init__(
        self, model: nn.Module, *, optimizer: Optimizers = None, atomic: Atomic = "checked", verb: str = "convert"
    ) -> None:
        if atomic not in ("checked", "full"):
            raise ConversionError(f"atomic={atomic!r} is neither 'checked' nor 'full'")
        self._optimizers = optimizers_of(optimizer)
        self._model, self._verb = model, verb
        self._journal: Journal | None = [] if atomic == "full" else None
        self._changes: dict[int, Before] = {}
        self._checked: set[int] = set()
        self._signals = Deferred()

    def __enter__(self) -> Exchange:
        check_torch()
        self._signals.begin()
        try:
            take(LOCK, self._signals)
        except BaseException:
            self._signals.end()
            raise
        try:
            self._grad_mode = torch.is_grad_enabled()
            self.modules = list(self._model.modules())
            check_place(self.modules, self._verb)
            check_belongs(self._model, self._optimizers)
            torch.clear_autocast_cache()  # holds C++ weak references, and casts of the old values
            self._caches = Caches(self.modules)
            self._caches.park()
        except BaseException:
            LOCK.release()
            self._signals.end()
            raise
        return self

    def safe_point(self) -> None:
        """Raise here what a signal that has waited raises: all that was put is consistent in itself."""
        if self._signals.waiting:
            self._signals.deliver()

    def during(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Call ``function``, which may take long and changes nothing of the model; signals do not wait meanwhile."""
        return self._signals.during(function, *args, **kwargs)

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Have ``undo`` called if everything is taken back: for what changes beside the contents of tensors."""
        if self._journal is not None:
            self._journal.append(undo)

    def check(self, held: Iterable[Tensor]) -> None:
        """Returns if every tensor of ``held`` can be exchanged now; nothing is changed.

        Raises ConversionError naming all that cannot, with their aliases, who holds them, and what to do.
        """
        tensors = list({id(tensor): tensor for tensor in held}.values())
        check_held(tensors, self._model, self._verb, self._caches.refs)
        self._checked.update(map(id, tensors))

    def put_each(self, held: Iterable[Tensor], make: Callable[[Tensor], Tensor]) -> None:
        """As ``put(tensor, make(tensor))`` for one of ``held`` after the other, in a fraction of the time.

        ``make`` runs without grad mode.  Before each of them is a safe point.
        """
        checked, changes, is_streamed = self._checked, self._changes, self._journal is None
        waiting = self._signals.waiting
        with torch.no_grad():
            for tensor in held:
                if waiting:
                    self._signals.deliver()
                new, key = make(tensor), id(tensor)
                if is_streamed and key in checked:
                    change = (tensor, tensor.dtype, tensor.device)
                    noted = changes.setdefault(key, change)  # first: state follows, whenever an interrupt comes
                    if reset(tensor, new):
                        continue
                    if noted is change:
                        del changes[key]
                self.put(tensor, new)

    def put_own(self, held: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        """As ``put`` for each pair, in half of the time; what is ``made`` is nobody else's, and may become anything."""
        checked, is_streamed = self._checked, self._journal is None
        for tensor, new in zip(held, made, strict=True):
            is_fit = is_streamed and id(tensor) in checked and tensor.size() == new.size()
            if is_fit and _is_simple(tensor, new) and new._base is None:  # with one it would stay a view
                self._swap(tensor, new.requires_grad_(tensor.requires_grad))
            else:
                self._put(tensor, new, is_own=True)

    def put(self, held: Tensor, new: Tensor) -> None:
        """``held`` is the same object with the contents of ``new``: values, dtype, device, layout, and being a Weight.

        It keeps ``requires_grad``, hooks of both kinds, attributes, and if it is a Parameter its class; its grad is the
        same object in the new dtype and on the new device.  A Weight keeps its tie record, and what it rounds
        activations to, if ``new`` has none.  ``new`` is left to the caller, and shares its memory with ``held`` from
        now on.
        """
        self._put(held, new)

    def _put(self, held: Tensor, new: Tensor, is_own: bool = False) -> None:
        """``put``; with ``is_own`` nobody else has ``new``, and it may become anything."""
        if id(held) not in self._checked:
            self.check([held])
        if new is held:
            return
        if new.shape != held.shape:
            raise ConversionError(
                f"holds shape {tuple(held.shape)}, its new contents have {tuple(new.shape)}",
                name=self.name(held),
                fix="Give contents of the same shape.",
            )
        if self._journal is None and _is_simple(held, new):
            self._swap(held, as_class(type(held), new, held.requires_grad))
            return
        try:
            replacement = Replacement(held, new, is_own=is_own)
        except TetherError as error:
            raise error.named(self.name(held)) from None
        if self._journal is not None:
            self._journal.append(replacement.undo)  # before the first step, so that any of them can be taken back
        change = (held, held.dtype, held.device)
        noted = self._changes.setdefault(id(held), change)  # first: state follows, whenever an interrupt comes
        try:
            replacement.apply()
        except BaseException:
            replacement.undo()  # in either mode no object is left half exchanged
            if noted is change:
                del self._changes[id(held)]
            raise

    def _swap(self, held: Tensor, shell: Tensor) -> None:
        """The one step of a simple exchange."""
        change = (held, held.dtype, held.device)
        noted = self._changes.setdefault(id(held), change)
        try:
            swap_impl(held, shell)
        except RuntimeError:
            if noted is change:
                del self._changes[id(held)]
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                try:
                    follow(self._optimizers, self._changes.values(), self._journal)
                    self._renew()
                except BaseException as late:
                    self._give_up(late)
                    raise
            else:
                self._give_up(error)
        finally:
            self._journal = None  # frees what was held for a rollback
            if torch.is_grad_enabled() is not self._grad_mode:  # what was left in the middle of torch's own no_grad
                torch.set_grad_enabled(self._grad_mode)
            LOCK.release()
            self._signals.end()

    def _renew(self, *, is_partial: bool = False) -> None:
        self._caches.renew(changed=bool(self._changes), is_partial=is_partial)
        if self._changes:
            torch.clear_autocast_cache()
            for module in self.modules:
                state = fsdp2_state(module) if _is_distributed(type(module)) else None  # type: ignore[arg-type]
                if state is not None:
                    renew_shards(state)

    def _give_up(self, error: BaseException) -> None:
        if self._journal is not None:
            for undo in reversed(self._journal):
                undo()
            self._journal.clear()
            self._renew()
            return
        try:
            follow(self._optimizers, self._changes.values())
        finally:
            self._renew(is_partial=True)
        if self._changes and isinstance(error, Exception):
            last = self.name(list(self._changes.values())[-1][0])
            raise ConversionError(
                f"{self._verb} stopped after {len(self._changes)} of {len(self._checked)} tensors, the last {last}: "
                f"{type(error).__name__}: {error}",
                fix="What was done stays; to have it taken back, use atomic='full'.",
            ) from error

    def name(self, held: Tensor) -> str:
        """The names under which the model has ``held``, in words; they take a walk, so only errors ask."""
        return said(names_of(self._model).get(id(held), ()))


def _is_simple(held: Tensor, new: Tensor) -> bool:
    """Whether a plain tensor or Parameter gets plain contents and has no grad or hooks that would have to follow."""
    if type(held) not in STOCK or type(new) is not Tensor or new.requires_grad or not held.is_leaf:
        return False
    if held._backward_hooks is not None or held._post_accumulate_grad_hooks is not None:
        return False
    return held.grad is None and (not held.requires_grad or new.is_floating_point() or new.is_complex())


class Replacement:
    """One tensor and its next contents: everything that needs memory is made first, then steps that can be undone."""

    def __init__(self, held: Tensor, new: Tensor, new_grad: Tensor | None = None, is_own: bool = False) -> None:
        """``new_grad`` is what the grad becomes, if its dtype and device alone do not tell.

        With ``is_own`` nobody else has ``new``, and it may become anything.
        """
        self.held, self.grad = held, held.grad if held.is_leaf else None
        if held.requires_grad and not (new.is_floating_point() or new.is_complex()):
            raise ConversionError(f"requires grad, its new contents are {new.dtype}", fix="Freeze it first.")
        with torch.no_grad():
            self.shell = _shell(held, new, is_own)
            self.new_grad: Tensor | None = None
            if self.grad is not None and new_grad is None:
                self.new_grad = grad_shell(self.grad, new)
            elif self.grad is not None and new_grad is not None:
                self.new_grad = new_grad.detach().requires_grad_(self.grad.requires_grad)
        if self.grad is not None:
            try:
                self.shell.grad = self.grad if self.new_grad is None else self.new_grad  # comes along with the contents
            except RuntimeError as error:
                raise ConversionError(
                    f"has a grad of {self.grad.layout}, which cannot follow to {new.layout} ({error})",
                    fix="Set its grad to None first.",
                ) from None
        self.old = (type(held), held.__dict__, impl_id(held), self.grad is not None and impl_id(self.grad))
        self.old_slots: dict[str, Any] = {}
        self.new_dict: dict[str, Any] | None = None
        if is_wrapper(held) or is_wrapper(new):
            self.old_slots = _slots(held)
            self.new_dict = {**user_attributes(held, new), **self.shell.__dict__}
            if isinstance(held, nn.Parameter) and not is_wrapper(held) and type(held) is not nn.Parameter:
                self.new_dict[_CLASS] = type(held)
            elif not is_wrapper(new):
                self.new_dict.pop(_CLASS, None)

    def apply(self) -> None:
        """The implementation first, because only it can refuse; then class and attributes, hooks, and the grad."""
        swap_impl(self.held, self.shell)
        if self.new_dict is not None:
            self.held.__class__ = type(self.shell)
            self.held.__dict__ = self.new_dict
            _fill_slots(self.held, _slots(self.shell))
        seat_hooks(self.held)
        if self.grad is not None and self.new_grad is not None:
            swap_impl(self.grad, self.new_grad)

    def undo(self) -> None:
        """Everything is as before ``apply``, no matter how far it came."""
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


def _shell(held: Tensor, new: Tensor, is_own: bool = False) -> Tensor:
    """An object of the class that ``held`` will have, over the memory of ``new``; if ``is_own``, ``new`` itself."""
    is_parameter = isinstance(held, nn.Parameter)
    if isinstance(new, Weight):
        tie, activations = new.tie, new.spec.activations
        if isinstance(held, Weight):
            tie, activations = tie or held.tie, activations or held.spec.activations
        is_same = tie is new.tie and activations == new.spec.activations
        if is_own and is_same and new.is_leaf and new._base is None:
            made: Tensor = new
        else:
            made = new.map(Tensor.detach, new.spec.replace(tie=tie, activations=activations))
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


def grad_shell(grad: Tensor, new: Tensor) -> Tensor | None:
    """The grad as it must be beside ``new``; ``None`` where it is so already."""
    if grad.dtype == new.dtype and grad.device == new.device:
        return None
    made: Tensor
    if grad.is_meta:
        made = torch.zeros_like(grad, dtype=new.dtype, device=new.device)
    else:
        made = grad.detach().to(new.device, new.dtype)
    return made.requires_grad_(grad.requires_grad)


def user_attributes(held: Tensor, new: Tensor | None) -> dict[str, Any]:
    """What was set on ``held`` from outside, without what its class keeps there itself.

    Of a class of others only ``new`` tells which those are; while there is none, they are among the answer.
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
    """The fields that a class keeps beside ``__dict__``, as DTensor does."""
    names = copyreg._slotnames(type(tensor))  # type: ignore[attr-defined]
    return {name: getattr(tensor, name) for name in names if hasattr(tensor, name)}


def _fill_slots(tensor: Tensor, slots: dict[str, Any]) -> None:
    for name, value in slots.items():
        setattr(tensor, name, value)


# -- what cannot be exchanged ------------------------------------------------------------------------------------------


def check_place(modules: Iterable[nn.Module], verb: str) -> None:
    """Returns if nothing around the tensors forbids an exchange: no inference mode, no distributed wrapper."""
    if torch.is_inference_mode_enabled():
        raise ConversionError(
            f"cannot {verb} inside torch.inference_mode: the parameters could not be trained afterwards",
            fix="Leave the block first, or use torch.no_grad.",
        )
    if is_parametrization_cached():
        raise ConversionError(
            f"cannot {verb} inside parametrize.cached(), which holds old values", fix="Leave the block first."
        )
    for module in [module for module in modules if _is_distributed(type(module))]:  # type: ignore[arg-type]
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConversionError(
                f"cannot {verb} under DistributedDataParallel: its reducer would stop synchronising gradients",
                fix=f"Call {verb} on the plain module, then wrap it.",
            )
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ConversionError(
                f"cannot {verb} under FullyShardedDataParallel (FSDP1), whose flat parameters own the memory",
                fix=f"Call {verb} on the plain module, then wrap it, or use fully_shard.",
            )
        state = fsdp2_state(module)
        if state is not None and is_forwarded(state):
            raise ConversionError(
                f"cannot {verb} a fully_shard module (FSDP2) after its first forward: it has buffers of the old dtype",
                fix=f"Call {verb} before the first forward.",
            )


@lru_cache(maxsize=1024)
def _is_distributed(kind: type[nn.Module]) -> bool:
    names = {one.__name__ for one in kind.__mro__}
    return not names.isdisjoint({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def check_held(tensors: list[Tensor], model: nn.Module, verb: str, refs: set[int]) -> None:
    """Returns if every one of ``tensors`` can be exchanged now; ``refs`` are ids of weak references that may stay."""
    faults: dict[int, tuple[str, str]] = {}
    for tensor in tensors:
        if type(tensor) not in STOCK and is_lazy(tensor):
            faults[id(tensor)] = "is lazy and has no shape yet", f"Run one forward before you {verb}."
        elif not tensor.is_leaf:
            faults[id(tensor)] = f"is the result of {type(tensor.grad_fn).__name__}, not a leaf", "Detach it first."
    whole = [tensor for tensor in tensors if id(tensor) not in faults] if faults else tensors
    holders = find_holders(whole, refs)
    for key, holder in holders.items():
        faults[key] = f"held by {holder}", _advice(holder, verb)
    if not faults:
        return
    names = names_of(model)
    told = [(said(names.get(id(t), ())), *faults[id(t)]) for t in tensors if id(t) in faults]
    fixes = " ".join(dict.fromkeys(fix for _, _, fix in told))
    if len(told) == 1:
        raise ConversionError(told[0][1], name=told[0][0], fix=fixes)
    more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    text = "; ".join(f"{name}: {what}" for name, what, _ in told[:_SHOWN])
    raise ConversionError(f"cannot {verb} {len(told)} of {len(tensors)} tensors: {text}{more}", fix=fixes)


def _advice(holder: str, verb: str) -> str:
    if "weak reference" in holder or "weakref" in holder.lower():
        return f"Drop the reference, {verb}, then make it again."
    if "graph" in holder and "node" not in holder:
        return "Run backward first, or delete what keeps the graph."
    if holder.startswith("a view"):
        return f"Delete the view, or take it from .detach() after you {verb}."
    return f"Let go of it before you {verb}."


def names_of(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Every name of every tensor object, by ``id``."""
    names: dict[int, tuple[str, ...]] = {}
    for name, tensor in named_tensors(model).items():
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return names


def said(names: tuple[str, ...]) -> str:
    """``a.weight (= b.weight)``: a name with its aliases."""
    if not names:
        return "a tensor outside the model"
    return names[0] + (f" (= {', '.join(names[1:])})" if len(names) > 1 else "")
