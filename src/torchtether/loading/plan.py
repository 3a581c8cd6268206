"""The plan of a load: it can be printed, checked, and applied, all at once or some names at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .._checks import as_module, check_callable, check_flag
from .._interruptions import uncollected
from ..checkpoint.reader import Checkpoint
from ..conversion import materializing
from ..conversion.attributes import unregistered
from ..conversion.selection import Rules, matched_names
from ..errors import LoadError, OptimizerError
from ..exchange.optimizer_state import Optimizers, check_belongs, optimizers_of
from ..pictures.drawing import describe_bytes
from ..progress import Meter, Progress, ticking
from ..renaming.steps import Rename
from ..schemes import Scheme
from ..ties.edit import tie, untie
from ..ties.names import named_tensors
from ..weights.weight import Weight
from .contents import encoder_name, is_mappable
from .hooks import warn_of_hooks
from .leftovers import check_replaced
from .matching import match
from .options import Device, Dtype, LoadOptions, Ties
from .report import LoadReport, raise_faults
from .steps import Draft, Step, describe_left, describe_step, floats_left
from .stream import move_buffers, set_extra_states, stream

_CPU = torch.device("cpu")


class LoadPlan:
    """Hold the steps and the faults of a load, found without a change to the model; ``apply`` executes the steps.

    ``faults`` is a tuple of one-line texts, empty if the load is possible; ``print(plan)`` shows steps and faults.
    ``left`` names the tensors that are not loaded yet; ``bytes`` is the number of bytes that the steps read.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save(torch.nn.Linear(2, 3), folder)
    ...     plan = tt.plan_load(torch.nn.Linear(2, 4, device="meta"), folder)
    ...     print(len(plan.faults), plan.left, plan.faults[0].partition(": ")[2])
    2 () the checkpoint has shape (3, 2), the model has (4, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        found: Draft,
        options: LoadOptions,
        optimizer: Optimizers = None,
        mmap: bool = False,
    ) -> None:
        self.model: nn.Module = model
        self.checkpoint: Checkpoint = checkpoint
        self._options, self._optimizer, self._mmap = options, optimizer, mmap
        self._done: set[str] = set()
        self._take(found)

    def _take(self, found: Draft) -> None:
        """Replace the steps and faults of the plan by those of ``found``."""
        self.steps: tuple[Step, ...] = tuple(found.steps)
        self.faults: tuple[str, ...] = tuple(found.faults)
        self.missing_keys: tuple[str, ...] = tuple(found.missing)
        self.unexpected_keys: tuple[str, ...] = tuple(found.unexpected)
        self.bytes: int = sum(step.nbytes_read for step in self.steps)
        self._draft = found
        self._forms = {id(member.tensor): _form(member.tensor) for s in self.steps for member in s.component.members}

    @property
    def left(self) -> tuple[str, ...]:
        """Return the names that ``apply`` has not loaded yet; one name of each tied group."""
        names = [step.name for step in self.steps if not self._done.issuperset(step.component.names)]
        return (*names, *(name for name in self._draft.extra if name not in self._done))

    @property
    def draft(self) -> Draft:
        """Return the steps, the renamed checkpoint that they read, ties to change, and buffers to compute."""
        return self._draft

    def __str__(self) -> str:
        lines = [
            f"{self.checkpoint!r}: {len(self.steps)} steps, {describe_bytes(self.bytes)}, {len(self.faults)} faults"
        ]
        lines += [f"  fault: {fault}" for fault in self.faults]
        lines += [f"  {describe_step(step, self._draft.given, self._is_mapped(step))}" for step in self.steps]
        left = describe_left({} if self._options.quantize is None else floats_left(self.steps))
        return "\n".join([*lines, *([f"  {left}"] if left else [])])

    def check(self) -> None:
        """Raise LoadError if there are faults; its ``faults`` attribute has all of them.

        If the only fault is an optimizer of another model, raise OptimizerError.
        """
        if len(self.faults) == 1:
            check_belongs(self.model, self._optimizer)
        if self.faults:
            raise_faults(self.faults, str(self.checkpoint.path), "All of them are in tt.plan_load(...).faults.")

    def apply(self, *, only: str | Sequence[str] | None = None, progress: Progress = None) -> LoadReport:
        """Load the names in ``left``; with ``only``, names that one of its globs matches, and names tied to these.

        All other tensors stay as they were, on ``meta`` or not; a later ``apply`` can load them. Each step is done
        once: after an error, ``apply`` continues with the unfinished steps. Buffers that ``tt.on_meta`` recorded are
        computed together, by an ``apply`` whose ``only`` covers all of them, once nothing else is on ``meta``.

        Raises, before anything changes, as ``check`` if there is a fault, and LoadError if a glob matches no name of
        the model, or the model has changed since it was planned.

        >>> import torch, torchtether as tt, tempfile
        >>> with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        ...     tt.save(torch.nn.Linear(2, 3, device="cpu"), folder)
        ...     plan = tt.plan_load(torch.nn.Linear(2, 3), folder)
        ...     print(plan.apply(only="*bias").on_meta, plan.left)
        ...     print(plan.apply().on_meta, plan.left)
        ('weight',) ('weight',)
        () ()
        """
        self.check()
        check_callable(progress, "progress", or_flag=True)
        tensors = named_tensors(self.model)
        wanted = self._wanted(only, [*tensors, *self._draft.extra])
        if self._draft.tie or self._draft.untie:
            self._take_file_ties(wanted)
            tensors = named_tensors(self.model)
        steps = list(self.steps) if only is None and not self._done else self._left_of(wanted)
        self._check_unchanged(tensors, steps)
        nbytes = sum(step.nbytes_read for step in steps)
        with Meter() as meter, ticking(progress, nbytes, "load") as tick, uncollected():
            given, is_mapped = self._draft.given, {id(step) for step in steps if self._is_mapped(step)}
            computed = self._computed(tensors, wanted)
            stream(self.model, given, steps, is_mapped, self._optimizer, self._done, tick, computed)
            if wanted.issuperset(self._draft.recorded):
                self._replay()
            extra = [name for name in self._draft.extra if name in wanted and name not in self._done]
            set_extra_states(self.model, given, extra)
            self._done.update(extra)
            if not self.left:
                materializing.tell_filled(self.model, self.missing_keys)
        mapped = sum(step.nbytes for step in steps if id(step) in is_mapped)
        return LoadReport(
            self.missing_keys,
            self.unexpected_keys,
            tuple(step.tie for step in steps if step.tie is not None),
            {s.name: str(s.held.scheme) for s in steps if isinstance(s.held, Weight) and not s.held.scheme.transparent},
            tuple(name for name, tensor in tensors.items() if tensor.is_meta),  # the same objects as before the load
            len(steps),
            nbytes - mapped,
            mapped,
            meter.seconds,
            meter.peak,
            meter.mapped_peak,
            encoder_name() if any(step.is_encoded for step in steps) else "",
            meter.timeline,
            {} if self._options.quantize is None else floats_left(steps),
        )

    def _computed(self, tensors: Mapping[str, Tensor], wanted: set[str]) -> list[tuple[Tensor, Tensor]]:
        """Return each wanted tensor on ``meta`` that the model's library computes, once, with its values."""
        devices, made = self._draft.targets.devices, self._draft.computed
        names = {id(tensors[name]): name for name in made if name in wanted and tensors[name].is_meta}
        return [(tensors[name], made[name].to(devices.get(name, _CPU), copy=True)) for name in names.values()]

    def _left_of(self, wanted: set[str]) -> list[Step]:
        """Return the unfinished steps that have a name in ``wanted``."""
        every = ((step, step.component.names) for step in self.steps)
        return [step for step, names in every if not wanted.isdisjoint(names) and not self._done.issuperset(names)]

    def _wanted(self, only: str | Sequence[str] | None, names: Sequence[str]) -> set[str]:
        """Return the names of the model that ``only`` matches, and the names that share their memory."""
        if only is None:
            return set(names)
        wanted = set(matched_names(only, names, LoadError, "only= matches no tensor of the model"))
        for group in (*(component.names for component in self._draft.targets.components), *self._draft.tie):
            if not wanted.isdisjoint(group):
                wanted.update(group)
        return wanted

    def _take_file_ties(self, wanted: set[str]) -> None:
        """Change the model's ties to the file's, for ``ties="file"``; its aliases get another Parameter."""
        here = [name for name in self._draft.untie if name in wanted]
        pairs = [pair for pair in self._draft.tie if not wanted.isdisjoint(pair)]
        if not here and not pairs:
            return
        is_all = (len(here), len(pairs)) == (len(self._draft.untie), len(self._draft.tie))
        self._check_unchanged(named_tensors(self.model), self.steps)
        for name in here:
            untie(self.model, name)
        for owner, alias in pairs:
            tie(self.model, owner, alias)
        if is_all:
            self._options = replace(self._options, ties="match")
        self._take(match(self.model, self.checkpoint, self._options))
        self.check()

    def _check_unchanged(self, now: Mapping[str, Tensor], steps: Sequence[Step]) -> None:
        """Raise LoadError unless the model's tensors are those of ``steps``, in the dtype and scheme of that time."""
        for step in steps:
            is_done = self._done.issuperset(step.component.names)
            for member in step.component.members:
                tensor, name = member.tensor, member.names[0]
                if any(now.get(one) is not tensor for one in member.names):
                    what = "the model has another tensor of this name than when the load was planned"
                    raise LoadError(what, name=name, fix="Plan again.")
                if not is_done and _form(tensor) != self._forms[id(tensor)]:
                    what = "the model holds it in another dtype or scheme than when the load was planned"
                    raise LoadError(what, name=name, fix="Plan again.")

    def _is_mapped(self, step: Step) -> bool:
        """Return whether ``step`` maps its file instead of reading it."""
        return self._mmap and is_mappable(step, self._draft.given)

    def _replay(self) -> None:
        """Compute the buffers and plain attributes that ``tt.on_meta`` recorded, exactly as the constructors did.

        If another tensor is still on meta, they stay there, too, for ``tt.materialize``.
        """
        left = {name for name, tensor in named_tensors(self.model).items() if tensor.is_meta}
        if left <= set(self._draft.recorded) and (left or unregistered(self.model).tensors):
            places = {name: self._draft.targets.devices.get(name, _CPU) for name in self._draft.recorded}
            first = next(iter(places.values()), self.steps[0].device if self.steps else _CPU)
            materializing.materialize(self.model, first)
            move_buffers(self.model, {n: place for n, place in places.items() if place != first}, self._optimizer)
        elif not left:
            materializing.forget_recipes(self.model)

    def close(self) -> None:
        """Close the files; the plan cannot be applied afterwards."""
        self.checkpoint.close()


def plan_load(
    model: nn.Module,
    path: Path | str,
    *,
    quantize: Rules = None,
    dtype: Dtype = None,
    device: Device = None,
    strict: bool = True,
    ties: Ties = "match",
    rename: Rename = None,
    optimizer: Optimizers = None,
    mmap: bool = False,
    revision: str | None = None,
) -> LoadPlan:
    """Return the plan of a load of ``path`` into ``model``, which is not changed.

    ``load`` explains the arguments ``quantize``, ``dtype``, ``device``, ``strict``, ``ties``, ``rename``,
    ``optimizer``, ``mmap`` and ``revision``. Only headers are read, and the values of names that must agree because
    they are tied.
    Raises CheckpointError if the files cannot be read, and RuleError for a ``rename`` that is no rule. Other faults are
    in ``faults``, except values that a scheme cannot hold: ``apply`` raises SchemeError before it changes anything.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save(torch.nn.Linear(2, 3), folder)
    ...     tt.plan_load(torch.nn.Linear(2, 4), folder).faults[0]
    'weight: the checkpoint has shape (3, 2), the model has (4, 2)'
    """
    options = LoadOptions(quantize, dtype, device, strict, ties, rename)
    return make_plan(model, path, options, optimizer, mmap, revision)


def make_plan(
    model: nn.Module,
    path: Path | str,
    options: LoadOptions,
    optimizer: Optimizers = None,
    mmap: bool = False,
    revision: str | None = None,
) -> LoadPlan:
    """Return the plan of ``plan_load``, which describes the arguments and the errors."""
    model = as_module(model)
    check_flag(options.strict, "strict")
    check_flag(mmap, "mmap")
    optimizers = optimizers_of(optimizer)
    with uncollected():
        checkpoint = Checkpoint(path, revision=revision)
        try:
            found = match(model, checkpoint, options)
            check_replaced(found, model, optimizers)
            warn_of_hooks(found.targets.modules)
            try:
                check_belongs(model, optimizers)
            except OptimizerError as error:
                found.faults.append(str(error))
            return LoadPlan(model, checkpoint, found, options, optimizers, mmap)
        except BaseException:
            checkpoint.close()
            raise


def load(
    model: nn.Module,
    path: Path | str,
    *,
    quantize: Rules = None,
    dtype: Dtype = None,
    device: Device = None,
    strict: bool = True,
    ties: Ties = "match",
    rename: Rename = None,
    progress: Progress = None,
    optimizer: Optimizers = None,
    mmap: bool = False,
    revision: str | None = None,
) -> LoadReport:
    """Load the values of the checkpoint at ``path`` into ``model``; its Parameter objects stay.

    ``path``      a safetensors file, a folder of them, an index, or a state dict by ``torch.save`` (.pt, .pth, .bin);
                  text like ``"org/name"``, if nothing has that path: a repository of the Hub, as in ``tt.open``
    ``quantize``  rules of ``tt.quantize``; a Weight of the model stays a Weight without them
    ``dtype``     the (compute) dtype of float tensors; what models of transformers and diffusers list to be kept in
                  float32 stays so under one dtype of 16 bits. By default a tensor on ``meta`` takes the file's, as in
                  ``load_state_dict(assign=True)``, and a real one keeps its own, as in ``assign=False``
    ``device``    the device of tensors. By default real tensors keep theirs, and those on ``meta`` go to the CPU.
                  Both take globs over the model's names, too: ``{"*norm*": torch.float32, "*": torch.bfloat16}``. The
                  first match wins; ``None`` and no match mean the default. Tied names need the same value
    ``strict``    a missing or unexpected key is a fault. Otherwise such keys are reported, and missing tensors stay as
                  they are; if a rule lacks pieces of a tensor, it counts as missing, and its other pieces as unexpected
    ``ties``      for ties that differ between file and model: ``"match"`` is a fault; ``"model"`` keeps the model's
                  ties and loads the owner's values; ``"file"`` changes the model's ties, so that an alias becomes
                  another Parameter, a fault if ``optimizer`` holds the old one: build it after the load.
                  With ``"file"``, too, it is a fault if only the file ties a name to a part or a transpose of another
                  tensor: tie them in the model, or load with ``"model"``
    ``rename``    the map from the file's names to the model's: a mapping, a function that returns ``None`` to leave a
                  name out, ``tt.Concat``, ``tt.Split``, ``tt.Stack``, ``tt.Transpose`` or ``tt.Rotary``, or a list of
                  these and (regex, replacement) pairs, applied in order, each to the result of the one before;
                  ``tt.gguf_names`` makes one for a file of llama.cpp
    ``progress``  ``True`` for a bar, or a function of (bytes done, bytes in all)
    ``optimizer`` its state follows its parameters' device and dtype
    ``mmap``      do not read tensors on ``meta`` that go to the CPU unchanged, plain or quantized by ``tt.save``:
                  their memory is private pages of the file, which the system reads at first use and may drop again. A
                  write to them, as in training, copies the pages concerned and never changes the file. Tensors to be
                  converted, encoded, composed or laid out differently are read as without ``mmap``
    ``revision``  the branch, tag or commit of a repository of the Hub

    A mapped file may be deleted or replaced (``tt.save`` replaces): the model keeps the old one. Do not write to it or
    truncate it: the model would see the new bytes, or the next use would end the process with SIGBUS. The length of the
    file is checked when it is mapped, not later. The file stays mapped until its last tensor is freed.

    A real tensor that keeps dtype and device is filled in place, so all tensors that share its memory see the values.
    Tied names are loaded once; an alias that the file leaves out is not missing. A weight that the file stores
    quantized becomes a ``Weight``. Non-persistent buffers that are real stay as they are. On ``meta`` they are computed
    from the record of ``tt.on_meta`` (like plain attributes: tensors and modules, also in lists and dicts), read from
    the file, or computed as transformers does for its models; those that no file has keep their dtype. Parameters of
    these models that no file stores (sinusoidal positions) are computed, too, if they are on ``meta``: in ``dtype``, or
    by default in the dtype that the other parameters take from the file. At the end a module with ``set_extra_state``
    gets the tensor that its ``get_extra_state`` returned.

    For a model of transformers 5, the names and shapes in files of ``save_pretrained`` may differ from the model's:
    without ``rename`` its conversion mapping gives the rules, as in ``torchtether.integrations.transformers_names``.

    With ``quantize`` (or Weights in the model) real tensors are read and encoded twice. The first pass finds values
    that a scheme cannot hold before anything changes, without memory for a second model. Both passes count in the
    report and the progress. A model on ``meta`` is read and encoded once.

    Raises:
        CheckpointError: a file is absent or damaged; nothing has changed.  If a file turns out to be cut short or
            unreadable while real tensors are filled, some have changed: the error names finished and unfinished ones.
        LoadError: the checkpoint does not fit the model; all faults are listed, and nothing has changed.
        SchemeError: values to be quantized are not finite; nothing has changed.  RuleError: ``rename`` is no rule.
        OptimizerError: the only fault is that the optimizer belongs to another model; nothing has changed.
        ConversionError: something holds a parameter that must be exchanged; nothing has changed.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
    ...     tt.save(torch.nn.Linear(2, 3, device="cpu"), folder)
    ...     model = torch.nn.Linear(2, 3)
    ...     weight = model.weight
    ...     report = tt.load(model, folder)
    >>> model.weight is weight, weight.device.type, report.missing_keys
    (True, 'cpu', ())
    """
    options = LoadOptions(quantize, dtype, device, strict, ties, rename)
    with uncollected():  # also while the plan is freed: with small tensors, to traverse it takes a tenth of the time
        plan = make_plan(model, path, options, optimizer, mmap, revision)
        try:
            return plan.apply(progress=progress)
        finally:
            plan.close()
            del plan


def _form(tensor: Tensor) -> tuple[torch.dtype, Scheme | None]:
    return tensor.dtype, tensor.scheme if isinstance(tensor, Weight) else None
