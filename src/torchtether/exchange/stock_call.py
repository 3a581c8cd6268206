"""One stock conversion or load inside ``swapping()``, which restores at once what torch drops from a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import TetherError, TieError
from ..geometry.blocks import STOCK, blocks_of
from ..geometry.views import overlaps_itself
from ..ties.components import Component, Member, split_shared
from ..ties.spans import check_same_parts, member_view, plain_values
from ..torch_private.modules import buffers_of, parameters_of
from ..torch_private.tensors import base_of, impl_id, reset, seat_hooks, swap_impl
from ..weights.weight import Weight
from .module_caches import Caches
from .optimizer_state import Before, Optimizers, follow
from .refusals import check_held, check_place, format_names, names_of
from .replacement import is_wrapper, replace, restore_grad, run_each, user_attributes

_OPEN = 8
"""Tensors that are watched at a time; torch reads one tensor, exchanges it or not, and reads the next."""


@dataclass
class _Touched:
    """The state of a tensor just before the call read it."""

    held: Tensor
    kind: type[Tensor]
    attributes: dict[str, Any]
    impl: int
    grad: Tensor | None
    foreign: bool
    """Whether it is a wrapper of another class, which keeps fields of its own among its attributes."""


class StockCall:
    """One stock call, from the first tensor that it reads to its end."""

    def __init__(
        self,
        root: nn.Module,
        optimizer: Optimizers,
        *,
        loads: bool,
        swaps: bool = False,
        metadata: Mapping[str, dict[str, Any]] | None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        """Collect the tensors of ``root``. For a load, ``metadata`` and ``given`` are those of its state dict.

        ``swaps``: torch exchanges every tensor itself.
        """
        self._swaps = swaps or loads
        self._state_dict = given or {}
        self._optimizer, self._loads, self._metadata = optimizer, loads, metadata
        self._root, self._modules = root, list(root.modules())
        self._buffers = [
            (module, key, buffer)
            for module in self._modules
            for key, buffer in buffers_of(module).items()
            if buffer is not None
        ]
        unshared, components = split_shared(root, self._modules)
        self._components = [component for component in components if len(component.members) > 1]
        shared = (member.tensor for component in components for member in component.members)
        self._tensors = {id(tensor): tensor for tensor in (*unshared, *shared)}
        self._converted: set[int] = set()
        self._caches = Caches(self._modules)
        self._open: dict[int, _Touched] = {}
        self._changes: dict[int, Before] = {}
        self._given: dict[int, Tensor] = {}
        self._grads: list[tuple[Tensor, Tensor]] = []
        self._error: TetherError | None = None

    def begin(self) -> None:
        """Check all preconditions before the first change. Raises ConversionError or TieError."""
        verb = "load" if self._loads else "convert"
        try:
            check_place(self._modules, verb)
            torch.clear_autocast_cache()
            self._caches.park(refs=True)
            for component in self._components:
                if component.nbytes == 0 and any(isinstance(member.tensor, Weight) for member in component.members):
                    check_same_parts(component)
            held = [tensor for tensor in self._tensors.values() if not (self._loads and is_lazy(tensor))]
            by_torch = held if self._swaps else self._left_to_torch()
            check_held(held, self._root, verb, swapped=held, by_torch=by_torch, refs=self._caches.refs)
            self._check_agreement()
        except TetherError as error:
            self._error = error
            raise
        for tensor in held:
            if base_of(tensor) is not None and not is_lazy(tensor) and id(base_of(tensor)) in self._tensors:
                swap_impl(tensor, tensor.detach())  # torch refuses a tensor that has views, also tied ones

    def _left_to_torch(self) -> list[Tensor]:
        """Return the parameters of the modules that ``convert`` leaves to torch."""
        families = ([p for p in parameters_of(module).values() if p is not None] for module in self._modules)
        return [p for family in families if not all(map(_is_ours, family)) for p in family if not is_lazy(p)]

    def _check_agreement(self) -> None:
        """Raise TieError unless the state dict gives all names of one memory the same values; ``load`` checks again."""
        if not self._state_dict:
            return
        names, found = names_of(self._root), {}
        for key, own in names.items():
            held = self._tensors.get(key)
            if held is None:
                continue
            tensors = [one for name in own if isinstance(one := self._state_dict.get(name), Tensor)]
            fit = [one for one in tensors if is_lazy(held) or one.shape == held.shape]  # lazy: torch takes this shape
            if fit:
                found[key] = fit[0]
            if not all(same_values(fit[0], other) for other in fit[1:]):
                raise _contradiction(own)
        for component in self._components:
            pairs = [(m, found[id(m.tensor)]) for m in component.members if id(m.tensor) in found]
            is_plain = all(type(t) in STOCK and not t.is_meta for m, given in pairs for t in (m.tensor, given))
            if len(pairs) < 2 or not is_plain or component.nbytes == 0:
                continue
            span = self._joined_span(component)
            with torch.no_grad():
                views = [(member_view(span, member), given.to(member.tensor.device)) for member, given in pairs]
                for view, given in reversed(views):
                    view.copy_(given)
                for (view, given), (member, _) in zip(views, pairs, strict=True):
                    if not same_values(view, given.to(view.dtype)):
                        raise _contradiction(member.names, _OVERLAP)

    def convert(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> bool:
        """Convert the parameters and buffers of ``module`` itself by ``function``, as ``_apply`` does.

        Each parameter is exchanged once, also one that is registered as a buffer; other buffers become new objects, as
        in torch, until the end of the call.
        Return False and do nothing if torch must convert a parameter itself: one of another class, or one that is new
        since the call began.
        """
        parameters = [parameter for parameter in parameters_of(module).values() if parameter is not None]
        parameters += [buffer for buffer in buffers_of(module).values() if isinstance(buffer, nn.Parameter)]
        for parameter in parameters:
            if not _is_ours(parameter) or id(parameter) not in self._tensors:
                return False
        with torch.no_grad():
            for parameter in parameters:
                if id(parameter) not in self._converted:
                    try:
                        self._convert(parameter, function)
                    except TetherError as error:
                        raise self.named(error, parameter) from None
        for key, buffer in buffers_of(module).items():
            if buffer is not None and not isinstance(buffer, nn.Parameter):
                buffers_of(module)[key] = function(buffer)
        return True

    def _convert(self, held: nn.Parameter, function: Callable[[Tensor], Tensor]) -> None:
        self._changes.setdefault(id(held), (held, held.dtype, held.device))  # first: an interrupt may follow
        new, grad = function(held), held.grad
        if grad is None:
            if not reset(held, new) and new is not held:
                replace(held, new).apply()
        else:
            new_grad = function(grad)
            if new is not held or new_grad is not grad:
                del grad
                replace(held, new, new_grad).apply()
        self._converted.add(id(held))

    def complete(self, function: Callable[[Tensor], Tensor]) -> None:
        """Convert the rest of each shared memory that is partly converted, after a call that failed in the middle."""
        with torch.no_grad():
            for component in self._components:
                members = {id(member.tensor): member.tensor for member in component.members}
                buffers = [place for place in self._buffers if id(place[2]) in members]
                left = [place for place in buffers if place[0]._buffers.get(place[1]) is place[2]]
                if self._converted.isdisjoint(members) and len(left) == len(buffers):
                    continue
                for number, held in members.items():
                    if isinstance(held, nn.Parameter) and _is_ours(held) and number not in self._converted:
                        self._convert(held, function)
                for module, key, buffer in left:
                    if not isinstance(buffer, nn.Parameter):
                        buffers_of(module)[key] = function(buffer)

    def touch(self, tensor: Any) -> None:
        """Record the state of ``tensor`` if it belongs to the model: the call may exchange it next."""
        key = id(tensor)
        if key in self._tensors and key not in self._open and not is_lazy(tensor):
            while len(self._open) >= _OPEN:
                del self._open[next(iter(self._open))]  # it was read, and not exchanged
            grad = tensor.grad if tensor.is_leaf else None
            attributes = user_attributes(tensor, None)
            foreign = is_wrapper(tensor) and not isinstance(tensor, Weight)
            self._open[key] = _Touched(tensor, type(tensor), attributes, impl_id(tensor), grad, foreign)
            self._changes.setdefault(key, (tensor, tensor.dtype, tensor.device))

    def settle(self) -> None:
        """Restore class, attributes, hooks and grad of every touched tensor that torch has exchanged."""
        for key, touched in list(self._open.items()):
            held = touched.held
            if impl_id(held) == touched.impl:
                continue
            if type(held) is nn.Parameter and issubclass(touched.kind, nn.Parameter):
                held.__class__ = touched.kind
            if not touched.foreign or type(held) is touched.kind:
                for name, value in touched.attributes.items():
                    held.__dict__.setdefault(name, value)
            seat_hooks(held)
            if touched.grad is not None and held.grad is None:
                if self._loads:
                    restore_grad(held, touched.grad)
                else:
                    self._grads.append((held, touched.grad))
            del self._open[key]  # last: a failure before it leaves it to the next call

    def named(self, error: TetherError, tensor: Any = None) -> TetherError:
        """Return ``error`` with the names of ``tensor`` in the model, if it has some."""
        names = names_of(self._root).get(id(tensor)) if id(tensor) in self._tensors else None
        return error.named(format_names(names)) if names else error

    def as_plain(self, made: Any) -> Any:
        """Return ``made``, or a plain tensor over it if a conversion changed nothing and returned a Parameter subclass.

        Torch cannot make a Parameter from such an object.
        """
        if not self._loads and isinstance(made, nn.Parameter) and id(made) in self._open:
            return made if type(made) is nn.Parameter or is_wrapper(made) else made.detach()
        return made

    def load(self, held: Tensor, given: Tensor, assign: bool = False) -> Tensor:
        """Load as ``Tensor.module_load`` does; raise TieError if two names give one tensor different values."""
        if self._error is not None:
            raise self._error  # torch goes on with the next name after an error
        before = self._given.get(id(held))
        if before is not None and not same_values(before, given):
            raise _contradiction(names_of(self._root)[id(held)])
        self._given[id(held)] = given
        made: Tensor = held.module_load(given, assign=assign)
        for component in self._components if not assign else ():  # the copy may have changed what others were given
            if any(member.tensor is held for member in component.members):
                for member in component.members:
                    self._check_given(member.tensor, member.names)
        return made

    def raise_error(self) -> None:
        """Raise the error that the call began with, if any, and forget it: its traceback keeps the caller's model."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    def is_splitting(self) -> bool:
        """Return whether a load has set some, but not yet all, of the tensors that share one memory."""
        every = ({id(member.tensor) for member in component.members} for component in self._components)
        return any(not members.isdisjoint(self._given) and not members <= self._given.keys() for members in every)

    def _check_given(self, held: Tensor, names: tuple[str, ...]) -> None:
        """Raise TieError if ``held`` no longer has the values that it was given."""
        given = self._given.get(id(held))
        if given is None or held.is_meta or given.is_meta or isinstance(held, Weight):
            return
        if not same_values(held.detach(), given.detach().to(held.device, held.dtype)):
            raise _contradiction(names, _OVERLAP)

    def end(self) -> None:
        """Restore the buffer objects, shared memory and caches; convert optimizer state."""
        for local in (self._metadata or {}).values():
            local.pop("assign_to_params_buffers", None)  # else the next load from this state dict would assign
        errors: list[BaseException] = []
        if self._error is None:
            rejoins = [partial(self._rejoin, component) for component in self._components]
            with torch.no_grad():
                run_each([self.settle, self._restore_grads, self._restore_buffers, *rejoins, self._follow], errors)
            torch.clear_autocast_cache()
        run_each([self._caches.renew], errors)
        try:
            if errors:
                raise min(errors, key=lambda error: isinstance(error, Exception))  # interrupts first
        finally:
            errors.clear()  # else a caught error would keep the model until a garbage collection

    def _restore_grads(self) -> None:
        for held, grad in self._grads:
            if held.grad is None:  # _apply converts grads itself, and drops those that it fails to convert
                restore_grad(held, grad)

    def _follow(self) -> None:
        follow(self._optimizer, self._changes.values())

    def _restore_buffers(self) -> None:
        done: set[int] = set()
        for module, key, held in self._buffers:
            made = buffers_of(module).get(key)
            if made is held or made is None or made.shape != held.shape:
                continue  # not converted, or replaced on purpose
            if id(held) not in done and not isinstance(held, nn.Parameter):  # a parameter has been exchanged already
                self._changes.setdefault(id(held), (held, held.dtype, held.device))
                replace(held, made).apply()
                done.add(id(held))
            buffers_of(module)[key] = held

    def _rejoin(self, component: Component) -> None:
        """Put the members of ``component`` into one memory again, if the call has split them."""
        members = component.members
        if _is_joined(component):
            return
        span: Tensor
        if component.nbytes == 0:
            span = members[0].tensor.detach()
        else:
            given = [member for member in members if id(member.tensor) in self._given]
            sources = given if any(_covers(member, component) for member in given) else members
            span = self._joined_span(component, sources)
            for member in sorted(sources, key=lambda member: id(member.tensor) in self._given):
                plain, part = plain_values(member.tensor).detach(), plain_values(member_view(span, member)).detach()
                for dim, stride in enumerate(part.stride()):
                    if stride == 0 and part.shape[dim] > 1:  # torch refuses to write to one element several times
                        plain, part = plain.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
                part.copy_(plain)
        steps = [replace(member.tensor, member_view(span, member)) for member in members]
        for step in steps:  # a load that failed has left some members in the old dtype
            self._changes.setdefault(id(step.held), (step.held, step.held.dtype, step.held.device))
            step.apply()
        for member in members:
            self._check_given(member.tensor, member.names)

    def _joined_span(self, component: Component, sources: Sequence[Member] = ()) -> Tensor:
        """Return new memory of ``component``, of the dtype and device of ``sources``, all members if there are none."""
        members = sources or component.members
        kinds = {(member.tensor.dtype, member.tensor.device) for member in members}
        mixed = component.dtype is None
        if mixed and all(m.tensor.dtype == m.view.dtype for m in members) and len({device for _, device in kinds}) == 1:
            return torch.empty(component.nbytes, dtype=torch.uint8, device=members[0].tensor.device)
        if mixed or len(kinds) > 1:
            words = ", ".join(f"{format_names(m.names)} {m.tensor.dtype} on {m.tensor.device}" for m in members)
            raise TieError(
                f"shares memory in the model, but the call gave its tensors different dtypes or devices ({words})",
                name=format_names(members[0].names),
                fix="Give all of them one dtype and device, or call tt.untie first.",
            )
        assert component.dtype is not None
        ((dtype, device),) = kinds
        return torch.empty(component.nbytes // component.dtype.itemsize, dtype=dtype, device=device)


def _is_ours(tensor: Tensor) -> bool:
    """Return whether ``convert`` exchanges tensors of this class, rather than torch."""
    return type(tensor) in STOCK or isinstance(tensor, Weight)


_OVERLAP = "it and a tensor that shares its memory"


def _contradiction(names: tuple[str, ...], which: str = "its tied names") -> TieError:
    what = f"the state dict has different values for {which}"
    return TieError(what, name=format_names(names), fix="Make them equal, drop all but one, or call tt.untie.")


def same_values(one: Tensor, two: Tensor) -> bool:
    """Return whether both hold the same values, NaN equal to NaN; tensors on ``meta`` count as equal."""
    if one is two or one.is_meta or two.is_meta:
        return True
    if one.shape != two.shape:
        return False
    if type(one) is type(two) and is_wrapper(one) and not isinstance(one, Weight):  # few other classes define ==
        names, others = one.__tensor_flatten__()[0], two.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return names == others and all(same_values(getattr(one, name), getattr(two, name)) for name in names)
    one, two = plain_values(one).detach(), plain_values(two).detach()
    return bool(((one == two) | ((one != one) & (two != two))).all())


def _covers(member: Member, component: Component) -> bool:
    """Return whether ``member`` has every element of the shared memory."""
    view = member.view
    is_whole = math.prod(view.size) * view.dtype.itemsize == component.nbytes
    return is_whole and not overlaps_itself(view.size, view.stride)


def _is_joined(component: Component) -> bool:
    """Return whether the members still lie at their offsets in one memory."""
    if component.nbytes == 0:
        first = {(block.space, block.start) for block in blocks_of(component.members[0].tensor)}
        return all({(b.space, b.start) for b in blocks_of(m.tensor)} & first for m in component.members)
    starts = set()
    for member in component.members:
        (block,) = blocks_of(member.tensor)
        starts.add((block.space, block.start - member.view.offset * block.itemsize, member.tensor.dtype.itemsize))
    return len({start[:2] for start in starts}) == 1
