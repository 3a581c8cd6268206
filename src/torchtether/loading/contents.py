"""Loading a checkpoint into a model: plan, check, stream. The model keeps its Parameter objects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import compiled
from .._checks import check_callable, check_flag, check_module
from .._gc import uncollected
from .._signals import Deferred
from ..checkpoint.reader import Checkpoint
from ..conversion import materializing
from ..conversion.quantizing import keep_loading
from ..conversion.selection import Rules, globs_of, unmatched
from ..errors import LoadError, SchemeError, TetherError
from ..exchange.exchange import Exchange
from ..exchange.optimizer_state import optimizers_of
from ..files import THREADS, Batch, Room, fresh
from ..geometry.blocks import STOCK
from ..geometry.views import Shape
from ..pictures.drawing import describe_bytes
from ..progress import Meter, Progress, Tick, no_tick, ticking
from ..renaming.renamed_checkpoint import RenamedCheckpoint as Arranged
from ..renaming.steps import Rename
from ..ties.components import Member, find_components
from ..ties.edit import tie, untie
from ..ties.names import named_tensors
from ..ties.spans import member_view, span_tensor
from ..weights.module_load import encoded_as
from ..weights.ops.rows import part_rows
from ..weights.spec import WeightSpec, order_of
from ..weights.weight import Weight
from .matching import Device, Draft, Dtype, Step, Ties, draft, format_keys
from .report import LoadReport

_SHOWN = 12

_FEW = 4
"""Names that an error gives of tensors that are done, and of those that are not."""

_CPU = torch.device("cpu")

_ENCODED = 2**21
"""Elements that are read and then encoded at once. Fewer would have threads wait for each other more often."""

_STRAIGHT = 2**23
"""Bytes of rows for which the compiled loops are called once; they need no scratch of that size."""

_READ = 2**19
"""Bytes that are read at once where the loops read for themselves: they stay in the cache of one core."""

_LARGEST_ENCODED = 2**22
"""Elements beyond which rows that share a block are not worth taking apart."""


class LoadPlan:
    """What ``load`` will do: every step, and every fault, found without touching the model.

    ``faults`` is a tuple of one-line texts, empty if the load can go ahead; ``print(plan)`` shows steps and faults.
    ``left`` names what has not been loaded yet.

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
        options: dict[str, Any],
        optimizer: Any = None,
        mmap: bool = False,
    ) -> None:
        self.model: nn.Module = model
        self.checkpoint: Checkpoint = checkpoint
        self._options, self._optimizer, self._mmap = options, optimizer, mmap
        self._done: set[str] = set()
        self._take(found)

    def _take(self, found: Draft) -> None:
        self.steps: tuple[Step, ...] = tuple(found.steps)
        self.faults: tuple[str, ...] = tuple(found.faults)
        self.missing_keys: tuple[str, ...] = tuple(found.missing)
        self.unexpected_keys: tuple[str, ...] = tuple(found.unexpected)
        self.bytes: int = sum(step.nbytes for step in self.steps)
        self._draft = found

    @property
    def left(self) -> tuple[str, ...]:
        """The names that ``apply`` will load, because it has not yet; one of each tied group."""
        return tuple(step.name for step in self.steps if not self._done.issuperset(step.component.names))

    @property
    def draft(self) -> Draft:
        """What the steps were found with: the checkpoint, arranged, ties to change, buffers to compute."""
        return self._draft

    def __str__(self) -> str:
        lines = [
            f"{self.checkpoint!r}: {len(self.steps)} steps, {describe_bytes(self.bytes)}, {len(self.faults)} faults"
        ]
        lines += [f"  fault: {fault}" for fault in self.faults]
        lines += [f"  {_describe_step(step, self._draft.given, self._is_mapped(step))}" for step in self.steps]
        return "\n".join(lines)

    def check(self) -> None:
        """Raises LoadError, with every fault in its text, if there is one."""
        if self.faults:
            more = f" | and {len(self.faults) - _SHOWN} more" if len(self.faults) > _SHOWN else ""
            count = "" if len(self.faults) == 1 else f"{len(self.faults)} faults: "
            raise LoadError(
                f"{count}{' | '.join(self.faults[:_SHOWN])}{more}",
                name=str(self.checkpoint.path),
                fix="" if len(self.faults) <= _SHOWN else "All of them are in tt.plan_load(...).faults.",
            )

    def apply(self, *, only: str | Sequence[str] | None = None, progress: Progress = None) -> LoadReport:
        """What is ``left`` is loaded; with ``only``, the names that a glob matches and what is tied to them.

        Everything else stays exactly as it was, what is on ``meta`` there included; a later ``apply`` does the rest.
        Each step is done once: after an error, ``apply`` goes on with the steps that were not finished. Buffers that
        ``tt.on_meta`` recorded come back together, with the ``apply`` whose ``only`` covers the last of them and leaves
        nothing else on ``meta``.

        Raises LoadError, before anything changes, if there is a fault, a glob matches no name of the model, or the
        model has changed since.

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
        wanted = self._wanted(only, list(tensors))
        if self._draft.tie or self._draft.untie:
            self._take_file_ties(wanted)
            tensors = named_tensors(self.model)
        steps = list(self.steps) if only is None and not self._done else self._left_of(wanted)
        _check_unchanged(tensors, steps)
        nbytes = sum(step.nbytes for step in steps)
        encoded = sum(step.held.numel() for step in steps if _is_encoded(step))
        encoder = _encoder(encoded)
        with Meter() as meter, ticking(progress, nbytes, "load") as tick, uncollected():
            mapped = self._stream(steps, tick)
            if wanted.issuperset(self._draft.recorded):
                self._replay()
        compiled.expect(encoded)  # for the next load, where this one left no core for a compiler
        return LoadReport(
            self.missing_keys,
            self.unexpected_keys,
            tuple(step.tie for step in steps if step.tie is not None),
            {s.name: str(s.held.scheme) for s in steps if isinstance(s.held, Weight) and not s.held.scheme.transparent},
            tuple(name for name, tensor in tensors.items() if tensor.is_meta),  # the objects are those of before
            len(steps),
            nbytes - mapped,
            mapped,
            meter.seconds,
            meter.peak,
            meter.mapped_peak,
            _describe_encoder(encoder),
            meter.timeline,
        )

    def _left_of(self, wanted: set[str]) -> list[Step]:
        """Those of the steps that have not been done, and whose names are ``wanted``."""
        every = ((step, step.component.names) for step in self.steps)
        return [step for step, names in every if not wanted.isdisjoint(names) and not self._done.issuperset(names)]

    def _wanted(self, only: str | Sequence[str] | None, names: Sequence[str]) -> set[str]:
        """Those of the model's ``names`` that ``only`` matches, with all that they share memory with."""
        if only is None:
            return set(names)
        globs = globs_of(only)
        for glob, near in unmatched(globs, names).items():
            raise LoadError(f"only= matches no tensor of the model{near}", name=glob, fix="Correct or remove it.")
        wanted = {name for name in names if any(fnmatchcase(name, glob) for glob in globs)}
        for group in (*(component.names for component in self._draft.components), *self._draft.tie):
            if not wanted.isdisjoint(group):
                wanted.update(group)
        return wanted

    def _take_file_ties(self, wanted: set[str]) -> None:
        """``ties="file"``: the model gets the file's ties first, which makes new Parameters of the names concerned."""
        here = [name for name in self._draft.untie if name in wanted]
        pairs = [pair for pair in self._draft.tie if not wanted.isdisjoint(pair)]
        if not here and not pairs:
            return
        is_all = (len(here), len(pairs)) == (len(self._draft.untie), len(self._draft.tie))
        _check_unchanged(named_tensors(self.model), self.steps)
        for name in here:
            untie(self.model, name)
        for owner, alias in pairs:
            tie(self.model, owner, alias)
        if is_all:
            self._options = {**self._options, "ties": "match"}
        self._take(draft(self.model, self.checkpoint, **self._options))
        self.check()

    def _is_mapped(self, step: Step) -> bool:
        return self._mmap and _is_mappable(step, self._draft.given)

    def _stream(self, steps: Sequence[Step], tick: Tick) -> int:
        """First everything that takes new memory for a tensor on meta, which can fail without harm; then the rest.

        Returns how many bytes have been mapped.
        """
        given = self._draft.given
        mapped = {id(step) for step in steps if self._is_mapped(step)} if self._mmap else set()
        plain: list[Step] = []
        stored: list[tuple[str, Shape]] = []
        fresh: list[Step] = []
        other: list[Step] = []
        filled: list[Step] = []
        for step in steps:
            is_meta = step.held.is_meta
            entry = given.stored(step.name) if step.as_it_is and is_meta and step.device == _CPU else None
            if entry is not None and id(step) not in mapped:
                plain.append(step)
                stored.append((entry.keys["tensor"], entry.stride))
                continue
            (filled if step.in_place else fresh if is_meta else other).append(step)
            if not is_meta:
                _check_encodes(step, given)
        if filled or other:
            given.checkpoint.store.check_sizes()
        if plain or fresh or other:
            with Exchange(self.model, optimizer=self._optimizer, verb="load") as exchange:
                held = [step.held for step in plain] + [m.tensor for step in fresh for m in step.component.members]
                exchange.check(held + [member.tensor for step in other for member in step.component.members])
                batch = Batch()
                made = given.checkpoint.store.make_later(stored, batch)
                for step in fresh:
                    exchange.safe_point()
                    made += _mapped(step, given, tick) if id(step) in mapped else _contents(step, given, tick, batch)
                exchange.during(batch.run, tick)
                exchange.put_own(held, made)
                keep_loading(self.model, exchange, names_of_weights(fresh))
                self._done.update([step.name for step in plain])
                self._done.update(name for step in fresh for name in step.component.names)
                for step in other:
                    exchange.safe_point()
                    _put(exchange, step, _contents(step, given, tick))
                    keep_loading(self.model, exchange, names_of_weights([step]))
                    self._done.update(step.component.names)
        if filled:
            self._fill(steps, filled, tick)
        return sum(step.nbytes for step in steps if id(step) in mapped) if mapped else 0

    def _fill(self, steps: Sequence[Step], filled: Sequence[Step], tick: Tick) -> None:
        """Fill the tensors of ``filled`` where they are, one after the other, after all others of ``steps``.

        Raises CheckpointError or LoadError, which say how far it came, if some of ``steps`` have been done.
        """
        try:
            with Deferred() as signals:
                for step in filled:
                    signals.deliver()
                    _fill(step, self._draft.given, tick)
                    self._done.update(step.component.names)
        except Exception as error:
            done = [step.name for step in steps if self._done.issuperset(step.component.names)]
            left = [step.name for step in steps if not self._done.issuperset(step.component.names)]
            if not done:
                raise
            kind = type(error) if isinstance(error, TetherError) else LoadError
            raise kind(
                f"the load stopped after {len(done)} of {len(steps)} tensors ({_few(done)} done, {_few(left)} not): "
                f"{type(error).__name__}: {error}",
                fix="Load again from a whole checkpoint: the first of those not done may have values of both.",
            ) from error
        finally:
            torch.clear_autocast_cache()  # holds casts of the old values, and nothing tells it of the new ones

    def _replay(self) -> None:
        """What ``tt.on_meta`` recorded and no file stores is computed again, exactly as the constructors did.

        If something else is missing too, all of it stays on meta, for ``tt.materialize``.
        """
        if not self._draft.recorded:
            return
        left = {name for name, tensor in named_tensors(self.model).items() if tensor.is_meta}
        if left <= set(self._draft.recorded):
            places = {name: self._draft.devices.get(name, _CPU) for name in self._draft.recorded}
            first = next(iter(places.values()))
            materializing.materialize(self.model, first)
            self._move({name: place for name, place in places.items() if place != first})

    def _move(self, places: dict[str, torch.device]) -> None:
        """Buffers that were computed on one device go where they were asked to be."""
        components = [component for component in find_components(self.model) if component.names[0] in places]
        if not components:
            return
        with Exchange(self.model, optimizer=self._optimizer, verb="load") as exchange:
            exchange.check([member.tensor for component in components for member in component.members])
            for component in components:
                span = span_tensor(component).to(places[component.names[0]])
                for member in component.members:
                    exchange.put(member.tensor, member_view(span, member))

    def close(self) -> None:
        """The files are closed; the plan cannot be applied any more."""
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
    optimizer: Any = None,
    mmap: bool = False,
) -> LoadPlan:
    """What ``load`` with the same arguments would do; the model is untouched. See ``load`` for the arguments.

    Only headers are read, and the values of names that must agree because they are tied.
    Raises CheckpointError if the files cannot be read; everything else is in ``faults``.

    >>> import torch, torchtether as tt, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tt.save(torch.nn.Linear(2, 3), folder)
    ...     tt.plan_load(torch.nn.Linear(2, 4), folder).faults[0]
    'weight: the checkpoint has shape (3, 2), the model has (4, 2)'
    """
    check_module(model)
    check_flag(strict, "strict")
    check_flag(mmap, "mmap")
    optimizer = optimizers_of(optimizer)
    options: dict[str, Any] = {
        "quantize": quantize,
        "dtype": dtype,
        "device": device,
        "strict": strict,
        "ties": ties,
        "rename": rename,
    }
    with uncollected():
        checkpoint = Checkpoint(path)
        try:
            return LoadPlan(model, checkpoint, draft(model, checkpoint, **options), options, optimizer, mmap)
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
    optimizer: Any = None,
    mmap: bool = False,
) -> LoadReport:
    """The model holds the values of the checkpoint at ``path``, in the Parameter objects that it had before.

    ``path``      a safetensors file, a folder of them, an index, or a state dict by ``torch.save`` (.pt, .pth, .bin)
    ``quantize``  rules as of ``tt.quantize``; a Weight that the model holds stays one without them
    ``dtype``     float tensors get this (compute) dtype. By default a tensor on ``meta`` takes that of the file, as
                  ``load_state_dict(assign=True)`` does, and a real one keeps its own, as ``assign=False`` does
    ``device``    where tensors go. By default real ones stay where they are, and those on ``meta`` go to the CPU.
                  Both take globs over the model's names too: ``{"*norm*": torch.float32, "*": torch.bfloat16}``; the
                  first match wins, ``None`` and no match mean the default, tied names are asked for the same
    ``strict``    a missing or unexpected key is a fault; otherwise it is reported, what is missing stays as it is, and
                  what a rule cannot complete counts as missing, its pieces as unexpected
    ``ties``      where file and model disagree about what is tied: ``"match"`` is a fault; ``"model"`` keeps the
                  model's ties and takes the owner's values; ``"file"`` changes the model's, and the names concerned get
                  new Parameters
    ``rename``    what the file's names are called in the model: a mapping, a function that may return ``None`` to leave
                  a name out, ``tt.Concat``, ``tt.Split``, ``tt.Stack``, ``tt.Transpose`` or ``tt.Rotary``, or a list
                  of these and (regex, replacement) pairs, applied in order, each to the names as the one before has
                  left them; ``tt.gguf_names`` makes one for a file of llama.cpp
    ``progress``  ``True`` for a bar, or a function of (bytes done, bytes in all)
    ``optimizer`` its state follows its parameters' device and dtype
    ``map``       tensors on ``meta`` that go to the CPU as the file has them, plain or quantized by ``tt.save``, are
                  not read: their memory is private pages of the file, which the system reads when they are first used,
                  and may drop again. Writing to them, as training does, copies the pages concerned and never reaches
                  the file. What must be converted, encoded, composed or laid out anew is read as without it

    A mapped file may be deleted or replaced (``tt.save`` replaces): the model keeps the old one. Nobody may write into
    it or cut it short meanwhile: the model would see the new bytes, or the process end with SIGBUS at the next use.
    That it has all its bytes is checked when it is mapped, not later. It stays mapped until its last tensor is gone.

    A real tensor that keeps dtype and device is filled where it is, so whatever shares its memory sees the values.
    Tied names are loaded once; a name that the file leaves out because it is tied to another is satisfied. A weight
    that the file holds quantized becomes a ``Weight``. Non-persistent buffers that are real are left alone; on ``meta``
    they come back as ``tt.on_meta`` recorded them, or from the file.

    Raises:
        CheckpointError: a file is absent or damaged; nothing has changed.  A file that is cut short or cannot be read
            while real tensors are being filled is found too late for that: the error names tensors that are done and
            those that are not.
        LoadError: the checkpoint does not fit the model; all faults are listed, and nothing has changed.
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
    with uncollected():  # until the plan is gone too: of small tensors, looking through it takes a tenth of the time
        return _load(
            model,
            path,
            progress,
            quantize=quantize,
            dtype=dtype,
            device=device,
            strict=strict,
            ties=ties,
            rename=rename,
            optimizer=optimizer,
            mmap=mmap,
        )


def _load(model: nn.Module, path: Path | str, progress: Progress, **options: Any) -> LoadReport:
    plan = plan_load(model, path, **options)
    try:
        return plan.apply(progress=progress)
    finally:
        plan.close()


# -- one step ---------------------------------------------------------------------------------------------------------


def _put(exchange: Exchange, step: Step, contents: Sequence[Tensor]) -> None:
    for member, new in zip(step.component.members, contents, strict=True):
        exchange.put(member.tensor, new)


def _fill(step: Step, given: Arranged, tick: Tick) -> None:
    """The values go where the tensors are; the first source is written last, so it has the last word."""
    for source in reversed(step.sources):
        held = step.component.members[source.member].tensor
        with torch.no_grad():
            if not isinstance(held, Weight):
                given.read_into(source.name, held, tick)
            elif held.scheme.transparent:
                given.read_into(source.name, held.values_of(), tick)
            else:
                held.copy_(given.read_briefly(source.name, tick))


def _contents(step: Step, given: Arranged, tick: Tick, batch: Batch | None = None) -> list[Tensor]:
    """New contents for every member of the component, over one memory; where it can wait, ``batch`` fills it."""
    if batch is not None and step.scheme is None and len(step.component.members) == 1:
        made = _as_stored(step, given, batch)
        if made is not None:
            return [made]
    if step.is_given:
        weight = given.read_weight(step.sources[0].name, device=step.device, tick=tick)
        return _shared(step, cast(Weight, weight.to(step.dtype)))
    if step.scheme is not None and not step.scheme.transparent:
        later = None if batch is None else _encoded_later(step, given, batch)
        return _shared(step, _encoded(step, given, tick)) if later is None else [later]
    return _dressed(_plain(step, given, tick, batch=None if step.scheme else batch), step)


def _as_stored(step: Step, given: Arranged, batch: Batch) -> Tensor | None:
    """New memory for a plain tensor that is stored as it is, which ``batch`` fills; ``None`` for anything else."""
    entry, held = given.stored(step.sources[0].name), step.held
    if entry is None or type(held) not in STOCK or len(step.sources) > 1:
        return None
    if held.stride() != entry.stride or not held.is_contiguous():
        return None
    store, key = given.checkpoint.store, entry.keys["tensor"]
    made = fresh(entry.shape, step.dtype, step.device, entry.stride, at=store.stored(key).start)
    store.read_later(key, made, batch)
    return made


def _is_mappable(step: Step, given: Arranged) -> bool:
    """Whether the stored bytes can be the memory of the component, on ``meta`` so far, as they are."""
    component, held = step.component, step.held
    if not held.is_meta or step.device.type != "cpu" or len(step.sources) != 1:
        return False
    source = step.sources[0]
    if not given.is_mappable(source.name):
        return False
    if step.is_given:
        return True
    member = component.members[source.member]
    covers = component.nbytes in (0, member.tensor.nbytes) and member.view.offset == 0
    dtype = given.spec(source.name).dtype
    as_stored = step.dtype == dtype and (component.dtype is not None or member.tensor.dtype == dtype)
    return covers and as_stored and member.tensor.is_contiguous() and (step.scheme is None or step.scheme.transparent)


def _mapped(step: Step, given: Arranged, tick: Tick) -> list[Tensor]:
    """The contents of every member, over private pages of the file."""
    made = given.map(step.sources[0].name)
    tick(step.nbytes)
    if isinstance(made, Weight):
        return _shared(step, cast(Weight, made.to(step.dtype)))
    component = step.component
    if len(component.members) > 1:
        flat = made.view(-1)
        contents = [member_view(flat if component.dtype else flat.view(torch.uint8), m) for m in component.members]
    else:
        held = step.held
        contents = [held.around(made) if isinstance(held, Weight) else made]
    return _dressed(contents, step)


def _dressed(made: list[Tensor], step: Step) -> list[Tensor]:
    """Plain contents as Weights where the rules ask for a transparent scheme, with their tie."""
    if step.scheme is not None:
        made = [Weight.encode(_memory(tensor), step.scheme) for tensor in made]
    is_tied = len(step.component.members) > 1 or isinstance(made[0], Weight)
    return [_with_tie(new, step) for new in made] if is_tied else made


def _encoded(step: Step, given: Arranged, tick: Tick) -> Weight:
    """The owner's values, in the dtype of the file so that no more memory is needed, encoded."""
    assert step.scheme is not None
    held = step.held
    if len(step.component.members) == 1 or step.component.nbytes == 0:
        values = given.read_briefly(step.sources[0].name, tick).to(step.device)
    else:
        dtype = given.spec(step.sources[0].name).dtype
        values = _plain(step, given, tick, dtype=dtype)[_index(step)]
    try:
        if isinstance(held, Weight) and held.scheme == step.scheme:
            made = encoded_as(held, values)
        else:
            made = Weight.encode(_memory(values), step.scheme)
    except SchemeError as error:
        raise error.named(step.name) from None
    return cast(Weight, made.to(step.dtype))


def _shared(step: Step, weight: Weight) -> list[Tensor]:
    """One Weight per member, all over the same parts; ``weight`` is nobody else's."""
    if step.tie is None and weight.tie is None and len(step.component.members) == 1:
        return [weight]
    owner, tied, made = step.held, step.tie, []
    weight = weight.map(Tensor.detach, weight.spec.replace(tie=tied))
    for member in step.component.members:
        if isinstance(member.tensor, Weight) and member.tensor is not owner:
            made.append(member_view(weight, member))
            continue
        view = None if tied is None else tied.views[tied.names.index(member.names[0])]
        order = None if view is None else order_of(view, owner)
        made.append(weight.detach() if order is None else weight.permute(order))
    return made


def _encoded_later(step: Step, given: Arranged, batch: Batch) -> Weight | None:
    """A Weight, with its tie, whose parts ``batch`` fills, some rows at a time.

    ``None`` if its rows cannot be encoded one by one, or if it has several members, which would share it.
    """
    held, scheme, place = step.held, step.scheme, given.rows_in(step.sources[0].name)
    shape = tuple(held.shape)
    if place is None or isinstance(held, Weight) or len(step.component.members) > 1 or step.device.type != "cpu":
        return None
    assert scheme is not None
    key, first = place[0], place[1] or 0
    stored, row = given.checkpoint.store.stored(key), math.prod(shape[1:])
    layout = scheme.layout(shape)
    spans = [part.span for part in layout.values()]
    if len(shape) < 2 or 0 in shape or 0 in spans or not stored.dtype.is_floating_point:
        return None
    if any(part.dtype is None for part in layout.values()):
        return None
    unit = math.lcm(*(span // math.gcd(span, row) for span in spans))
    size = max(_ENCODED // row // unit, 1) * unit
    if size * row > _LARGEST_ENCODED:
        return None
    if compiled.is_at_hand():
        size = max(size, _STRAIGHT // (row * stored.dtype.itemsize) // unit * unit)
    parts = {name: fresh(part.shape, part.dtype or stored.dtype, step.device) for name, part in layout.items()}

    def encode(values: Tensor, cuts: Mapping[str, slice | None]) -> None:
        try:
            scheme.encode_into(values, {name: part[cuts[name]] for name, part in parts.items()})
        except SchemeError as error:
            _encoded(step, given, no_tick)  # raises it for the whole tensor, with the whole tensor's counts
            raise error.named(step.name) from None

    file = given.checkpoint.store.file_of(key)
    recipes = {n: scheme.recipe((n, *shape[1:]), stored.dtype) for n in (size, shape[0] % size) if n}

    def straight(
        descriptor: int, at: int, room: Room, recipe: compiled.Recipe, rows: int, cuts: Mapping[str, slice | None]
    ) -> bool:
        scratch = room.take((max(_READ, recipe.row),), torch.uint8, at)
        return compiled.encode_file(recipe, descriptor, at, rows, scratch, {n: parts[n][cuts[n]] for n in recipe.parts})

    for start in range(0, shape[0], size):
        stop = min(start + size, shape[0])
        cuts, recipe = part_rows(layout, shape, start, stop), recipes[stop - start]
        done = None
        if recipe is not None:
            count = (stop - start) * row * stored.dtype.itemsize // recipe.row
            done = partial(straight, recipe=recipe, rows=count, cuts=cuts)
        batch.rows(file, key, first + start, first + stop, partial(encode, cuts=cuts), done)
    return Weight(parts, WeightSpec.of(shape, step.dtype, scheme, step.tie))


def _plain(
    step: Step,
    given: Arranged,
    tick: Tick,
    dtype: torch.dtype | None = None,
    batch: Batch | None = None,
) -> list[Tensor]:
    """One tensor per member, all over one new memory, filled from the sources."""
    dtype, component = dtype or step.dtype, step.component
    if len(component.members) == 1 or component.nbytes == 0:
        made = [_empty(step, component.members[0], given, dtype)]
    else:
        mixed = component.dtype is None
        count = component.nbytes if mixed else component.nbytes // component.members[0].tensor.element_size()
        span = torch.zeros(count, dtype=torch.uint8 if mixed else dtype, device=step.device)
        made = [member_view(span, member) for member in component.members]
    place = given.rows_in(step.sources[0].name) if len(step.sources) == 1 else None
    if batch is not None and place is not None:
        given.checkpoint.store.read_later(place[0], _memory(made[step.sources[0].member]), batch, place[1])
        return made
    for source in reversed(step.sources):
        given.read_into(source.name, _memory(made[source.member]), tick)
    return made


def _empty(step: Step, member: Member, given: Arranged, dtype: torch.dtype) -> Tensor:
    """Memory with the strides that the file remembers, or else those of the model."""
    held, spec = member.tensor, given.spec(step.sources[0].name)
    stride = held.stride()
    if not held.is_contiguous():  # what is not dense becomes so, in the same order
        stride = torch.empty_like(torch.empty_strided(held.shape, stride, device="meta")).stride()
    if not spec.is_contiguous and given.find(step.sources[0].name)[1] is None:
        stride = spec.stride
    made = fresh(tuple(held.shape), dtype, step.device, stride)
    return held.around(made) if isinstance(held, Weight) else made


def _memory(tensor: Tensor) -> Tensor:
    return tensor.values_of() if isinstance(tensor, Weight) else tensor


def _index(step: Step) -> int:
    return next(i for i, member in enumerate(step.component.members) if step.name in member.names)


def _with_tie(new: Tensor, step: Step) -> Tensor:
    if not isinstance(new, Weight):
        return new
    return new.map(Tensor.detach, new.spec.replace(tie=step.tie))


def _encoder(count: int) -> str:
    """What encodes ``count`` elements now; empty if there are none. The compiled loops are not waited for."""
    if not count:
        return ""
    compiled.expect(count, threads=THREADS)
    return "compiled" if compiled.BUILD.library() is not None else "torch ops"


def _describe_encoder(before: str) -> str:
    """``LoadReport.encoder``, afterwards."""
    if before != "torch ops":
        return before
    if compiled.BUILD.library() is not None:
        return "torch ops, then compiled"
    return f"torch ops ({compiled.BUILD.state or 'too little to compile for'})"


# -- before and after -------------------------------------------------------------------------------------------------


def _check_unchanged(now: Mapping[str, Tensor], steps: Sequence[Step]) -> None:
    for step in steps:
        for member in step.component.members:
            tensor = member.tensor
            for name in member.names:
                if now.get(name) is not tensor:
                    what = "it is another tensor than when the load was planned"
                    raise LoadError(what, name=member.names[0], fix="Plan again.")


def _check_encodes(step: Step, given: Arranged) -> None:
    """Values that cannot be encoded are found while nothing has changed; for a real model that takes a rehearsal."""
    if _is_encoded(step):
        _encoded(step, given, no_tick)


def _is_encoded(step: Step) -> bool:
    return not step.is_given and step.scheme is not None and not step.scheme.transparent


def names_of_weights(steps: Iterable[Step]) -> list[str]:
    """Return the names under which ``steps`` make Weights."""
    return [name for step in steps if isinstance(step.held, Weight) for name in step.component.names]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


def _describe_step(step: Step, given: Arranged, is_mapped: bool) -> str:
    spec = given.spec(step.sources[0].name)
    names = " = ".join([step.name, *(name for name in step.component.names if name != step.name)])
    keys = [key for s in step.sources for key in given.keys_of(s.name) if given.keys_of(s.name) != (s.name,)]
    how = "filled" if step.in_place else "mapped" if is_mapped else "new"
    scheme = "" if step.scheme is None and not step.is_given else f" as {step.scheme or spec.scheme}"
    origin = f" from {format_keys(keys)}" if keys else ""
    return f"{names}{origin}: {list(spec.shape)} {spec.dtype} -> {step.dtype} on {step.device}{scheme}, {how}"
