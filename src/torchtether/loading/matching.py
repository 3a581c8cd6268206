"""The match of a checkpoint's names with a model's: it finds the steps and faults of a load, and changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..checkpoint.aliases import is_equal
from ..checkpoint.reader import Checkpoint
from ..conversion import materializing
from ..errors import CheckpointError, TetherError, UnsupportedOpError
from ..geometry.blocks import STOCK, is_strided
from ..geometry.views import Shape, View, lies_in
from ..integrations.imported import NAMING, names_of_library
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..renaming.steps import with_wrappers
from ..ties.components import Component, Member
from ..weights.spec import order_of
from ..weights.weight import Weight
from ..weights.wrapper import WrapperTensor
from .leftovers import check_copies, check_file_ties, check_leftovers, take_initial_values
from .options import FLOATS, INTEGERS, LoadOptions, fault
from .steps import Draft, Source, Step, find_targets

_CPU = torch.device("cpu")

SAME_VALUES = "Give the same values for both, or call tt.untie on it in the model."
"""The advice in errors about a source that has different values for names that a model ties."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtypes in which the bits of values are held, by their bytes; see ``_differ``."""


def match(model: nn.Module, checkpoint: Checkpoint, options: LoadOptions) -> Draft:
    """Return the steps that load ``checkpoint`` into ``model``, and all faults.

    Only headers are read, and the values of names that must agree.
    """
    rename = options.rename
    if rename is None and NAMING in sys.modules:
        rename = names_of_library(model, checkpoint)
    return match_renamed(model, RenamedCheckpoint(checkpoint, with_wrappers(rename, model)), options)


def match_renamed(model: nn.Module, given: RenamedCheckpoint, options: LoadOptions) -> Draft:
    """Return the same as ``match``, for a renamed checkpoint."""
    faults = given.faults
    faults += [fault(name, what) for name, what in given.checkpoint.faults.items()]
    if options.ties not in ("match", "file", "model"):
        faults.append(fault("ties", f"{options.ties!r} is none of 'match', 'file', 'model'"))
    draft = Draft(given, find_targets(model, options, faults), faults=faults)
    for component in draft.targets.components:
        step = match_component(draft, component)
        if step is not None:
            draft.steps.append(step)
    take_initial_values(draft, model)
    check_file_ties(draft)
    check_copies(draft)
    check_leftovers(draft, model)
    return draft


def match_component(draft: Draft, component: Component) -> Step | None:
    """Return the step of ``component``; ``None`` if it needs none, or if a fault was added."""
    return _simple_step(draft, component) or _match(draft, component)


def _simple_step(draft: Draft, component: Component) -> Step | None:
    """Return the step of a plain tensor with one name, if the stored tensor is plain and has its shape.

    Returns ``None`` in all other cases, for ``_match``. Most tensors are this simple, and this function takes a third
    of the time of ``_match``, which matters for ten thousands of tensors.
    """
    members = component.members
    if len(members) > 1:
        return None
    names, held, view, _ = members[0]
    if len(names) > 1 or type(held) not in STOCK:
        return None
    name, targets = names[0], draft.targets
    entry = draft.given.stored(name)
    if entry is None or name in targets.schemes or name in targets.transient or not held.is_contiguous():
        return None
    given, dtype = entry.dtype, view.dtype
    if entry.shape != view.size or not (given is dtype or (given in FLOATS and dtype in FLOATS)):
        return None
    is_meta = held.is_meta
    target = (targets.dtypes.get(name) or (given if is_meta else dtype)) if given in FLOATS else given
    device = targets.devices.get(name, _CPU) if is_meta else targets.devices.get(name, held.device)
    in_place = not is_meta and target is dtype and device == held.device
    nbytes = component.nbytes // dtype.itemsize * given.itemsize
    is_as_stored = is_meta and target is given and entry.stride == view.stride
    sources = (tuple.__new__(Source, (0, name)),)
    facts = (name, component, None, sources, target, device, None, False, in_place, nbytes, is_as_stored, None)
    return tuple.__new__(Step, facts)  # takes a third of the time of Step(...)


def _match(draft: Draft, component: Component) -> Step | None:
    """Return the step of ``component``; ``None`` if it needs none, or if a fault was added."""
    given, targets = draft.given, draft.targets
    tie, names = targets.ties.get(id(component)), component.names
    owner, order = (tie.owner, tie.names) if tie else (names[0], names)
    if len(component.members) == 1:
        sources = [Source(0, name) for name in order if name in given]
    else:
        index = {name: i for i, member in enumerate(component.members) for name in member.names}
        sources = [Source(index[name], name) for name in order if name in given]
    is_transient = bool(targets.transient) and targets.transient.issuperset(names)
    if is_transient and not (sources and targets.options.is_refit):
        return _match_transient(draft, component, sources)
    if not sources:
        if given.checkpoint.faults.keys().isdisjoint(order):
            draft.missing += [name for name in names if name not in targets.transient]
        return None
    if not all([_fits_shape(draft, component.members[source.member], source) for source in sources]):
        return None
    chosen = _choose_sources(draft, component, sources, owner)
    return _step(draft, component, chosen, owner) if chosen else None


def _match_transient(draft: Draft, component: Component, sources: list[Source]) -> Step | None:
    """Return the step of non-persistent buffers on meta that ``tt.on_meta`` did not record; real ones stay.

    A record takes precedence over the file, because old files store such buffers in other dtypes. A stored buffer is
    used only if it has the dtype and the shape of the model's.
    """
    member = component.members[0]
    if not member.tensor.is_meta:
        return None
    if materializing.recipes_of(component, draft.targets.modules):
        draft.recorded += component.names
        return None
    fits = [s for s in sources if _is_like(draft.given, s.name, component.members[s.member].tensor)]
    if not fits or len(component.members) > 1:
        draft.lost += component.names
        return None
    draft.used += component.names
    name, dtype, nbytes = member.names[0], member.tensor.dtype, draft.given.nbytes(fits[0].name)
    tie, device = draft.targets.ties.get(id(component)), draft.targets.devices.get(name, _CPU)
    return Step(name, component, tie, (fits[0],), dtype, device, None, False, False, nbytes)


def _is_like(given: RenamedCheckpoint, name: str, held: Tensor) -> bool:
    """Return whether ``name`` is stored as a plain tensor with the dtype and the shape of ``held``."""
    spec = given.spec(name)
    return spec.scheme.transparent and spec.dtype == held.dtype and spec.shape == tuple(held.shape)


def _fits_shape(draft: Draft, member: Member, source: Source) -> bool:
    """Return whether the stored tensor has the shape of ``member``; add a fault if not."""
    if is_lazy(member.tensor):
        draft.add_fault(source.name, "it is lazy and has no shape yet. Run one forward first.")
        return False
    held = tuple(member.tensor.shape)
    given = draft.given.fit(source.name, held)
    if held != given:
        draft.add_fault(source.name, f"the checkpoint has shape {given}, the model has {held}")
        return False
    return True


def _step(draft: Draft, component: Component, sources: Sequence[Source], owner: str) -> Step | None:
    """Return the step that fills ``component`` from ``sources``; ``None`` if a fault was added."""
    given, targets, held, name = draft.given, draft.targets, component.member(owner).tensor, sources[0].name
    spec, is_given = given.spec(name), given.is_weight(name)
    try:
        given.check(name)
        dtype = _dtype(held, spec.dtype, targets.dtypes.get(owner))
    except UnsupportedOpError as error:
        draft.add_fault(name, f"{error.what}. {error.fix}")
        return None
    except TetherError as error:
        draft.add_fault(name, error.what)
        return None
    device = targets.devices.get(owner, _CPU if held.is_meta else held.device)
    present = held.scheme if isinstance(held, Weight) and not held.scheme.transparent else None
    scheme = targets.schemes.get(owner, present)
    what = ""
    if component.dtype is None and component.nbytes and dtype != held.dtype:
        what = f"it shares memory with a tensor of another dtype, so it cannot become {dtype}"
    elif component.nbytes == 0 and not is_strided(held) and not isinstance(held, Weight):
        kind = type(held).__name__ if held.layout == torch.strided else f"{held.layout} tensor"
        what = f"it is a {kind}, which cannot be loaded from a file"
        if kind == "DTensor":
            what += ". Use tt.distributed.load"
        elif isinstance(held, WrapperTensor):
            what += ". Use load_state_dict(dict(tt.open(path)))"
    elif is_given and targets.schemes.get(owner, spec.scheme) != spec.scheme:
        what = (
            f"the checkpoint holds it as {spec.scheme}, the rules ask for {targets.schemes[owner]}. "
            "Load without that rule, or quantize from the float checkpoint."
        )
    elif is_given and not held.is_floating_point():
        what = f"the checkpoint holds it as {spec.scheme}, the model has {held.dtype}"
    elif is_given and len(component.members) > 1 and not _can_share(draft, component, held):
        what = f"the checkpoint holds it as {spec.scheme}, the model has views of it that need a plain tensor"
    if what:
        draft.add_fault(owner, what)
        return None
    nbytes, tie = sum(given.nbytes(source.name) for source in sources), targets.ties.get(id(component))
    step = Step(owner, component, tie, tuple(sources), dtype, device, scheme, is_given, False, nbytes)
    return step.with_form_of_model()


def _can_share(draft: Draft, component: Component, held: Tensor) -> bool:
    """Return whether a Weight can represent every view of the owner ``held``."""
    tie = draft.targets.ties[id(component)]
    return all(view is None or order_of(view, held) is not None for view in tie.views)


def _dtype(held: Tensor, given: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype that ``held`` will have; raise CheckpointError if it cannot hold the stored values."""
    if given in FLOATS and held.dtype in FLOATS:
        return asked or (given if held.is_meta else held.dtype)
    if given == held.dtype:
        return given
    both_complex = given.is_complex and held.dtype.is_complex
    both_whole = not any(d.is_complex or d.is_floating_point for d in (given, held.dtype))
    if both_complex and torch.promote_types(given, held.dtype) == held.dtype:
        return held.dtype
    if both_whole and _has_all_of(held.dtype, given):
        return held.dtype
    if (
        held.dtype.is_floating_point
        and (both_whole or given.itemsize == 1 or not given.is_floating_point)
        and not given.is_complex
    ):
        raise CheckpointError(
            f"the checkpoint has {given} and no scale that this package recognises, the model has {held.dtype}"
        )
    raise CheckpointError(f"the checkpoint has {given}, which {held.dtype} in the model cannot hold")


def _has_all_of(held: torch.dtype, given: torch.dtype) -> bool:
    """Return whether ``held`` is an integer dtype with every value of ``given``, an integer dtype or bool.

    ``torch.promote_types`` raises an error for most pairs with uint16, uint32 or uint64.
    """
    if held not in INTEGERS or given not in (*INTEGERS, torch.bool):
        return False
    low, high = (0, 1) if given == torch.bool else (torch.iinfo(given).min, torch.iinfo(given).max)
    return torch.iinfo(held).min <= low and high <= torch.iinfo(held).max


# -- names that share memory ------------------------------------------------------------------------------------------


def _choose_sources(draft: Draft, component: Component, sources: list[Source], owner: str) -> list[Source]:
    """Return the sources to read, in order of precedence.

    Adds a fault if two sources disagree. Memory without a source counts as missing.
    """
    if len(component.members) == 1:
        first, *others = sources
        for other in others:
            if not draft.given.is_same(first.name, other.name):
                _disagree(draft, first.name, other.name)
        return [first]
    if _is_as_recorded(draft, component, sources, owner):
        return [source for source in sources if source.name == owner]
    return (_choose_weight if component.nbytes == 0 else _choose_views)(draft, component, sources, owner)


def _disagree(draft: Draft, owner: str, name: str) -> None:
    """Record that ``name`` and its owner in the model, ``owner``, have different stored values, as ``ties=`` asks."""
    if draft.targets.options.ties == "match":
        fix = "Load with ties='model' (the owner's values), or ties='file' (untied)."
        fix = SAME_VALUES if draft.targets.options.is_refit else fix
        draft.add_fault(name, f"the model ties it to {owner}, the checkpoint has other values for it. {fix}")
    elif draft.targets.options.ties == "file":
        draft.untie.append(name)


def _is_as_recorded(draft: Draft, component: Component, sources: list[Source], owner: str) -> bool:
    """Return whether the file records the same view as the model for every name, all of them over the owner alone."""
    given, tie, held = draft.given, draft.targets.ties[id(component)], component.member(owner).view
    if owner not in given or not all(view is None or lies_in(view, held) for view in tie.views):
        return False
    home, whole = given.find(owner)
    if whole is not None or (any(tie.views) and given.spec(owner).stride != held.stride):
        return False
    for source in sources:
        place, view = given.find(source.name)
        if place != home or _geometry(view) != _geometry(tie.views[tie.names.index(source.name)]):
            return False
    return True


def _geometry(view: View | None) -> tuple[Shape, Shape, int] | None:
    """Return size, stride and offset of ``view``."""
    return None if view is None else (view.size, view.stride, view.offset)


def _choose_weight(draft: Draft, component: Component, sources: list[Source], owner: str) -> list[Source]:
    """Return the owner's source, for Weights over the same parts."""
    first = next((source for source in sources if source.name == owner), None)
    if first is None:
        draft.add_fault(owner, f"the checkpoint has {sources[0].name}, a view of it, but not {owner} itself")
        return []
    home = draft.given.find(first.name)[0]
    for other in sources:
        if draft.given.find(other.name)[0] != home and not _is_view_of(draft, component, first, other):
            _disagree(draft, owner, other.name)
    return [first]


def _is_view_of(draft: Draft, component: Component, first: Source, other: Source) -> bool:
    """Return whether the stored values of ``other`` equal the model's view of it over the values of ``first``."""
    given, tie = draft.given, draft.targets.ties.get(id(component))
    if tie is None or given.is_weight(first.name) or given.is_weight(other.name):
        return False
    view = tie.views[tie.names.index(other.name)]
    order = None if view is None else order_of(view, component.members[first.member].tensor)
    values = given.read_briefly(first.name)
    values = values if order is None else values.permute(order)
    return is_equal(values.contiguous(), given.read_briefly(other.name).contiguous())


def _choose_views(draft: Draft, component: Component, sources: list[Source], owner: str) -> list[Source]:
    """Fill a copy of the memory from each source to check that overlapping sources agree; return ``sources``."""
    given = draft.given
    dtypes = {given.spec(source.name).dtype for source in sources}
    if component.dtype is not None and len(dtypes) > 1:
        kinds = " and ".join(sorted(map(str, dtypes)))
        draft.add_fault(sources[0].name, f"it shares memory with tensors that the checkpoint has in {kinds}")
        return []
    common = dtypes.pop() if component.dtype is not None else None
    for source in sources:
        spec, held = given.spec(source.name), component.members[source.member].tensor.dtype
        if not spec.scheme.transparent or (common is None and spec.dtype != held):
            draft.add_fault(source.name, f"the checkpoint has {spec.dtype} in {spec.scheme} for a view of {held}")
            return []
    itemsize = 1 if common is None else common.itemsize
    count = component.nbytes // (1 if component.dtype is None else component.dtype.itemsize)
    bits = torch.zeros(count, dtype=_BITS[itemsize], device="cpu")
    is_set = torch.zeros(count, dtype=torch.bool, device="cpu")
    for source in sources:
        member = component.members[source.member]
        place, done = _view_of(bits, member, component), _view_of(is_set, member, component)
        values = given.read_briefly(source.name).contiguous()
        values = values.view(bits.dtype).reshape(place.shape)
        if bool((_differ(place, values) & done).any()):
            _disagree(draft, sources[0].name, source.name)
        place.copy_(torch.where(done, place, values))
        done.fill_(True)
    others = {source.name for source in sources} | draft.targets.transient
    for member in component.members:
        if not bool(_view_of(is_set, member, component).all()):
            draft.missing += [name for name in member.names if name not in others]
    return sources


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Return where two tensors of a dtype in ``_BITS`` have other bits."""
    if not one.is_complex():
        return one != other
    bits = (torch.view_as_real(tensor).view(torch.int64) for tensor in (one, other))  # NaN differs from itself
    return torch.ne(*bits).any(-1)


def _view_of(memory: Tensor, member: Member, component: Component) -> Tensor:
    """Return the elements of ``member`` in ``memory``, which has an entry per byte if there are several dtypes."""
    view = member.view
    if component.dtype is not None:
        return memory.as_strided(view.size, view.stride, view.offset)
    item = view.dtype.itemsize
    return memory.as_strided((*view.size, item), (*(step * item for step in view.stride), 1), view.offset * item)
