"""The rename rules that reorder the elements of one tensor: Transpose and Rotary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .._checks import check_flag
from ..errors import RuleError
from .named_tensors import NamedTensor, Rule, broken, change_found
from .patterns import check_dims, check_pattern, invert_pattern, replaced
from .pieces import CompositeTensor, reordered, transposed


@dataclass(frozen=True)
class Transpose(Rule):
    """Exchange two dimensions of a tensor of the checkpoint for the model: ``torch.transpose``.

    ``source``   a regex, searched anywhere in a name
    ``target``   the replacement for the match, as in ``re.sub``; ``None`` keeps the name
    ``dims``     the two dimensions

    A quantized tensor becomes a transposed ``Weight``.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save({"c_attn.weight": torch.ones(2, 6), "c_attn.bias": torch.ones(6)}, folder)
    ...     model = torch.nn.ModuleDict({"c_attn": torch.nn.Linear(2, 6)})
    ...     tt.plan_load(model, folder, rename=tt.Transpose(r"c_attn\\.weight")).faults
    ()
    """

    source: str
    target: str | None = None
    dims: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        check_pattern(self, self.source, self.target or "")
        dims = tuple(self.dims) if isinstance(self.dims, Iterable) else ()
        if len(dims) != 2:
            raise RuleError(f"dims {self.dims!r} are not two ints", name="Transpose", fix="Give dims=(0, 1).")
        check_dims(self, "dims", dims)
        object.__setattr__(self, "dims", dims)

    @property
    def inverse(self) -> Transpose:
        """Return the inverse rule. Raise RuleError if a regex is more than a name with groups."""
        return self if self.target is None else Transpose(*invert_pattern(self.source, self.target), self.dims)

    def apply(self, names: Sequence[NamedTensor]) -> list[NamedTensor] | None:
        """Return ``names`` after this rule; ``None`` if it matches none of them."""
        return change_found(names, self.source, partial(_with_tensor, self.target, self._transposed))

    def _transposed(self, one: NamedTensor) -> CompositeTensor:
        if one.tensor.is_broken:
            return one.tensor
        rank = len(one.tensor.shape)
        if not all(-rank <= dim < rank for dim in self.dims):
            dims = f"dims {self.dims[0]} and {self.dims[1]}"
            what = f"it has shape {one.tensor.shape}, and Transpose would exchange {dims}"
            return broken([one], wrong=f"{one.name}: {what}. Make the rule match fewer names.")
        return transposed(one.tensor, self.dims[0] % rank, self.dims[1] % rank)

    def __str__(self) -> str:
        return f"Transpose({self.source!r}{'' if self.target is None else f' -> {self.target!r}'})"


@dataclass(frozen=True)
class Rotary(Rule):
    """Reorder the rows of each head of a query or key between the two orders of rotary embeddings.

    ``source``    a regex, searched anywhere in a name
    ``heads``     the number of heads, each with the same number of rows
    ``target``    the replacement for the match, as in ``re.sub``; ``None`` keeps the name
    ``to_pairs``  the checkpoint has the halves of transformers, and the model has the pairs of Meta and llama.cpp; the
                  default is the opposite direction

    Quantized tensors are reordered without decoding, if no block spans rows. Put this rule before rules that join or
    split the tensor.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save({"q.weight": torch.arange(6.).view(6, 1)}, folder)
    ...     model = torch.nn.ModuleDict({"q": torch.nn.Linear(1, 6, bias=False)})
    ...     _ = tt.load(model, folder, rename=tt.Rotary("q.weight", heads=1))
    >>> model["q"].weight.flatten().tolist()
    [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]
    """

    source: str
    heads: int
    target: str | None = None
    to_pairs: bool = False

    def __post_init__(self) -> None:
        check_pattern(self, self.source, self.target or "")
        if type(self.heads) is not int or self.heads < 1:
            raise RuleError(f"heads must be a positive int, got {self.heads!r}", name="Rotary")
        check_flag(self.to_pairs, "to_pairs")

    @property
    def inverse(self) -> Rotary:
        """Return the inverse rule. Raise RuleError if a regex is more than a name with groups."""
        source, target = (self.source, None) if self.target is None else invert_pattern(self.source, self.target)
        return Rotary(source, self.heads, target, not self.to_pairs)

    def apply(self, names: Sequence[NamedTensor]) -> list[NamedTensor] | None:
        """Return ``names`` after this rule; ``None`` if it matches none of them."""
        return change_found(names, self.source, partial(_with_tensor, self.target, self._reordered))

    def _reordered(self, one: NamedTensor) -> CompositeTensor:
        tensor = one.tensor
        if tensor.is_broken:
            return tensor
        if not tensor.shape or tensor.shape[0] % (2 * self.heads):
            what = f"it has shape {tensor.shape}, whose rows cannot be divided into pairs for {self.heads} heads"
            return broken([one], wrong=f"{one.name}: {what}")
        if not tensor.is_stored:
            what = "Rotary cannot reorder it, because an earlier rule has changed it. Put Rotary first"
            return broken([one], wrong=f"{one.name}: {what}")
        return reordered(tensor, -self.heads if self.to_pairs else self.heads)

    def __str__(self) -> str:
        return f"Rotary({self.source!r}{'' if self.target is None else f' -> {self.target!r}'})"


def _with_tensor(
    target: str | None, change: Callable[[NamedTensor], CompositeTensor], one: NamedTensor, found: re.Match[str]
) -> list[NamedTensor]:
    """Return ``one`` with the tensor that ``change`` returns for it, renamed with ``target`` if given."""
    name = one.name if target is None else replaced(found, target)
    return [replace(one, name=name, tensor=change(one))]
