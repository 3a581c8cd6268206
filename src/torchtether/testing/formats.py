"""``check_format``, and the laws of formats: reading their own checkpoints, and refusing others."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, LawError, SchemeError, TetherError
from ..files import Record, Store, Stored
from ..formats import Contained, Contents, Entry, Format, Found, Writable, native
from ..geometry.views import Shape
from ..schemes import NAMED, Scheme, int4, resolve, same_bits
from ..weights.weight import Weight
from .draws import filled
from .law import Broken, Law, NotApplicable, chosen, law, quiet, require, run
from .report import Report

LAWS: list[Law] = []

_SHAPE: Shape = (32, 256)
_NAME = "model.layers.0.mlp.up_proj.weight"
_PLAIN = "model.norm.weight"


@dataclass(frozen=True)
class _Sample:
    """Hold a checkpoint in memory, and its weight where that is known."""

    name: str
    tensors: Mapping[str, Tensor]
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    record: Record = field(default_factory=Record)
    packings: Mapping[str, str] = field(default_factory=dict)
    weight: Weight | None = None

    def contents(self) -> Contents:
        stored = {k: Stored(t.dtype, tuple(t.shape), 0, self.packings.get(k, "")) for k, t in self.tensors.items()}
        return Contents(stored, self.metadata, self.record, self.beside, lambda key: self.tensors[key].clone())

    def without(self, key: str) -> _Sample:
        return replace(self, tensors={k: t for k, t in self.tensors.items() if k != key})


@dataclass(frozen=True)
class _FormatUnderTest:
    format: Format
    samples: tuple[_Sample, ...]
    refused: tuple[Scheme, ...]

    def found(self, sample: _Sample) -> Found:
        found = self.format.recognise(sample.contents())
        require(found is not None and bool(found.weights), f"{sample.name} is not recognised")
        assert found is not None
        require(not found.faults, f"{sample.name} has faults: {dict(list(found.faults.items())[:1])}")
        return found

    def decoded(self, sample: _Sample, entry: Entry) -> Tensor:
        """Return the decoded values of ``entry``; require that ``unpack`` returns the parts of the scheme's layout."""
        assert entry.spec is not None
        spec = entry.spec
        parts = self.format.unpack(entry, {role: sample.tensors[key].clone() for role, key in entry.keys.items()})
        layout = spec.scheme.layout(spec.base)
        want = {name: (tuple(part.shape), part.dtype or spec.dtype) for name, part in layout.items()}
        made = {name: (tuple(part.shape), part.dtype) for name, part in parts.items()}
        require(made == want, f"unpack returns {made}, the layout of its scheme is {want}, in {sample.name}")
        return spec.scheme.decode(parts, spec.base, spec.dtype)

    def writable(self) -> Writable:
        if not _is_writable(self.format):
            raise NotApplicable("the format can only be read")
        return self.format  # type: ignore[return-value]


def check_format(
    format: Format,
    *,
    samples: Iterable[Path | str] = (),
    schemes: Iterable[Scheme] | None = None,
    laws: Iterable[str] | str | None = None,
) -> Report:
    """Check which laws a checkpoint format keeps, on checkpoints that it writes itself and on given ``samples``.

    Args:
        format: a module or object with ``name``, ``recognise`` and ``unpack``, and, if it can be written, ``layout``,
            ``pack`` and ``announce``; it need not be registered.
        samples: paths of small checkpoints in this format: files or folders. A format that is read only, or that has
            its own kind of file, is checked on these alone.
        schemes: the schemes with which a writable format is checked; it must refuse those that it cannot store. By
            default torchtether's own.
        laws: ids of the laws to run; by default all.

    Raises:
        LawError: there is no law of that id, or nothing to check: no sample, and no scheme that the format can write.

    >>> from torchtether import formats
    >>> check_format(formats.native, laws=["round-trip", "half-groups"]).ok
    True
    """
    picked = chosen(LAWS, laws)
    absent = [name for name in ("name", "recognise", "unpack") if not hasattr(format, name)]
    if absent:
        raise LawError(f"has no {absent[0]}", name=getattr(format, "__name__", str(format)), fix="See formats.Format.")
    asked = _schemes() if schemes is None else tuple(schemes)
    with quiet():
        taken = [_read(Path(path)) for path in samples]
        refused = []
        for scheme in asked if _is_writable(format) and not isinstance(format, Contained) else ():
            try:
                format.layout(_NAME, _weight(scheme).spec)  # type: ignore[attr-defined]
            except SchemeError:
                refused.append(scheme)
                continue
            with suppress(SchemeError):  # it can store the scheme, but not these values
                taken.append(_written(format, scheme))  # type: ignore[arg-type]
    if not taken:
        raise LawError(
            "there is no checkpoint to check", name=format.name, fix="Give samples=, or schemes it can write."
        )
    return run(picked, _FormatUnderTest(format, tuple(taken), tuple(refused)), format.name)


def _is_writable(format: Format) -> bool:
    return all(hasattr(format, name) for name in ("layout", "pack", "announce"))


def _schemes() -> tuple[Scheme, ...]:
    return (*(resolve(name) for name in sorted(NAMED)), int4(group_size=32, symmetric=True))


def _weight(scheme: Scheme) -> Weight:
    return Weight.encode(filled(_SHAPE, torch.bfloat16, "normal", 3), scheme)


def _written(format: Writable, scheme: Scheme) -> _Sample:
    """Return a checkpoint that the format writes, its tensors rebuilt from bytes."""
    weight = _weight(scheme)
    packed = format.pack(_NAME, weight)
    announced = format.announce({_NAME: weight.spec}, [_PLAIN])
    tensors = {key: _through_bytes(tensor) for key, tensor in packed.items()}
    tensors[_PLAIN] = torch.ones(4, dtype=torch.bfloat16)
    beside = {"config.json": {"dtype": "bfloat16"}} | json.loads(json.dumps(dict(announced)))
    beside["config.json"] = {"dtype": "bfloat16", **beside["config.json"]}
    record = Record(weights={_NAME: weight.spec}) if format is native else Record()
    return _Sample(f"its checkpoint of {scheme}", tensors, beside, record=record, weight=weight)


def _through_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor rebuilt from dtype, shape and bytes, as one that is read from a file."""
    data = bytearray(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return (
        torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape) if data else tensor.clone()
    )


def _read(path: Path) -> _Sample:
    store = Store(path)
    try:
        tensors = {key: store.read(key) for key in store.header.tensors}
        packings = {key: stored.packing for key, stored in store.header.tensors.items()}
        return _Sample(
            f"{path.parent.name}/{path.name}", tensors, store.beside(), store.header.metadata, store.record, packings
        )
    finally:
        store.close()


# -- the laws ----------------------------------------------------------------------------------------------------------


@law(
    LAWS,
    "recognise",
    "its own checkpoints are recognised, with every weight in them",
    "packed codes are loaded as if they were values, or not at all",
)
def _recognise(subject: _FormatUnderTest) -> None:
    for sample in subject.samples:
        found = subject.found(sample)
        if sample.weight is not None:
            require(set(found.weights) == {_NAME}, f"{sample.name} has the weights {sorted(found.weights)}")
            entry = found.weights[_NAME]
            require(tuple(entry.shape) == _SHAPE, f"{sample.name} has a weight of shape {tuple(entry.shape)}")
        for name, entry in found.weights.items():
            absent = set(entry.keys.values()) - sample.tensors.keys()
            require(not absent, f"{name} of {sample.name} needs {sorted(absent)}, which are not stored")


@law(
    LAWS,
    "strangers",
    "checkpoints of other formats are not recognised",
    "a checkpoint of another format, or of plain tensors, is read wrongly",
)
def _strangers(subject: _FormatUnderTest) -> None:
    plain = {"model.norm.weight": torch.ones(4), _NAME: torch.ones(4, 4), "scale": torch.ones(1)}
    for config in ({}, {"quantization_config": {"quant_method": "nobody's"}}, {"quantization_config": None}):
        sample = _Sample("plain tensors", plain, {"config.json": config})
        found = subject.format.recognise(sample.contents())
        require(found is None or not (found.weights or found.faults), f"plain tensors beside {config} are recognised")


@law(
    LAWS,
    "round-trip",
    "unpack returns the parts of the scheme's layout, and inverts pack bit for bit",
    "a loaded model differs from the saved one",
)
def _round_trip(subject: _FormatUnderTest) -> None:
    for sample in subject.samples:
        for name, entry in subject.found(sample).weights.items():
            values = subject.decoded(sample, entry)
            if sample.weight is not None:
                wanted = sample.weight.dequantize().to(values.dtype)
                require(bool((values == wanted).all()), f"{sample.name} decodes to other values")
            else:
                require(not values.is_floating_point() or not bool(values.isnan().any()), f"{name} decodes to NaN")


@law(
    LAWS,
    "layout",
    "layout describes the tensors that pack returns, and announce returns JSON",
    "files differ from the plan by which they are written",
)
def _layout(subject: _FormatUnderTest) -> None:
    format = subject.writable()
    for sample in subject.samples:
        if sample.weight is None:
            continue
        promised = format.layout(_NAME, sample.weight.spec)
        made = {k: (t.dtype, tuple(t.shape)) for k, t in format.pack(_NAME, sample.weight).items()}
        require(made == promised, f"layout has {promised}, pack returns {made}")
        json.dumps(dict(format.announce({_NAME: sample.weight.spec}, [])))


@law(
    LAWS,
    "refuses",
    "a scheme that it cannot store is refused by layout, pack and announce alike",
    "a conversion fails in the middle, or writes a checkpoint that cannot be read",
)
def _refuses(subject: _FormatUnderTest) -> None:
    format = subject.writable()
    if not subject.refused:
        raise NotApplicable("it can store all given schemes")
    for scheme in subject.refused:
        weight = _weight(scheme)
        calls: tuple[tuple[str, Callable[..., object], tuple[Any, ...]], ...] = (
            ("layout", format.layout, (_NAME, weight.spec)),
            ("pack", format.pack, (_NAME, weight)),
            ("announce", format.announce, ({_NAME: weight.spec}, [])),
        )
        for what, call, given in calls:
            try:
                call(*given)
            except SchemeError as error:
                require("\n" not in str(error), f"the error of {what} for {scheme} has more than one line")
                continue
            require(False, f"{what} accepts {scheme}, which layout refuses")


@law(
    LAWS,
    "half-groups",
    "a weight that lacks one of its tensors is a fault, and is not read",
    "an incomplete checkpoint loads without an error, with wrong values",
)
def _half_groups(subject: _FormatUnderTest) -> None:
    for sample in subject.samples:
        for name, entry in subject.found(sample).weights.items():
            whole = subject.decoded(sample, entry)
            for role, key in entry.keys.items():
                less = sample.without(key)
                for other in _readable(subject, less, name):
                    same = other.spec is not None and _same(subject.decoded(less, other), whole)
                    require(same, f"{name} is read without its {role}, in {sample.name}")


@law(
    LAWS,
    "malformed",
    "a stored tensor of another dtype or shape is a fault or a TetherError, and nothing else",
    "a damaged checkpoint fails with an error that names no tensor, or loads wrong values",
)
def _malformed(subject: _FormatUnderTest) -> None:
    for sample in subject.samples:
        for name, entry in subject.found(sample).weights.items():
            for role, key in entry.keys.items():
                held = sample.tensors[key]
                if sample.packings.get(key):
                    continue  # the file records its packing, which its reader has checked
                for what, wrong in (
                    ("is complex", held.new_zeros(held.shape, dtype=torch.complex64)),
                    ("has four more dimensions", held[None, None, None, None].expand(2, 3, 1, 1, *held.shape)),
                ):
                    bad = replace(sample, tensors={**sample.tensors, key: wrong})
                    how = f"{name} of {sample.name} is read although its {role} {what}"
                    for other in _readable(subject, bad, name):
                        if tuple(other.shape) != tuple(entry.shape):
                            continue  # a load refuses another shape
                        try:
                            subject.decoded(bad, other)
                        except (TetherError, Broken):
                            continue
                        raise Broken(how)


@law(
    LAWS,
    "pure",
    "recognise and unpack do not change their arguments, and repeat their results",
    "a checkpoint reads differently the second time, or a mapped file is changed",
)
def _pure(subject: _FormatUnderTest) -> None:
    for sample in subject.samples:
        config, tensors = copy.deepcopy(dict(sample.beside)), {k: t.clone() for k, t in sample.tensors.items()}
        found = subject.found(sample)
        again = subject.found(sample)
        require(found == again, f"recognise returns another result the second time, for {sample.name}")
        require(dict(sample.beside) == config, f"recognise changes the JSON beside {sample.name}")
        for name, entry in found.weights.items():
            given = {role: sample.tensors[key] for role, key in entry.keys.items()}
            one = subject.format.unpack(entry, dict(given))
            two = subject.format.unpack(entry, dict(given))
            alike = one.keys() == two.keys() and all(_same(one[part], two[part]) for part in one)
            require(alike, f"unpack returns another result the second time, for {name} of {sample.name}")
        kept = all(_same(sample.tensors[key], tensor) for key, tensor in tensors.items())
        require(kept, f"unpack changes the stored tensors of {sample.name}")


def _readable(subject: _FormatUnderTest, sample: _Sample, name: str) -> Iterator[Entry]:
    """Yield the entry of the weight ``name``, if the format would read it."""
    try:
        found = subject.format.recognise(sample.contents())
    except CheckpointError:
        return
    if found is None or name not in found.weights or name in found.faults:
        return
    if all(key in sample.tensors for key in found.weights[name].keys.values()):  # otherwise reading it raises
        yield found.weights[name]


def _same(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and same_bits(one.contiguous(), two.contiguous())
