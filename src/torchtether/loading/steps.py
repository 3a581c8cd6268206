"""The steps of a load: one per component of the model, with its sources and its target dtype, device and scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .._checks import as_device, describe_some
from ..conversion.selection import schemes_for, unmatched
from ..errors import TetherError
from ..geometry.views import overlaps_itself
from ..integrations.imported import kept_in_float32
from ..pictures.drawing import describe_bytes
from ..renaming.pieces import Range
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..schemes import Scheme
from ..ties.components import Component, find_components, tie_of
from ..torch_private.modules import transient_names
from ..weights.spec import Tie
from ..weights.weight import Weight
from .options import FLOATS, LoadOptions, fault

Value = TypeVar("Value")

KEYS_SHOWN = 6
"""The most keys that one line lists for one tensor."""


@dataclass(frozen=True)
class Targets:
    """The tensors of a model, and by name the dtype, device and scheme that the options ask for."""

    options: LoadOptions
    components: tuple[Component, ...]
    """The tensors of the model, grouped by the memory that they share."""
    modules: dict[str, nn.Module]
    transient: set[str]
    """Names of buffers that are not persistent."""
    ties: dict[int, Tie]
    """The tie of each component that has one, by the component's id."""
    dtypes: dict[str, torch.dtype]
    devices: dict[str, torch.device]
    schemes: dict[str, Scheme]


class Source(NamedTuple):
    """A name of the model that the renamed checkpoint provides, and the index of its member in the component."""

    member: int
    name: str


class Step(NamedTuple):
    """The load of one component of the model: its memory is filled, or its tensors get new contents.

    ``sources``     in order of precedence; overlapping sources agree, or the first takes precedence
    ``scheme``      the scheme in which the values are encoded
    ``is_given``    the checkpoint stores the tensor as a Weight
    ``is_as_stored`` the stored bytes are the new contents: the component is a plain tensor with one name, on meta, and
                    gets the dtype, shape and strides of a plain stored tensor
    ``kept``        the range of rows that the component keeps, if values must be encoded as a whole
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
    is_as_stored: bool = False
    kept: Range | None = None

    @property
    def held(self) -> Tensor:
        """Return the tensor of the owner, which has the name of the step."""
        members = self.component.members
        return members[0].tensor if len(members) == 1 else self.component.member(self.name).tensor

    @property
    def is_encoded(self) -> bool:
        """Return whether the load encodes the values in ``scheme``."""
        return not self.is_given and self.scheme is not None and not self.scheme.transparent

    @property
    def nbytes_read(self) -> int:
        """Return the number of bytes to read: twice for real tensors to be encoded, which ``stream`` checks first."""
        return self.nbytes if self.scheme is None or self.held.is_meta or not self.is_encoded else 2 * self.nbytes

    def with_form_of_model(self) -> Step:
        """Return the step with ``in_place`` set if the tensor keeps its dtype, device and scheme."""
        held, device, dtype = self.held, self.device, self.dtype
        present = held.scheme if isinstance(held, Weight) and not held.scheme.transparent else None
        stays = device == held.device and dtype == held.dtype and not held.is_meta
        fits = present is not None if self.is_given else self.scheme == present and not _overlaps_itself(held)
        return self._replace(in_place=stays and fits)


@dataclass
class Draft:
    """The steps of a load of ``given``, its faults, and missing, unexpected and computed names."""

    given: RenamedCheckpoint
    targets: Targets
    steps: list[Step] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    """Non-persistent buffers on ``meta`` that ``tt.on_meta`` recorded, and that the load computes again."""
    used: list[str] = field(default_factory=list)
    """Non-persistent buffers on ``meta`` that the checkpoint fills."""
    lost: list[str] = field(default_factory=list)
    """Non-persistent buffers on ``meta`` that have neither a record nor a stored tensor."""
    computed: dict[str, Tensor] = field(default_factory=dict)
    """Values that the model's library computes for tensors on ``meta`` that the checkpoint lacks."""
    optional: set[str] = field(default_factory=set)
    """Real tensors that the checkpoint lacks, and that the model declares optional."""
    extra: list[str] = field(default_factory=list)
    """Names under which the checkpoint has a tensor for ``set_extra_state`` of a module."""
    untie: list[str] = field(default_factory=list)
    """Names to untie in the model first, with ``ties="file"``."""
    tie: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of owner and alias to tie in the model first, with ``ties="file"``."""

    def add_fault(self, name: str, what: str) -> None:
        """Append the fault ``what`` of the tensor or argument ``name``."""
        self.faults.append(fault(name, what))


def names_of_weights(steps: Iterable[Step]) -> list[str]:
    """Return the names that ``steps`` have loaded as Weights."""
    return [name for step in steps if isinstance(step.held, Weight) for name in step.component.names]


def floats_left(steps: Iterable[Step]) -> dict[str, int]:
    """Return the bytes of each matrix that ``steps`` load as float, and that a rule could quantize, largest first."""
    left = {}
    for step in steps:
        is_weight = step.is_given or (step.scheme is not None and not step.scheme.transparent)
        member = step.component.member(step.name)
        if not is_weight and isinstance(member.tensor, nn.Parameter) and member.tensor.dim() > 1:
            left[step.name] = member.tensor.numel() * step.dtype.itemsize
    return dict(sorted(left.items(), key=lambda item: -item[1]))


def describe_left(left: Mapping[str, int]) -> str:
    """Return text about the matrices that stay float, with a rule for the largest; empty if there are none."""
    if not left:
        return ""
    first, *others = left
    names = first + (f" and {len(others)} more" if others else "")
    nbytes = describe_bytes(sum(left.values()))
    return f"{nbytes} of matrices stay float: {names} (a rule such as {{{first!r}: 'int8'}})"


def describe_step(step: Step, given: RenamedCheckpoint, is_mapped: bool) -> str:
    """Return the line of ``step`` in a printed plan."""
    spec = given.spec(step.sources[0].name)
    names = " = ".join([step.name, *(name for name in step.component.names if name != step.name)])
    keys = [key for s in step.sources for key in given.keys_of(s.name) if given.keys_of(s.name) != (s.name,)]
    how = "filled" if step.in_place else "mapped" if is_mapped else "new"
    scheme = "" if step.scheme is None and not step.is_given else f" as {step.scheme or spec.scheme}"
    origin = f" from {describe_some(keys, KEYS_SHOWN)}" if keys else ""
    return f"{names}{origin}: {list(spec.shape)} {spec.dtype} -> {step.dtype} on {step.device}{scheme}, {how}"


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements may share an address (``expand``), so that the tensor cannot be written to."""
    if isinstance(tensor, Weight) or tensor.is_contiguous() or tensor.numel() == 0:
        return False
    return overlaps_itself(tensor.shape, tensor.stride())


# -- targets of each tensor --------------------------------------------------------------------------------------------


def find_targets(model: nn.Module, options: LoadOptions, faults: list[str]) -> Targets:
    """Return the tensors of ``model`` with the targets that ``options`` set; append faults to ``faults``."""
    components = find_components(model)
    ties: dict[int, Tie] = {}
    for component in components:
        try:
            tie = tie_of(component)
        except TetherError as error:
            faults.append(str(error))
            continue
        if tie is not None:
            ties[id(component)] = tie
    dtypes = _by_name("dtype", options.dtype, _check_dtype, components, ties, faults)
    if isinstance(options.dtype, torch.dtype):
        kept = kept_in_float32(model, options.dtype)
        for component in components if kept else ():
            if not kept.isdisjoint(component.names):
                dtypes.update(dict.fromkeys(component.names, torch.float32))
    devices = _by_name("device", options.device, _check_device, components, ties, faults)
    schemes: dict[str, Scheme] = {}
    try:
        schemes = schemes_for(model, options.quantize, ties.values(), argument="quantize")
    except TetherError as error:
        faults.append(str(error))
    modules = dict(model.named_modules())
    return Targets(options, components, modules, transient_names(model), ties, dtypes, devices, schemes)


def _by_name(
    argument: str,
    asked: Any,
    check: Callable[[Any], Value],
    components: Sequence[Component],
    ties: Mapping[int, Tie],
    faults: list[str],
) -> dict[str, Value]:
    """Return the value of ``asked`` by name of the components, without names that take the default."""
    if asked is None:
        return {}
    rules = asked if isinstance(asked, Mapping) else {"*": asked}
    values: dict[str, Value | None] = {}
    for glob, value in rules.items():
        try:
            values[glob] = None if value is None else check(value)
        except (ValueError, TypeError, RuntimeError) as error:
            faults.append(fault(f"{argument}: {glob}" if rules is asked else argument, str(error)))
    if rules is asked:
        for glob, near in unmatched(rules, [name for component in components for name in component.names]).items():
            what = f"this rule matches no tensor of the model{near}. Correct or remove it."
            faults.append(fault(f"{argument}: {glob}", what))
    found: dict[str, Value] = {}
    for component in components:
        tie = ties.get(id(component))
        globs = {
            name: next((glob for glob in rules if fnmatchcase(name, glob)), None)
            for name in (tie.names if tie else component.names)
        }
        answers = {name: values[glob] for name, glob in globs.items() if glob in values}
        first, value = next(iter(answers.items()), ("", None))
        for name, answer in answers.items():
            if answer != value:
                what = (
                    f"{argument}= has {answer or 'the default'} for it, and {value or 'the default'} for {first}, "
                    "to which it is tied. Give both names the same value, or call tt.untie."
                )
                faults.append(fault(name, what))
                break
        if value is not None:
            found.update((name, value) for name in component.names)
    return found


def _check_dtype(dtype: Any) -> torch.dtype:
    """Return ``dtype``; raise ValueError unless it is a dtype to compute in."""
    if dtype not in FLOATS:
        fix = (
            "Use quantize=."
            if isinstance(dtype, torch.dtype) and dtype.itemsize == 1
            else "Give one such as torch.bfloat16."
        )
        raise ValueError(f"{dtype!r:.40} is not a dtype to compute in. {fix}")
    return dtype  # type: ignore[no-any-return]


def _check_device(device: Any) -> torch.device:
    """Return ``device`` as torch's object; raise ValueError if it is ``meta``."""
    made = as_device(device, name="")
    if made.type == "meta":
        raise ValueError("nothing can be loaded to meta. Name a real device.")
    return made
