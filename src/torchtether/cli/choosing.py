"""Choose the tensors of a checkpoint to quantize, and their schemes, by names and shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from .._dtypes import dtype_name
from ..checkpoint.reader import Checkpoint
from ..errors import RuleError, SchemeError
from ..files import HIDDEN
from ..formats import Entry
from ..schemes import Scheme, scheme_to_text
from ..weights.spec import Tie, order_of

SMALLEST = 32
"""The smallest side of a matrix that is quantized by default: smaller ones, such as gates, save little memory."""

_EMBEDDINGS = {"wte", "wpe", "shared"}
_ROUTERS = {"gate", "router"}


def choose(
    checkpoint: Checkpoint,
    ties: Mapping[str, Tie],
    default: Scheme | None,
    rules: Mapping[str, Scheme | None],
    include: Sequence[str],
    exclude: Sequence[str],
    *,
    holds_embeddings: bool = True,
) -> dict[str, Scheme]:
    """Return the scheme of each owner to quantize. Raise RuleError or SchemeError for a request that cannot be met.

    By default an embedding is chosen only if it is tied to a head and the format supports quantized embeddings.
    """
    names_of = {owner: ties[owner].names if owner in ties else (owner,) for owner in checkpoint.entries}
    every = [name for names in names_of.values() for name in names]
    _check_matched((*rules, *include, *exclude), every)
    chosen: dict[str, Scheme] = {}
    for owner, names in names_of.items():
        if _first(names, exclude):
            continue
        obstacle = _obstacle(checkpoint.entries[owner], owner, ties.get(owner))
        named = _first(names, rules) or _first(names, include)
        scheme = default if named is None else rules.get(named[1], default)
        if scheme is None:
            continue
        is_left = not holds_embeddings and any(map(_is_embedding, names))
        if named is None and (include or obstacle or is_left or not _is_linear(names, checkpoint.entries[owner].shape)):
            continue
        if named is not None and obstacle:
            raise RuleError(obstacle, name=named[0], fix="Leave it out with --exclude.")
        try:
            scheme.check(checkpoint.entries[owner].shape)
        except SchemeError as error:
            raise SchemeError(error.what, name=owner, fix="Leave it out with --exclude.") from None
        chosen[owner] = scheme
    if not chosen:
        what, quantized = "no tensor is selected", sum(one.spec is not None for one in checkpoint.entries.values())
        fix = "Select tensors with --include."
        if quantized:
            what += f", and {quantized} of {len(checkpoint.entries)} are quantized already"
            fix = 'Select others with --include, or decode these first: torchtether convert --dequantize "*".'
        raise RuleError(what, name=str(checkpoint.path), fix=fix)
    return chosen


def weights_matched(checkpoint: Checkpoint, ties: Mapping[str, Tie], globs: Sequence[str]) -> set[str]:
    """Return the quantized owners with a name that ``globs`` match. Raise RuleError for a glob that matches none."""
    names_of = {
        name: ties[name].names if name in ties else (name,)
        for name, entry in checkpoint.entries.items()
        if entry.spec is not None
    }
    _check_matched(globs, [name for names in names_of.values() for name in names], "quantized tensor")
    return {owner for owner, names in names_of.items() if _first(names, globs)}


def _check_matched(globs: Iterable[str], names: Sequence[str], what: str = "tensor") -> None:
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            raise RuleError(f"this glob matches no {what}", name=glob, fix="Correct or remove it.")


def _first(names: Sequence[str], globs: Iterable[str]) -> tuple[str, str] | None:
    """Return the first of ``globs`` that matches one of ``names``, as (name, glob); ``None`` if none does.

    >>> _first(["emb.weight", "head.weight"], ["norm.*", "head.*"])
    ('head.weight', 'head.*')
    """
    return next(((name, glob) for glob in globs for name in names if fnmatchcase(name, glob)), None)


def _obstacle(entry: Entry, owner: str, tie: Tie | None) -> str:
    """Return why ``entry`` cannot be quantized; empty if it can."""
    if entry.spec is not None:
        return f"it is quantized already, as {scheme_to_text(entry.spec.scheme)}"
    if not entry.dtype.is_floating_point or entry.dtype.itemsize == 1:
        return f"it is {dtype_name(entry.dtype)}, which cannot be quantized"
    if owner.startswith(HIDDEN):
        return "it is memory of which several names share slices, and it cannot be quantized"
    held = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device="meta")
    for alias, view in zip(tie.names, tie.views, strict=True) if tie else ():
        if view is not None and order_of(view, held) is None:
            return f"it is tied to {alias}, a view that a quantized weight cannot have"
    return ""


def _is_linear(names: Sequence[str], shape: Sequence[int]) -> bool:
    """Return whether a tensor looks like the weight of a linear layer under at least one of its names.

    >>> _is_linear(["model.embed_tokens.weight"], (64, 32))
    False
    >>> _is_linear(["model.embed_tokens.weight", "lm_head.weight"], (64, 32))
    True
    """
    if len(shape) != 2 or min(shape) < SMALLEST:
        return False
    named = (name for name in names if name.rpartition(".")[2] == "weight")
    return any(not _is_embedding(name) and not _is_router(name) for name in named)


def _is_embedding(name: str) -> bool:
    """Return whether ``name`` looks like the weight of an embedding.

    >>> _is_embedding("embed_tokens.weight"), _is_embedding("transformer.wte.weight"), _is_embedding("head.weight")
    (True, True, False)
    """
    module, _, leaf = name.rpartition(".")
    module = module.rpartition(".")[2]
    return leaf == "weight" and ("emb" in module.lower() or module in _EMBEDDINGS)


def _is_router(name: str) -> bool:
    """Return whether ``name`` looks like a weight that chooses experts: transformers has no quantized module for it.

    >>> _is_router("layers.0.mlp.gate.weight"), _is_router("layers.0.mlp.gate_proj.weight")
    (True, False)
    """
    return not _ROUTERS.isdisjoint(name.split(".")[:-1])


def is_linear(entries: Mapping[str, Entry], owner: str, names: Iterable[str]) -> bool:
    """Return whether ``owner``, tied under ``names``, looks like the weight of ``nn.Linear`` under all of them.

    A bias for each column tells the weight of transformers' ``Conv1D``, which is transposed.
    """
    shape, bias = entries[owner].shape, entries.get(f"{owner.removesuffix('weight')}bias")
    is_conv1d = bias is not None and len(shape) == 2 and (*shape[:1],) != bias.shape == (*shape[1:],)
    return not is_conv1d and not any(_is_embedding(name) or _is_router(name) for name in names)
