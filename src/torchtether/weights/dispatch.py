"""The registry of rules: what an op does to a Weight.

One table serves both levels of torch's dispatch.  Keys are aten overloads (``torch.ops.aten.mm.default``), answered
in ``__torch_dispatch__``, and Python functions (``torch.nn.functional.linear``), answered in ``__torch_function__``.
The key of an op that torch defines only when one of its modules is imported is its name.
A rule is called as ``rule(op, *args, **kwargs)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import TetherError

Rule = Callable[..., Any]
_AnyRule = TypeVar("_AnyRule", bound=Rule)

RULES: dict[Any, Rule] = {}
KINDS: dict[Any, str] = {}
"""How each op is answered: ``lifted``, ``decoded``, ``re-encoded`` or ``rewritten``."""

REFUSED: dict[Any, str] = {}
"""Why an op that one might expect is refused, and what to do instead."""

FOLDS: dict[Any, Rule] = {}
"""Functions that are rewritten under the compiler, too, because no aten op below them could have the rule."""

PRODUCTS: dict[Any, Rule] = {}
"""Those of ``FOLDS`` that make one matrix of a batch, which every wrapper subclass needs."""

SHORTCUTS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any] | None], Any]] = {}
"""Fast functions, tried with the arguments and keywords before the rule; ``None`` means that the rule must run."""

ATTACHED: set[str] = set()
"""Attributes that rules set on a Weight for their own use; deep copies and pickles drop them."""

FOREIGN_WRITES: list[Rule] = []
"""The rule, one at most, of ops of other libraries that write to arguments, such as steps of their optimizers."""

HOOKS: dict[str, Rule] = {}
"""Methods that torch looks up on a tensor by name, defined in ``ops``: FSDP2's two all-gather hooks."""


def rule(*ops: Any, kind: str = "rewritten") -> Callable[[_AnyRule], _AnyRule]:
    """Register the decorated function as the answer to ``ops``; raise TetherError for a second answer."""

    def register(function: _AnyRule) -> _AnyRule:
        for op in ops:
            if op in RULES or op in REFUSED:
                raise TetherError(f"{op} has a rule already", fix="Remove one of the two.")
            RULES[op] = function
            KINDS[op] = kind
        return function

    return register


def refuse(*ops: Any, why: str) -> None:
    """Record why ``ops`` raise, so that the error can say it."""
    for op in ops:
        if op in RULES or op in REFUSED:
            raise TetherError(f"{op} has a rule already", fix="Remove one of the two.")
        REFUSED[op] = why
