"""What a load will do, name by name, with every fault found before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._checks import as_device
from ..checkpoint.reader import Checkpoint
from ..conversion import materializing
from ..conversion.selection import Rules, schemes_for, unmatched
from ..errors import CheckpointError, TetherError, UnsupportedOpError
from ..geometry.blocks import STOCK, is_strided
from ..geometry.views import Shape, View, overlaps_itself
from ..renaming.renamed_checkpoint import RenamedCheckpoint as Arranged
from ..renaming.steps import Rename
from ..schemes import Scheme
from ..ties.components import Component, Member, find_components
from ..ties.names import nearest
from ..ties.records import tie_of
from ..weights.spec import Tie, order_of
from ..weights.weight import Weight

Ties = Literal["match", "file", "model"]

Value = TypeVar("Value")

Dtype = torch.dtype | Mapping[str, torch.dtype | None] | None
"""One for all, or globs over the model's names, the first match wins; ``None`` is the default of ``load``."""

Device = torch.device | str | Mapping[str, torch.device | str | None] | None
"""As ``Dtype``."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes that values may be converted between while they are loaded."""

_CPU = torch.device("cpu")

_GUESSES = 8  # names to look for in all others; each takes a while, and whoever has more has another problem

_KEYS = 6  # names of one tensor in one line

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Source(NamedTuple):
    """One name of the model that the checkpoint, arranged, fills."""

    member: int
    name: str


class Step(NamedTuple):
    """What happens to one component of the model: its memory is filled, or its tensors get new contents.

    ``sources`` come in order of precedence; where they overlap they agree, or the first has been chosen.
    ``scheme`` is what the values are encoded in; ``is_given`` says that the checkpoint holds the Weight already.
    ``as_it_is`` says that new memory needs nothing but the stored bytes: a plain tensor of one name, on meta, is to
    have dtype, shape and strides of the plain tensor that is stored.
    """

    name: str
    component: Component
    tie: Tie | None
    sources: tuple[Source, ...]
    dtype: torch.dtype
    device: torch.device
    scheme: Scheme | None
    is_given: bool
    in_place: bool
    nbytes: int
    as_it_is: bool = False

    @property
    def held(self) -> Tensor:
        """The tensor of the owner."""
        members = self.component.members
        return members[0].tensor if len(members) == 1 else self.component.member(self.name).tensor


@dataclass
class Draft:
    """The steps of a load, what stands in its way, and what it leaves out; ``given`` is what the steps read."""

    given: Arranged
    steps: list[Step] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    """Non-persistent buffers on ``meta`` that ``tt.on_meta`` recorded, and that will be computed again."""
    used: list[str] = field(default_factory=list)
    """Non-persistent buffers on ``meta`` that the checkpoint fills."""
    lost: list[str] = field(default_factory=list)
    """Non-persistent buffers on ``meta`` that nobody knows."""
    untie: list[str] = field(default_factory=list)
    tie: list[tuple[str, str]] = field(default_factory=list)
    """With ``ties="file"``: what to do to the model first."""
    devices: dict[str, torch.device] = field(default_factory=dict)
    """Where the names go for which a device was asked."""
    components: tuple[Component, ...] = ()
    """The tensors of the model, grouped by the memory that they share."""


def draft(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    quantize: Rules = None,
    dtype: Dtype = None,
    device: Device = None,
    strict: bool = True,
    ties: Ties = "match",
    rename: Rename = None,
) -> Draft:
    """Matches ``checkpoint`` with ``model`` by headers alone; values are read only where two names must agree."""
    return _Drafter(model, checkpoint, quantize, dtype, device, strict, ties, rename).draft


class _Drafter:
    """One pass over a model and a checkpoint; ``draft`` is what it found."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        quantize: Rules,
        dtype: Dtype,
        device: Device,
        strict: bool,
        ties: Ties,
        rename: Rename,
    ) -> None:
        self.given = Arranged(checkpoint, rename)
        self.draft = Draft(self.given, faults=self.given.faults)
        self.ties = ties
        for name, what in checkpoint.faults.items():
            self._fault(name, what)
        if ties not in ("match", "file", "model"):
            self._fault("ties", f"{ties!r} is none of 'match', 'file', 'model'")
        self.components = self.draft.components = find_components(model)
        self.modules = dict(model.named_modules())
        self.transient = transient_names(model)
        self.owner_tie = self._model_ties()
        self.dtypes = self._asked("dtype", dtype, _check_dtype)
        self.devices = self.draft.devices = self._asked("device", device, _check_device)
        self.schemes = self._schemes(model, quantize)
        self.known = {name for component in self.components for name in component.names}
        for component in self.components:
            step = self._simple(component)
            if step is None:
                self._match(component)
            else:
                self.draft.steps.append(step)
        self._check_file_ties()
        self._check_copies()
        self._check_leftovers(strict)

    def _fault(self, name: str, what: str) -> None:
        self.draft.faults.append(" ".join(f"{name}: {what}".split()))

    # -- what the model and the user say --------------------------------------------------------------------------

    def _model_ties(self) -> dict[int, Tie]:
        found = {}
        for component in self.components:
            try:
                tie = tie_of(component)
            except TetherError as error:
                self.draft.faults.append(str(error))
                continue
            if tie is not None:
                found[id(component)] = tie
        return found

    def _schemes(self, model: nn.Module, quantize: Rules) -> dict[str, Scheme]:
        try:
            return schemes_for(model, quantize, self.owner_tie.values())
        except TetherError as error:
            self.draft.faults.append(str(error))
            return {}

    def _asked(self, what: str, asked: Any, check: Callable[[Any], Value]) -> dict[str, Value]:
        """What the user asks for, under every name of each component; names without an answer have the default."""
        if asked is None:
            return {}
        rules = asked if isinstance(asked, Mapping) else {"*": asked}
        values: dict[str, Value | None] = {}
        for glob, value in rules.items():
            try:
                values[glob] = None if value is None else check(value)
            except (ValueError, TypeError, RuntimeError) as error:
                self._fault(f"{what}: {glob}" if rules is asked else what, str(error))
        names = [name for component in self.components for name in component.names]
        if rules is asked:
            for glob, near in unmatched(rules, names).items():
                self._fault(f"{what}: {glob}", f"this rule matches no tensor of the model{near}. Correct or remove it.")
        found: dict[str, Value] = {}
        for component in self.components:
            tie = self.owner_tie.get(id(component))
            answers = {}
            for name in tie.names if tie else component.names:
                glob = next((glob for glob in rules if fnmatchcase(name, glob)), None)
                if glob in values:
                    answers[name] = values[glob]
            for name, answer in answers.items():
                first, value = next(iter(answers.items()))
                if answer != value:
                    self._fault(
                        name,
                        f"{what}= asks for {answer or 'the default'}, and for {value or 'the default'} under {first}, "
                        "to which it is tied. Ask for the same under both names, or call tt.untie.",
                    )
                    break
            value = next(iter(answers.values()), None)
            if value is not None:
                found.update((name, value) for name in component.names)
        return found

    # -- one component --------------------------------------------------------------------------------------------

    def _simple(self, component: Component) -> Step | None:
        """What ``_match`` would find for a plain tensor of one name that the checkpoint stores as the model has it.

        ``None`` if it is anything else, or needs a closer look. Most tensors are so simple, and by the ten thousand it
        takes a third of the time.
        """
        members = component.members
        if len(members) > 1:
            return None
        names, held, view, _ = members[0]
        if len(names) > 1 or type(held) not in STOCK:
            return None
        name = names[0]
        entry = self.given.stored(name)
        if entry is None or name in self.schemes or name in self.transient or not held.is_contiguous():
            return None
        given, dtype = entry.dtype, view.dtype
        if entry.shape != view.size or not (given is dtype or (given in FLOATS and dtype in FLOATS)):
            return None
        is_meta = held.is_meta
        target = (self.dtypes.get(name) or (given if is_meta else dtype)) if given in FLOATS else given
        device = self.devices.get(name, _CPU) if is_meta else self.devices.get(name, held.device)
        in_place = not is_meta and target is dtype and device == held.device
        nbytes = component.nbytes // dtype.itemsize * given.itemsize
        as_it_is = is_meta and target is given and entry.stride == view.stride
        source = (tuple.__new__(Source, (0, name)),)
        facts = (name, component, None, source, target, device, None, False, in_place, nbytes, as_it_is)
        return tuple.__new__(Step, facts)  # in a third of the time

    def _match(self, component: Component) -> None:
        tie = self.owner_tie.get(id(component))
        names = component.names
        owner = tie.owner if tie else names[0]
        order = tie.names if tie else names
        if len(component.members) == 1:
            sources = [Source(0, name) for name in order if name in self.given]
        else:
            index = {name: i for i, member in enumerate(component.members) for name in member.names}
            sources = [Source(index[name], name) for name in order if name in self.given]
        if self.transient and self.transient.issuperset(names):
            self._match_transient(component, sources)
            return
        if not sources:
            if self.given.checkpoint.faults.keys().isdisjoint(order):
                self.draft.missing += [name for name in component.names if name not in self.transient]
            return
        if not all([self._check_shape(component.members[source.member], source) for source in sources]):
            return
        member = component.member(owner)
        chosen = self._settle(component, sources, owner)
        step = self._step(component, chosen, owner, member) if chosen else None
        if step is not None:
            self.draft.steps.append(step)

    def _match_transient(self, component: Component, sources: list[Source]) -> None:
        """Non-persistent buffers: real ones stay as they are, those on meta come from their record, or from the file.

        The record comes first, because files of old store such buffers in a dtype of their own; from there one is
        taken only if dtype and shape are those of the model.
        """
        member = component.members[0]
        if not member.tensor.is_meta:
            return
        if is_recorded(component, self.modules):
            self.draft.recorded += component.names
            return
        fits = [s for s in sources if _is_like(self.given, s.name, component.members[s.member].tensor)]
        if not fits or len(component.members) > 1:
            self.draft.lost += component.names
            return
        self.draft.used += component.names
        nbytes = self.given.nbytes(fits[0].name)
        name, dtype = member.names[0], member.tensor.dtype
        tie, device = self.owner_tie.get(id(component)), self.devices.get(name, torch.device("cpu"))
        self.draft.steps.append(Step(name, component, tie, (fits[0],), dtype, device, None, False, False, nbytes))

    def _check_shape(self, member: Member, source: Source) -> bool:
        if is_lazy(member.tensor):
            self._fault(source.name, "it is lazy and has no shape yet. Run one forward first.")
            return False
        held = tuple(member.tensor.shape)
        given = self.given.fit(source.name, held)
        if held != given:
            self._fault(source.name, f"the checkpoint has shape {given}, the model has {held}")
            return False
        return True

    def _settle(self, component: Component, sources: list[Source], owner: str) -> list[Source]:
        """The sources to use, first wins; faults if two disagree, or if some memory has no source."""
        if len(component.members) == 1:
            first, *others = sources
            for other in others:
                if not self.given.is_same(first.name, other.name):
                    self._disagree(first.name, other.name)
            return [first]
        if self._is_as_recorded(component, sources, owner):
            return [source for source in sources if source.name == owner]
        if component.nbytes == 0:
            return self._settle_weights(sources, owner)
        return self._settle_views(component, sources)

    def _disagree(self, owner: str, name: str) -> None:
        if self.ties == "match":
            self._fault(
                name,
                f"the model ties it to {owner}, the checkpoint has other values for it. "
                "Load with ties='model' (the owner's values), or ties='file' (untied).",
            )
        elif self.ties == "file":
            self.draft.untie.append(name)

    def _is_as_recorded(self, component: Component, sources: list[Source], owner: str) -> bool:
        """Whether the file records for every name the very view that the model has."""
        tie = self.owner_tie[id(component)]
        if owner not in self.given:
            return False
        home, whole = self.given.find(owner)
        laid = component.member(owner).view.stride
        if whole is not None or (any(tie.views) and self.given.spec(owner).stride != laid):
            return False
        for source in sources:
            place, view = self.given.find(source.name)
            wanted = tie.views[tie.names.index(source.name)]
            if place != home or _geometry(view) != _geometry(wanted):
                return False
        return True

    def _settle_weights(self, sources: list[Source], owner: str) -> list[Source]:
        """Weights over the same parts: the owner's values are everybody's."""
        first = next((source for source in sources if source.name == owner), None)
        if first is None:
            self._fault(owner, f"the checkpoint has {sources[0].name}, a view of it, but not {owner} itself")
            return []
        home = self.given.find(first.name)[0]
        for other in sources:
            if self.given.find(other.name)[0] != home:
                self._disagree(owner, other.name)
        return [first]

    def _settle_views(self, component: Component, sources: list[Source]) -> list[Source]:
        """Lays every source into a copy of the memory: overlaps must agree, and nothing may be left without one."""
        dtypes = {self.given.spec(source.name).dtype for source in sources}
        if component.dtype is not None and len(dtypes) > 1:
            self._fault(sources[0].name, f"it shares memory with names that the checkpoint has in {_list(dtypes)}")
            return []
        common = dtypes.pop() if component.dtype is not None else None
        for source in sources:
            spec = self.given.spec(source.name)
            held = component.members[source.member].tensor.dtype
            if not spec.scheme.transparent or (common is None and spec.dtype != held):
                self._fault(source.name, f"the checkpoint has {spec.scheme} {spec.dtype} for a view of {held} memory")
                return []
        itemsize = 1 if common is None else common.itemsize
        unit = 1 if component.dtype is None else component.dtype.itemsize
        bits = torch.zeros(component.nbytes // unit, dtype=_BITS[itemsize], device="cpu")
        is_set = torch.zeros(component.nbytes // unit, dtype=torch.bool, device="cpu")
        for source in sources:
            member = component.members[source.member]
            place, done = _laid(bits, member, component), _laid(is_set, member, component)
            given = self.given.read_briefly(source.name).contiguous()
            given = given.view(_BITS[itemsize] if common else torch.uint8).reshape(place.shape)
            if bool(((place != given) & done).any()):
                self._disagree(sources[0].name, source.name)
            place.copy_(torch.where(done, place, given))
            done.fill_(True)
        named = {source.name for source in sources}
        for member in component.members:
            if not bool(_laid(is_set, member, component).all()):
                self.draft.missing += [
                    name for name in member.names if name not in named and name not in self.transient
                ]
        return sources

    def _step(self, component: Component, sources: list[Source], owner: str, member: Member) -> Step | None:
        held = member.tensor
        spec, is_given = self.given.spec(sources[0].name), self.given.is_weight(sources[0].name)
        try:
            self.given.check(sources[0].name)
            target = self._dtype(held, spec.dtype, self.dtypes.get(owner))
        except UnsupportedOpError as error:
            self._fault(sources[0].name, f"{error.what}. {error.fix}")
            return None
        except TetherError as error:
            self._fault(sources[0].name, error.what)
            return None
        if component.dtype is None and component.nbytes and target != held.dtype:
            self._fault(owner, f"its memory is shared under several dtypes, so it cannot become {target}")
            return None
        device = self.devices.get(owner, torch.device("cpu") if held.is_meta else held.device)
        holds = held.scheme if isinstance(held, Weight) and not held.scheme.transparent else None
        scheme = self.schemes.get(owner, holds)
        if not is_strided(held) and not isinstance(held, Weight):
            kind = type(held).__name__ if held.layout == torch.strided else f"{held.layout} tensor"
            self._fault(owner, f"it is a {kind}, which cannot be loaded from a file")
            return None
        if is_given and self.schemes.get(owner, spec.scheme) != spec.scheme:
            self._fault(
                owner,
                f"the checkpoint holds it as {spec.scheme}, the rules ask for {self.schemes[owner]}. "
                "Load without that rule, or quantize from the float checkpoint.",
            )
            return None
        if is_given and not held.is_floating_point():
            self._fault(owner, f"the checkpoint holds it as {spec.scheme}, the model has {held.dtype}")
            return None
        if is_given and len(component.members) > 1 and not self._can_share(component, owner):
            self._fault(
                owner, f"the checkpoint holds it as {spec.scheme}, the model has views into it that need a plain tensor"
            )
            return None
        nbytes = sum(self.given.nbytes(source.name) for source in sources)
        tie = self.owner_tie.get(id(component))
        step = Step(owner, component, tie, tuple(sources), target, device, scheme, is_given, False, nbytes)
        return step._replace(in_place=is_filled(step))

    def _can_share(self, component: Component, owner: str) -> bool:
        tie = self.owner_tie[id(component)]
        held = component.member(owner).tensor
        return all(view is None or order_of(view, held) is not None for view in tie.views)

    def _dtype(self, held: Tensor, given: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
        """The dtype that the tensor will have; raises if the values would not survive."""
        if given in FLOATS and held.dtype in FLOATS:
            return asked or (given if held.is_meta else held.dtype)
        if given == held.dtype:
            return given
        both_complex = given.is_complex and held.dtype.is_complex
        both_whole = not any(d.is_complex or d.is_floating_point for d in (given, held.dtype))
        if (both_complex or both_whole) and torch.promote_types(given, held.dtype) == held.dtype:
            return held.dtype
        if (
            held.dtype.is_floating_point
            and (both_whole or given.itemsize == 1 or not given.is_floating_point)
            and not given.is_complex
        ):
            raise CheckpointError(
                f"the checkpoint has {given}, codes without a scale that this package recognises, "
                f"the model has {held.dtype}"
            )
        raise CheckpointError(f"the checkpoint has {given}, which {held.dtype} in the model cannot hold")

    # -- the checkpoint as a whole --------------------------------------------------------------------------------

    def _check_file_ties(self) -> None:
        """Names that the file ties and the model keeps apart."""
        tied = list(self.given.tied())
        if not tied:
            return
        home = {name: component for component in self.components for name in component.names}
        for names in tied:
            present = [name for name in names if name in home]
            for i, name in enumerate(present):
                for other in present[:i]:
                    if home[name] is not home[other] and self.given.shares(name, other):
                        self._apart(other, name)
                        break

    def _apart(self, owner: str, name: str) -> None:
        is_all = self.given.find(owner) == self.given.find(name)
        if self.ties == "match" and is_all:
            self._fault(
                name,
                f"the checkpoint ties it to {owner}, the model keeps them apart. "
                f"Call tt.tie(model, {owner!r}, {name!r}), or load with ties='file' (tied) or 'model' (two copies).",
            )
        elif self.ties != "model" and not is_all:
            self._fault(
                name,
                f"the checkpoint ties it to {owner}, in part or transposed, the model keeps them apart. "
                "Tie them in the model, or load with ties='model' (two copies).",
            )
        elif self.ties == "file":
            self.draft.tie.append((owner, name))
            for what, asked in (("dtype", self.dtypes), ("device", self.devices)):
                if asked.get(name) != asked.get(owner):  # type: ignore[attr-defined]
                    self._fault(
                        name,
                        f"the checkpoint ties it to {owner}, and {what}= asks for different things under the two names",
                    )

    def _check_copies(self) -> None:
        checkpoint = self.given.checkpoint
        for alias in checkpoint.copies:
            try:
                checkpoint.check_copy(alias)
            except CheckpointError as error:
                self.draft.faults.append(str(error))

    def _check_leftovers(self, strict: bool) -> None:
        """What is missing and what nobody takes: reported, and if strict a fault each."""
        given, unused = self.given, self.transient - {*self.draft.used}
        odd = (given.listed - self.known) | (given.listed & unused)
        left = [name for name in given if name in odd] if odd else []
        left = [name for name in left if not all(given.checkpoint.is_padding(key) for key in given.keys_of(name))]
        keys = [given.keys_of(name) for name in left] + [made.keys for made in given.broken.values()]
        self.draft.unexpected = list(dict.fromkeys(key for some in keys for key in some))
        broken = []
        for name, made in given.broken.items():
            broken += [*made.wrong] if strict or name in self.known else []
            broken += [*made.lacks] if strict else []
        self.draft.faults += dict.fromkeys(broken)
        if strict:
            self._refuse_leftovers([name for name in left if name not in self.known])

    def _refuse_leftovers(self, surplus: Iterable[str]) -> None:
        broken = self.given.broken.keys()
        explained = {n for c in self.components if broken and not broken.isdisjoint(c.names) for n in c.names}
        for i, name in enumerate(name for name in self.draft.missing if name not in explained):
            self._fault(name, f"the checkpoint does not have it{_near(name, self.given) if i < _GUESSES else ''}")
        for name in self.draft.lost:
            self._fault(
                name,
                "it is a non-persistent buffer on meta, which the checkpoint does not have either. "
                "Build the model under tt.on_meta().",
            )
        for i, name in enumerate(surplus):
            what = "it" if self.given.is_as_it_is(name) else f"{name}, which the rules make of it"
            near = _near(name, self.known) if i < _GUESSES else ""
            self._fault(format_keys(self.given.keys_of(name)), f"the model does not have {what}{near}")


# -- helpers ----------------------------------------------------------------------------------------------------------


def _check_dtype(dtype: Any) -> torch.dtype:
    if dtype not in FLOATS:
        fix = "Use quantize=." if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 else "Give a float dtype."
        raise ValueError(f"{dtype} is not a dtype to compute in. {fix}")
    return dtype  # type: ignore[no-any-return]


def _check_device(device: Any) -> torch.device:
    made = as_device(device, name="")
    if made.type == "meta":
        raise ValueError("nothing can be loaded to meta. Name a real device.")
    return made


def transient_names(model: nn.Module) -> set[str]:
    """The names of buffers that are not persistent, which a state dict leaves out."""
    return {
        f"{path}.{leaf}" if path else leaf
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf in module._non_persistent_buffers_set
    }


def is_filled(step: Step) -> bool:
    """Whether what is there can stay and take the values: dtype, device and scheme are those that it will have."""
    held, device, dtype = step.held, step.device, step.dtype
    holds = held.scheme if isinstance(held, Weight) and not held.scheme.transparent else None
    stays = device == held.device and dtype == held.dtype and not held.is_meta
    as_it_is = holds is not None if step.is_given else step.scheme == holds and not _overlaps_itself(held)
    return stays and as_it_is


def is_recorded(component: Component, modules: dict[str, nn.Module]) -> bool:
    """Whether the model was built under ``tt.on_meta()``, which knows how the component was computed."""
    return bool(materializing.recipes_of(component, modules))


def format_keys(keys: Sequence[str]) -> str:
    """The keys in a line; of many the first."""
    more = f" and {len(keys) - _KEYS} more" if len(keys) > _KEYS else ""
    return ", ".join(keys[:_KEYS]) + more


def _is_like(given: Arranged, name: str, held: Tensor) -> bool:
    spec = given.spec(name)
    return spec.scheme.transparent and spec.dtype == held.dtype and spec.shape == tuple(held.shape)


def _geometry(view: View | None) -> tuple[Shape, Shape, int] | None:
    return None if view is None else (view.size, view.stride, view.offset)


def _laid(memory: Tensor, member: Member, component: Component) -> Tensor:
    """The places of ``member`` in ``memory``, which counts elements, or bytes where a component has several dtypes."""
    view = member.view
    if component.dtype is not None:
        return memory.as_strided(view.size, view.stride, view.offset)
    item = view.dtype.itemsize
    return memory.as_strided((*view.size, item), (*(step * item for step in view.stride), 1), view.offset * item)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may lie in one place (``expand``), so that it cannot be written to."""
    if isinstance(tensor, Weight) or tensor.is_contiguous() or tensor.numel() == 0:
        return False
    return overlaps_itself(tensor.shape, tensor.stride())


def _near(name: str, names: Iterable[str]) -> str:
    found = nearest(name, names)
    return f", the nearest is {found!r}" if found else ""


def _list(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(map(str, dtypes)))
