"""Checks of a whole checkpoint: its ties, its copies, and names that are missing or unexpected.

For tensors that no file stores, the model's library may compute the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from .._checks import describe_some
from ..errors import CheckpointError
from ..exchange.optimizer_state import Optimizers, optimizers_of
from ..integrations.imported import is_of_transformers
from ..ties.names import named_tensors, nearest
from .hints import rename_hints
from .options import FLOATS
from .steps import KEYS_SHOWN, Draft

_EXTRA_STATE = "_extra_state"
"""The leaf under which ``state_dict`` has what ``get_extra_state`` returns."""

_GUESSES = 8
"""The most names for which a nearest name is searched, because each search is slow."""


def check_file_ties(draft: Draft) -> None:
    """Find names that the file ties and the model does not, and add the faults or ties that ``ties=`` asks for."""
    tied = list(draft.given.tied())
    if not tied or draft.targets.options.is_refit:
        return
    home = {name: component for component in draft.targets.components for name in component.names}
    for names in tied:
        present = [name for name in names if name in home]
        for i, name in enumerate(present):
            for other in present[:i]:
                if home[name] is not home[other] and draft.given.shares(name, other):
                    _keep_apart_or_tie(draft, other, name)
                    break


def _keep_apart_or_tie(draft: Draft, owner: str, name: str) -> None:
    """Add the fault for two names that only the file ties, or with ``ties="file"`` the tie to make."""
    ties, is_all = draft.targets.options.ties, draft.given.find(owner) == draft.given.find(name)
    if ties == "match" and is_all:
        draft.add_fault(
            name,
            f"the checkpoint ties it to {owner}, the model does not. "
            f"Call tt.tie(model, {owner!r}, {name!r}), or load with ties='file' (tied) or 'model' (two copies).",
        )
    elif ties != "model" and not is_all:
        draft.add_fault(
            name,
            f"the checkpoint ties it to a part or a transpose of {owner}, the model does not. "
            "Tie them in the model, or load with ties='model' (two copies).",
        )
    elif ties == "file":
        draft.tie.append((owner, name))
        for argument, asked in (("dtype", draft.targets.dtypes), ("device", draft.targets.devices)):
            if asked.get(name) != asked.get(owner):  # type: ignore[attr-defined]
                draft.add_fault(
                    name,
                    f"the checkpoint ties it to {owner}, and {argument}= has different values for the two names",
                )


def check_replaced(draft: Draft, model: nn.Module, optimizer: Optimizers) -> None:
    """Add a fault for each Parameter that ``ties="file"`` replaces, and that ``optimizer`` would go on holding."""
    names = dict.fromkeys([*draft.untie, *(alias for _, alias in draft.tie)])
    if not names:
        return
    tensors = named_tensors(model)
    held = {id(one) for each in optimizers_of(optimizer) for group in each.param_groups for one in group["params"]}
    for name in names:
        if id(tensors[name]) in held:
            draft.add_fault(
                name,
                "ties='file' replaces this Parameter, which the optimizer would go on holding. "
                "Load first, without optimizer=, and build the optimizer afterwards.",
            )


def check_copies(draft: Draft) -> None:
    """Add a fault for each copy in the file that is not equal to its original."""
    checkpoint = draft.given.checkpoint
    for alias in checkpoint.copies:
        try:
            checkpoint.check_copy(alias)
        except CheckpointError as error:
            draft.faults.append(str(error))


def take_initial_values(draft: Draft, model: nn.Module) -> None:
    """Have ``draft`` fill tensors that no file stores with values of the model's library that are not random.

    Parameters get the dtype that the user asks for, or else the one that all parameters get for which he asks none;
    where these are several, and for buffers, such as frequencies, it is the model's.
    """
    if not (draft.lost or draft.missing) or not any(map(is_of_transformers, model.modules())):
        return
    from ..integrations.transformers_values import initial_values, optional_names

    alone = {
        name: one.members[0].tensor for one in draft.targets.components if len(one.members) == 1 for name in one.names
    }
    optional = {name for name in optional_names(model, draft.missing) if name in alone}
    draft.optional = {name for name in optional if not alone[name].is_meta}
    wanted = [name for name in (*draft.lost, *sorted(optional - draft.optional)) if name in alone]
    asked = draft.targets.dtypes
    others = {step.dtype for step in draft.steps if isinstance(step.held, nn.Parameter) and step.name not in asked}
    others &= {*FLOATS}
    common = others.pop() if len(others) == 1 else None
    for name, value in initial_values(model, wanted).items():
        is_converted = isinstance(alone[name], nn.Parameter) and value.dtype in FLOATS
        dtype = asked.get(name, common) if is_converted else None
        draft.computed[name] = value.to(dtype or value.dtype)
    draft.lost = [name for name in draft.lost if name not in draft.computed]
    draft.missing = [name for name in draft.missing if name not in draft.computed]


def check_leftovers(draft: Draft, model: nn.Module) -> None:
    """Report missing and unexpected names, each of them a fault if the load is strict."""
    given, targets, strict = draft.given, draft.targets, draft.targets.options.strict
    known = {name for component in targets.components for name in component.names}
    if not targets.options.is_refit:
        draft.extra = [name for name in _extra_states(model) if name in given]
        known.update(draft.extra)
    unused = targets.transient - {*draft.used}
    odd = (given.listed - known) | (given.listed & unused)
    left = [name for name in given if name in odd] if odd else []
    left = [name for name in left if not all(given.checkpoint.is_padding(key) for key in given.keys_of(name))]
    keys = [given.keys_of(name) for name in left] + [made.keys for made in given.broken.values()]
    draft.unexpected = list(dict.fromkeys(key for some in keys for key in some))
    broken = []
    for name, made in given.broken.items():
        broken += [*made.wrong] if strict or name in known else []
        broken += [*made.lacks] if strict else []
    draft.faults += dict.fromkeys(broken)
    if strict:
        before, strange = len(draft.faults), [name for name in left if name not in known]
        _refuse_missing(draft)
        _refuse_unexpected(draft, strange, known)
        draft.faults[before:before] = rename_hints(draft, strange, known)


def _extra_states(model: nn.Module) -> Iterator[str]:
    """Yield each name that torch gives to the extra state of a module that takes one."""
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            yield f"{path}.{_EXTRA_STATE}" if path else _EXTRA_STATE


def _refuse_missing(draft: Draft) -> None:
    """Add a fault for each name that the checkpoint lacks, unless a fault of the rules explains it."""
    broken = draft.given.broken.keys()
    components = draft.targets.components if broken else ()
    explained = {n for c in components if not broken.isdisjoint(c.names) for n in c.names} | draft.optional
    for i, name in enumerate(name for name in draft.missing if name not in explained):
        near = _near(name, draft.given) if i < _GUESSES else ""
        draft.add_fault(name, f"the checkpoint does not have it{near}")
    buffers = {n: m.tensor for c in draft.targets.components for m in c.members for n in m.names} if draft.lost else {}
    for name in draft.lost:
        layout = buffers[name].layout
        fix = (
            "Build the model under tt.on_meta()."
            if layout is torch.strided
            else f"tt.on_meta() does not record {layout} tensors: assign a real one first."
        )
        draft.add_fault(name, f"it is a non-persistent buffer on meta, which the checkpoint does not have. {fix}")


def _refuse_unexpected(draft: Draft, surplus: Iterable[str], known: set[str]) -> None:
    """Add a fault for each name of ``surplus``, which the model lacks."""
    for i, name in enumerate(surplus):
        what = "it" if draft.given.keys_of(name) == (name,) else f"{name}, to which the rules of rename= change it"
        near = _near(name, known) if i < _GUESSES else ""
        draft.add_fault(describe_some(draft.given.keys_of(name), KEYS_SHOWN), f"the model does not have {what}{near}")


def _near(name: str, names: Iterable[str]) -> str:
    """Return the name of ``names`` that is spelled most like ``name``, in words; empty if none is like it."""
    found = nearest(name, names)
    return f", the nearest is {found!r}" if found else ""
