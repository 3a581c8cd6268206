"""The base class of Weight and WrapperTensor: printing, copying and sharing of a tensor that has inner tensors."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from ..torch_private.modules import is_unwrapping
from ..torch_private.tensors import as_plain, is_in_backward, seat_hooks

REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]

_MARK = "_dynamo_static_input_type"
_SEATED = "_hooks_are_seated"
PRIVATE = ("_is_param", _SEATED)
"""Entries of an object's ``__dict__`` that torch and ``reseat`` set."""


class Wrapping(Tensor):
    """The base of tensors that are stored as inner tensors.

    It declares no ``__slots__``: ``torch.utils.swap_tensors`` refuses tensors whose slots differ.
    """

    _is_param: bool

    # -- for subclasses to write ------------------------------------------------------------------------------------

    def _inner(self) -> Mapping[str, Tensor]:
        """Return the inner tensors by name."""
        raise NotImplementedError(f"{type(self).__name__}._inner")

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes that users have set on this tensor."""
        raise NotImplementedError(f"{type(self).__name__}._attributes")

    def _facts(self) -> list[str]:
        """Return the words that ``repr`` prints."""
        raise NotImplementedError(f"{type(self).__name__}._facts")

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a tensor of this class whose inner tensors are ``function(inner)`` of these."""
        raise NotImplementedError(f"{type(self).__name__}.map")

    @classmethod
    def __metadata_guard__(cls, known: Any, given: Any) -> bool:
        """Return whether a graph traced for a tensor with metadata ``known`` is valid for one with ``given``."""
        return bool(known == given) and getattr(known, "trained", None) == getattr(given, "trained", None)

    @property
    def _dynamo_static_input_type(self) -> str:
        """Return the mark by which the compiler takes this tensor as one that stays: never "guarded".

        Compiled steps of an optimizer mark parameters so, and their graphs are then valid for the object alone, whose
        parts and scheme may change.  With "unguarded", as for parameters of a model, the metadata is compared, too.
        """
        if _MARK in self.__dict__:
            return "unguarded"
        raise AttributeError(_MARK)

    @_dynamo_static_input_type.setter
    def _dynamo_static_input_type(self, mark: str) -> None:
        self.__dict__[_MARK] = mark

    # -- provided ---------------------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({', '.join(self._facts())})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        # torch's own deepcopy of inner tensors goes through ``memo`` by storage, so shared storage stays shared
        made = self.map(lambda inner: copy.deepcopy(inner.detach(), memo))
        memo[id(self)] = made
        attributes = copy.deepcopy(self._attributes(), memo)
        return made._restore(self.requires_grad, isinstance(self, torch.nn.Parameter), attributes)

    def _restore(self, requires_grad: bool, is_param: bool, attributes: dict[str, Any]) -> Self:
        """Set the state of this new copy that its inner tensors do not hold; return the copy."""
        self.__dict__.update(attributes)
        if is_param:
            self._is_param = True
        self.requires_grad_(requires_grad)
        return self

    def _requires_grad_for(self, depth: int) -> bool:
        """Return ``requires_grad`` for the caller whose frame is ``depth`` above.

        ``torch.export`` sets the answer on every inner tensor: for it the answer is no if one of them holds codes,
        which cannot require grad.
        """
        with as_plain():
            answer = self.requires_grad
        if not answer or torch.compiler.is_dynamo_compiling() or not is_unwrapping(sys._getframe(depth)):
            return answer
        return all(inner.is_floating_point() and inner.itemsize > 1 for inner in self._inner().values())

    def share_memory_(self) -> Self:  # torch's own walks the wrapper's null storage and crashes the process
        """Move every inner tensor to shared memory, in place."""
        for inner in self._inner().values():
            inner.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether every inner tensor lies in shared memory."""
        return all(inner.is_shared() for inner in self._inner().values())


def reseat(*tensors: Any) -> None:
    """Connect the hooks of parameters again if torch has exchanged them, as ``.to()`` outside ``tt.swapping`` does.

    ``torch.utils.swap_tensors`` leaves the dictionaries of hooks with the object, and gives it an implementation that
    does not know them: gradients would accumulate, and no hook be called.  It exchanges ``__dict__``, too, so the
    object's own mark there says that nothing was exchanged since.  Inside a backward nothing is connected, for hooks
    may be running.
    """
    for tensor in tensors:
        if isinstance(tensor, Wrapping):
            own = tensor.__dict__
            if own.get(_SEATED) != id(tensor) and "_is_param" in own and not is_in_backward():
                seat_hooks(tensor)
                own[_SEATED] = id(tensor)
