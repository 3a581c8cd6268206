"""The base of Weight and WrapperTensor: how a tensor around inner tensors is printed, copied, pickled and shared."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from ..torch_private.modules import is_unwrapping
from ..torch_private.tensors import as_plain

REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class Wrapping(Tensor):
    """The base of tensors that are stored as inner tensors.

    It declares no ``__slots__``: ``torch.utils.swap_tensors`` refuses tensors whose slots differ.
    """

    _is_param: bool

    # -- what a class writes ----------------------------------------------------------------------------------------

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
        """Return the same kind of tensor whose inner tensors are ``function`` of these."""
        raise NotImplementedError(f"{type(self).__name__}.map")

    @classmethod
    def __metadata_guard__(cls, known: Any, given: Any) -> bool:
        """Return whether a graph that was traced for a tensor of the facts ``known`` is right for one of ``given``."""
        return bool(known == given) and getattr(known, "trained", None) == getattr(given, "trained", None)

    # -- what follows -----------------------------------------------------------------------------------------------

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
        """Set what a copy of a tensor has besides its inner tensors; return this tensor."""
        self.__dict__.update(attributes)
        if is_param:
            self._is_param = True
        self.requires_grad_(requires_grad)
        return self

    def _asked_requires_grad(self, depth: int) -> bool:
        """Return whether this tensor requires grad, to the caller whose frame is ``depth`` above.

        To torch, where it gives the answer to each inner tensor, it is no if one holds codes, which cannot.
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
