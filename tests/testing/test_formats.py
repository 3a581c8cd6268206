"""The laws of formats: ours keep them, on their own files and on those of others; a broken format fails its law."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torchtether as tt
from torchtether.errors import SchemeError
from torchtether.formats import FORMATS, Contained, native
from torchtether.formats.entry import Found
from torchtether.testing import FORMAT_LAWS, check_format

GOLDEN = Path(__file__).parent.parent / "golden"


def _samples():
    made = {}
    for expected in sorted(GOLDEN.glob("*/expected.json")):
        path = next(expected.parent.glob("model.*"))
        with tt.open(path) as checkpoint:
            if any(checkpoint.entries[name].spec is not None for name in checkpoint.entries):
                made.setdefault(checkpoint.format, []).append(path)
    return made


SAMPLES = _samples()
TRIED = [format for format in FORMATS if format.name in SAMPLES or format is native]


@pytest.mark.parametrize("format", TRIED, ids=lambda format: format.name)
def test_ours_keep_every_law(format):
    check_format(format, samples=SAMPLES.get(format.name, ())).check()


def test_few_formats_have_nothing_to_try():
    assert {format.name for format in FORMATS} - {format.name for format in TRIED} <= {"auto-round"}
    assert all(isinstance(f, Contained) or f in TRIED or f.name == "auto-round" for f in FORMATS)


def _native(**changes):
    names = ("name", "recognise", "unpack", "layout", "pack", "announce")
    return SimpleNamespace(**{name: getattr(native, name) for name in names} | {"recognise": _recognise} | changes)


def _recognise(contents):
    """A user's own format: like ours, with the spec in config.json."""
    said = contents.beside["config.json"].get("mine", {})
    if not isinstance(said, dict) or not said:
        return None
    found = Found()
    for name, record in said.items():
        spec = tt.WeightSpec.from_json(record)
        layout = spec.scheme.layout(spec.base)
        keys = {part: f"{name}.{part}" for part in layout}
        stored = {key: contents.tensors[key][:2] for key in keys.values() if key in contents.tensors}
        wanted = {keys[p]: (what.dtype or spec.dtype, tuple(what.shape)) for p, what in layout.items()}
        if stored != wanted:
            found.fault(name, f"is stored as {stored}")
            continue
        found.weights[name] = native.Entry.of(keys, spec)
    return found


def _announce(specs, plain):
    return {"config.json": {"mine": {name: spec.to_json() for name, spec in specs.items()}}}


def _trusting(contents):
    """Believes the config, and reads what is there."""
    said = contents.beside["config.json"].get("mine", {})
    specs = {name: tt.WeightSpec.from_json(record) for name, record in (said or {}).items()}
    entries = {
        name: native.Entry.of(
            {p: f"{name}.{p}" for p in s.scheme.layout(s.base) if f"{name}.{p}" in contents.tensors}, s
        )
        for name, s in specs.items()
    }
    return Found(entries) if entries else None


def _made_up(entry, tensors):
    layout = entry.spec.scheme.layout(entry.spec.base)
    return {n: tensors.get(n, torch.ones(p.shape, dtype=p.dtype or entry.dtype)) for n, p in layout.items()}


def _squeezed(entry, tensors):
    """Reshapes stored tensors to the expected shape, whatever theirs is."""
    layout = entry.spec.scheme.layout(entry.spec.base)
    given = {n: t.real if t.is_complex() else t for n, t in tensors.items()}
    return {
        n: given[n].float().reshape(-1)[: torch.Size(p.shape).numel()].reshape(p.shape).to(p.dtype or entry.dtype)
        for n, p in layout.items()
    }


def _no_fp8(name, spec):
    if isinstance(spec.scheme, tt.ScaledFloat):
        raise SchemeError("no words for floats")
    return native.layout(name, spec)


def _grabbing(contents):
    return _recognise(contents) or Found(faults={"norm": "is not mine"})


def _zeroing(entry, tensors):
    made = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.view(torch.uint8).zero_()
    return made


def _flipped(entry, tensors):
    codes = tensors["qdata"]
    return {**tensors, "qdata": (codes.view(torch.uint8) ^ 1).view(codes.dtype)}


def _empty(contents):
    found = _recognise(contents)
    return None if found is None else Found({name + "x": entry for name, entry in found.weights.items()}, found.faults)


BROKEN = {
    "recognise": {"recognise": _empty},
    "strangers": {"recognise": _grabbing},
    "round-trip": {"unpack": _flipped},
    "layout": {"layout": lambda name, spec: {**native.layout(name, spec), "extra": (torch.int8, (1,))}},
    "refuses": {"layout": _no_fp8},
    "half-groups": {"recognise": _trusting, "unpack": _made_up},
    "malformed": {"recognise": _trusting, "unpack": _squeezed},
    "pure": {"unpack": _zeroing},
}
SCHEMES = [tt.int8(), tt.fp8()]


def test_a_format_of_ones_own_keeps_every_law():
    report = check_format(_native(announce=_announce), schemes=SCHEMES).check()
    assert [result.law for result in report.skipped] == ["refuses"]


@pytest.mark.parametrize("law", BROKEN)
def test_who_breaks_a_law_is_told_that_one(law):
    report = check_format(_native(**{"announce": _announce, **BROKEN[law]}), schemes=SCHEMES)
    failed = {result.law for result in report.failed}
    allowed = {"half-groups": {"malformed"}, "malformed": {"half-groups"}}.get(law, set())
    assert law in failed
    assert failed <= {law, *allowed}, [str(result) for result in report.failed]


def test_every_law_has_someone_who_breaks_it():
    assert tuple(BROKEN) == FORMAT_LAWS


def test_it_says_what_it_cannot_check():
    with pytest.raises(tt.LawError, match="no checkpoint to check"):
        check_format(next(format for format in FORMATS if format.name == "gptq"))
    with pytest.raises(tt.LawError, match="has no unpack"):
        check_format(SimpleNamespace(name="x", recognise=_recognise))
