"""The laws of schemes: ours keep them all, and a scheme that breaks one law fails that law alone."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy
import pytest
import torch

import torchtether as tt
from tests.catalog import EACH_KIND, SCHEMES, slow_but
from torchtether.schemes import SCHEMES as KINDS
from torchtether.schemes import Part, scheme_from_json
from torchtether.testing import check_scheme
from torchtether.testing.schemes import LAWS

NO_UPDATE = {"int1-group8", "int8-mastered", "nf4-mastered"}
"""No scale covers values of both signs with one bit, and a master takes each update as it is."""


@pytest.mark.parametrize("row", slow_but(SCHEMES, EACH_KIND))
def test_ours_keep_every_law(row):
    report = check_scheme(row.scheme).check()
    allowed = {"refuses-alike", "finite", "dtype", "updates"} if row.scheme.transparent else {"refuses-alike", "views"}
    if row.id in NO_UPDATE:
        allowed.add("updates")
    assert {result.law for result in report.skipped} <= allowed


@dataclass(frozen=True)
class Whole(tt.Scheme):
    """A power of two for each row, and integer multiples of it: a minimal scheme."""

    kind: ClassVar[str] = "test-whole"
    bits: int = 8

    def layout(self, shape):
        if not shape:
            raise tt.SchemeError("a tensor without dimensions has no rows", name="")
        rows = shape[:-1]
        span = shape[-1] if len(shape) > 1 else 1
        step = 1
        for size in rows[1:]:
            step *= size
        return {
            "codes": Part(tuple(shape), torch.int8, span * step if len(shape) > 1 else 1),
            "scale": Part((*rows, 1), torch.float32, span * step if rows else 0),
        }

    def encode(self, values):
        self.check(tuple(values.shape))
        x = values.float()
        if not x.is_meta and not bool(x.isfinite().all()):
            raise tt.SchemeError("the values are not finite")
        high = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))
        scale = torch.where(high > 0, torch.exp2(torch.ceil(torch.log2(high.clamp_min(1e-30) / 120))), 1.0)
        return {"codes": (x / scale).round().to(torch.int8), "scale": scale}

    def decode(self, parts, shape, dtype):
        return (parts["codes"].reshape(shape).float() * parts["scale"].reshape(*shape[:-1], 1)).to(dtype)

    def bound(self, parts, shape):
        return parts["scale"].reshape(*shape[:-1], 1) * 0.5


def _broken(law, **methods):
    """Return a copy of ``Whole`` with other methods and its own ``kind``."""
    name = f"Broken_{law.replace('-', '_')}"
    made = type(name, (Whole,), {"kind": f"test-{law}", "__module__": __name__, "__qualname__": name, **methods})
    globals()[name] = dataclasses.dataclass(frozen=True)(made)  # where pickle looks for it
    return globals()[name]()


def _wear(self, values, held):
    made = Whole.encode(self, values)
    return {**made, "codes": made["codes"] - (made["codes"] > 5).to(torch.int8)}


def _forget_scale(self, values, held):
    """Writes codes for another scale than the stored one, unless the values are unchanged."""
    made = Whole.encode(self, values)
    same = torch.equal(made["codes"], held["codes"]) and torch.equal(made["scale"], held["scale"])
    return made if same or not bool(values.any()) else {**made, "scale": made["scale"] * 2}


def _writing(self, values):
    made = Whole.encode(self, values)
    if not values.is_meta and not values.is_contiguous():
        values.add_(1)
    return made


def _finite(self, values):
    return Whole.encode(self, values if values.is_meta else values.nan_to_num(0.0, 1.0, -1.0))


def _scalars_too(self, values):
    return Whole.encode(self, values if values.dim() else values.reshape(1))


def _elsewhere(self, values):
    return Whole.encode(self, torch.zeros(values.shape) if values.is_meta else values)


def _as_memory_was(self, values):
    """Has a code that depends on uninitialised memory; it is 0 in nearly every run."""
    made = Whole.encode(self, values)
    if not values.is_meta and torch.empty((), dtype=torch.int64).item() == torch.iinfo(torch.int64).max:
        made["codes"].view(-1)[-1:] ^= 1
    return made


def _no_rows(self, values):
    if values.dim() and values.shape[0] == 0:
        raise tt.SchemeError("nothing to encode")
    return Whole.encode(self, values)


def _drift(self, parts, dtype):
    return {**parts, "scale": parts["scale"] * 1.0001}


def _stay(self, values, held, *, shrink=True):
    Whole.encode(self, values)  # it refuses what is not finite
    return dict(held)


def _any_view(self, old, new):
    return True


def _strided(self, parts, shape, dtype):
    """Decodes to float64 with strides of its own."""
    made = Whole.decode(self, parts, shape, dtype)
    return made if dtype != torch.float64 else made.unsqueeze(-1).repeat(*[1] * len(shape), 2)[..., 0]


def _of_a_gain():
    """Two schemes of other gains are equal, and no file says which it was."""
    scheme = _broken(
        "file",
        __annotations__={"gain": float},
        gain=dataclasses.field(default=1.0, compare=False),
        to_json=lambda self: {"kind": self.kind},
        encode=lambda self, values: Whole.encode(self, values.float() / self.gain),
        decode=lambda self, parts, shape, dtype: Whole.decode(self, parts, shape, dtype) * self.gain,
        bound=lambda self, parts, shape: Whole.bound(self, parts, shape) * self.gain,
    )
    return dataclasses.replace(scheme, gain=2.0)


def _clamped(self, parts, shape, dtype):
    made = Whole.decode(self, parts, shape, torch.float32)
    return made.clamp(-60000, 60000).to(dtype) if dtype == torch.float16 else made.to(dtype)


def _first_rows(self, parts, shape, start, stop, out):
    out.copy_(self.decode(parts, shape, out.dtype).reshape(-1, shape[-1])[: stop - start])


BROKEN = {
    "json": lambda: _broken("json", to_json=lambda self: {"kind": self.kind, "bits": 7}),
    "layout": lambda: _broken("layout", nbytes=lambda self, shape, dtype: 1),
    "repeats": lambda: _broken("repeats", encode=_as_memory_was),
    "refuses-alike": lambda: _broken("refuses-alike", encode=_scalars_too),
    "bound": lambda: _broken("bound", bound=lambda self, parts, shape: Whole.bound(self, parts, shape) * 0.5),
    "decode": lambda: _broken("decode", decode=_strided),
    "narrow": lambda: _broken("narrow", decode=_clamped),
    "strides": lambda: _broken("strides", encode=_writing),
    "writes-back": lambda: _broken("writes-back", reencode=_wear),
    "writes": lambda: _broken("writes", reencode=_forget_scale),
    "finite": lambda: _broken("finite", encode=_finite),
    "gather": lambda: _broken(
        "gather", gather=lambda self, p, shape, index, dtype: self.decode(p, shape, dtype).index_select(0, index) * 2
    ),
    "updates": lambda: _broken("updates", update=_stay),
    "pieces": lambda: _broken("pieces", decode_into=_first_rows),
    "views": lambda: _broken("views", can_view=_any_view),
    "meta": lambda: _broken("meta", encode=_elsewhere),
    "dtype": lambda: _broken("dtype", convert=_drift),
    "empty": lambda: _broken("empty", encode=_no_rows),
    "file": _of_a_gain,
}


def test_the_least_scheme_keeps_every_law():
    assert [result.law for result in check_scheme(Whole()).check().skipped] == ["updates"]


@pytest.mark.parametrize("law", BROKEN)
def test_who_breaks_a_law_is_told_that_one(law):
    scheme = BROKEN[law]()
    try:
        report = check_scheme(scheme)
    finally:
        del KINDS[scheme.kind]
    failed = [result.law for result in report.failed]
    assert law in failed
    assert set(failed) <= {law, *ALONG.get(law, ())}, [str(result) for result in report.failed]


ALONG = {"bound": {"writes"}, "json": {"file"}, "writes": {"writes-back"}, "writes-back": {"writes"}}
"""What cannot hold without it: a bound that is too small is so for writes too, and files keep schemes as JSON."""


@pytest.mark.parametrize("scheme", [Whole(), tt.int8(), tt.nf4()], ids=str)
def test_shapes_without_elements_are_tried_by_the_law_of_them(scheme):
    check_scheme(scheme, shapes=[(0, 64), (3, 0), (0,), (2, 0, 64), (4, 64)]).check()
    broken = _broken("empty", encode=_no_rows)
    try:
        report = check_scheme(broken, shapes=[(0, 2, 4), (1, 2, 4)])
    finally:
        del KINDS[broken.kind]
    assert [result.law for result in report.failed] == ["empty"]


@dataclass(frozen=True)
class _Halves(tt.Scheme):
    """float16 values, of a tensor without dimensions too."""

    kind: ClassVar[str] = "test-halves"

    def layout(self, shape):
        return {"values": Part(tuple(shape), torch.float16, math.prod(shape[1:]))}

    def encode(self, values):
        if not values.is_meta and not bool(values.half().isfinite().all()):
            raise tt.SchemeError("the values are not finite, or too large for float16")
        return {"values": values.to(torch.float16, copy=True, memory_format=torch.contiguous_format)}

    def decode(self, parts, shape, dtype):
        return parts["values"].to(dtype, copy=True)

    def bound(self, parts, shape):
        return parts["values"].float().abs() * 2**-11 + 2**-25


def test_a_scheme_of_tensors_without_dimensions_keeps_every_law():
    check_scheme(_Halves(), shapes=[()]).check()


def test_every_law_is_known():
    assert set(BROKEN) | {"rows"} == {law.id for law in LAWS}


def test_what_encode_does_to_its_argument_does_not_hide_its_error():
    scheme = _broken("magnitudes", encode=lambda self, values: Whole.encode(self, values.abs_()))
    try:
        report = check_scheme(scheme, laws="bound")
    finally:
        del KINDS[scheme.kind]
    assert report.failed


def test_rows_that_span_the_wrong_parts_are_found():
    def layout(self, shape):
        made = Whole.layout(self, shape)
        return {**made, "scale": made["scale"]._replace(span=0)} if len(shape) == 2 else made

    scheme = _broken("rows", layout=layout)
    try:
        report = check_scheme(scheme, laws="rows")
    finally:
        del KINDS[scheme.kind]
    assert report.failed


@dataclass(frozen=True)
class _Kept(Whole):
    """It keeps float32 values as they are, in the caller's memory."""

    kind: ClassVar[str] = "test-kept"

    def layout(self, shape):
        return {
            **super().layout(shape),
            "values": Part(tuple(shape), torch.float32, super().layout(shape)["codes"].span),
        }

    def encode(self, values):
        return {**super().encode(values), "values": values.float()}


def test_parts_in_the_memory_of_the_values_are_found():
    (result,) = check_scheme(_Kept(), laws="strides").failed
    assert "encode returns values in the memory of its argument" in result.what


@dataclass(frozen=True)
class _Drawn(Whole):
    """Its updates are right in the mean, and wrong in one way each."""

    kind: ClassVar[str] = "test-drawn"
    wrong: str = ""

    def update(self, values, held, *, shrink=True):
        if self.wrong != "finite" and not bool(values.isfinite().all()):
            raise tt.SchemeError("the values are not finite")
        codes = (values.nan_to_num() / held["scale"] + torch.rand(values.shape)).floor()
        if self.wrong == "updates":
            codes += 5 * (2 * torch.randint(2, values.shape) - 1)
        return {**held, "codes": codes.clamp(-128, 127).to(torch.int8)}


@pytest.mark.parametrize("law", ["", "finite", "updates"])
def test_updates_by_nan_or_beyond_the_neighbours_are_found(law):
    assert [result.law for result in check_scheme(_Drawn(wrong=law), laws=["finite", "updates"]).failed] == [
        law
    ] * bool(law)


class _Values(Whole):
    """It keeps large values beside the codes, if there are any."""

    kind: ClassVar[str] = "test-values"

    def encode(self, values):
        made = super().encode(values)
        large = values.flatten()[(values.abs() > 100).flatten()] if not values.is_meta else values[:0]
        return {**made, "large": large} if large.numel() else made


@dataclass(frozen=True)
class _Fours(Whole):
    """Only matrices, of rows by four."""

    kind: ClassVar[str] = "test-fours"

    def layout(self, shape):
        if len(shape) != 2 or shape[0] % 4:
            raise tt.SchemeError(f"takes 2 dimensions and rows by 4, got shape {tuple(shape)}")
        return super().layout(shape)


def test_parts_that_depend_on_the_values_are_refused():
    report = check_scheme(_Values(), laws="layout")
    assert "layout has ['codes', 'scale']" in report.failed[0].what
    with pytest.raises(tt.SchemeError, match=r"^_Values.encode returns the parts codes, scale, large, layout has"):
        tt.Weight.encode(torch.full((2, 4), 200.0), _Values())


@dataclass(frozen=True)
class _Differs(Whole):
    """One of its parts is not as ``layout`` has it."""

    kind: ClassVar[str] = "test-differs"
    way: str = "dtype"

    def encode(self, values):
        made = super().encode(values)
        scale = made["scale"]
        return {**made, "scale": {"dtype": scale.double(), "shape": scale[:, 0], "type": 0.5}[self.way]}


@pytest.mark.parametrize(
    ("scheme", "what"),
    [
        (_Differs(), r"scale of shape \(2, 1\) in torch.float64, layout has \(2, 1\) in torch.float32"),
        (_Differs(way="type"), "scale as float, not as a tensor"),
        (_Differs(way="shape"), r"scale of shape \(2,\) in torch.float32, layout has \(2, 1\) in torch.float32"),
    ],
)
def test_parts_of_another_shape_or_dtype_are_refused(scheme, what):
    with pytest.raises(tt.SchemeError, match=f"^_Differs.encode returns {what}"):
        tt.Weight.encode(torch.ones(2, 4), scheme)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    with pytest.raises(tt.SchemeError, match=f"^0.weight: _Differs.encode returns {what}"):
        tt.quantize(model, scheme)
    assert type(model[0].weight) is torch.nn.Parameter


@dataclass(frozen=True)
class _Lacks(Whole):
    """It returns no scale."""

    kind: ClassVar[str] = "test-lacks"

    def encode(self, values):
        return {"codes": super().encode(values)["codes"]}


@pytest.mark.parametrize("scheme", [_Lacks(), _Differs(way="shape")], ids=["lacks", "differs"])
def test_a_load_onto_meta_refuses_other_parts(scheme, tmp_path):
    """It encodes into memory of its own, which would keep what was there before."""
    tt.save(torch.nn.Linear(4, 2), tmp_path)
    with torch.device("meta"):
        model = torch.nn.Linear(4, 2)
    with pytest.raises(tt.SchemeError, match=rf"^weight: {type(scheme).__name__}.encode returns .*, layout has"):
        tt.load(model, tmp_path, quantize={"weight": scheme})
    assert model.weight.is_meta


@dataclass(frozen=True)
class _Computes(Whole):
    """Its scale has the compute dtype, and no ``convert`` casts it."""

    kind: ClassVar[str] = "test-computes"

    def layout(self, shape):
        made = super().layout(shape)
        return {**made, "scale": made["scale"]._replace(dtype=None)}

    def encode(self, values):
        made = super().encode(values)
        return {**made, "scale": made["scale"].to(values.dtype)}


def test_a_part_that_keeps_its_dtype_where_layout_changes_it_is_found():
    report = check_scheme(_Computes())
    assert [result.law for result in report.failed] == ["dtype"]
    assert "leaves scale in torch.float32, layout has torch.bfloat16" in report.failed[0].what


def test_a_scheme_may_be_choosy_about_shapes():
    report = check_scheme(_Fours()).check()
    assert [result.law for result in report.passed].count("rows") == 1
    model = torch.nn.Sequential(torch.nn.Linear(8, 6))
    with pytest.raises(tt.SchemeError, match=r"^0\.weight: .*takes 2 dimensions and rows by 4, got shape \(6, 8\)"):
        tt.quantize(model, _Fours())
    assert type(model[0].weight) is torch.nn.Parameter


def test_why_encode_refuses_is_said():
    refuses = lambda self, values: (_ for _ in ()).throw(tt.SchemeError("not today"))  # noqa: E731
    scheme = _broken("refuses", encode=refuses)
    try:
        report = check_scheme(scheme, laws="bound")
    finally:
        del KINDS[scheme.kind]
    assert "not today" in report.failed[0].what


def test_what_is_not_written_yet_is_said():
    @dataclass(frozen=True)
    class Kindless(tt.BlockScheme):
        pass

    @dataclass(frozen=True)
    class Bare(tt.Scheme):
        kind: ClassVar[str] = "test-bare"

    with pytest.raises(tt.LawError, match="Kindless has no kind"):
        check_scheme(Kindless())
    with pytest.raises(tt.SchemeError, match=r"^Kindless: it has no kind"):
        Kindless().to_json()
    with pytest.raises(NotImplementedError, match=r"^Kindless: it has no fit\(\)\. It needs"):
        Kindless().encode(torch.ones(2, 2))
    try:
        with pytest.raises(NotImplementedError, match=r"^Bare: it has no layout\(\)\. A scheme needs"):
            check_scheme(Bare())
    finally:
        del KINDS["test-bare"]


def test_it_says_what_it_cannot_check():
    with pytest.raises(tt.LawError, match="fits none of the shapes"):
        check_scheme(tt.int8(), shapes=[()])
    with pytest.raises(tt.LawError, match="not a scheme"):
        check_scheme("int8")
    with pytest.raises(tt.LawError, match="no law 'bounds'"):
        check_scheme(tt.int8(), laws=["bounds"])


@dataclass(frozen=True)
class Forgotten(tt.BlockScheme):
    """Two numbers in each block, but no ``numbers`` that declares them."""

    kind: ClassVar[str] = "test-forgotten"
    bits: int = 5

    def fit(self, x):
        return {"scale": (x.amax(-1) - x.amin(-1)) / 31, "low": x.amin(-1)}


def test_a_long_error_keeps_what_to_do():
    failed = check_scheme(Forgotten()).failed
    assert failed
    assert all("say in `numbers` what there is." in str(result) for result in failed if "fit gives" in str(result))
    assert any("fit gives" in str(result) for result in failed)


@dataclass(frozen=True)
class _Held(Whole):
    kind: ClassVar[str] = "test-held"
    extra: object = None


class _Undecorated(Whole):
    kind: ClassVar[str] = "test-undecorated"


@dataclass(frozen=True)
class _Nameless(Whole):
    """It decodes otherwise than its base class, and has only the kind of that."""

    def decode(self, parts, shape, dtype):
        return super().decode(parts, shape, dtype) * 2


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        (_Nameless(), r"_Nameless: it has no kind of its own, only that of its base class \('test-whole'\)"),
        (_Undecorated(), r"_Undecorated: it is not a dataclass.* Write @dataclass"),
        (_Held(extra=math.nan), r"_Held\.extra: it is nan, which a file cannot hold\. A field may be"),
        (_Held(extra=(1, math.inf)), r"_Held\.extra: it is inf"),
        (_Held(extra={"a": 1}), r"_Held\.extra: it is a dict"),
        (_Held(extra=[1]), r"_Held\.extra: it is a list"),
        (_Held(extra=numpy.float32(1)), r"_Held\.extra: it is a float32"),
    ],
)
def test_what_no_file_could_restore_is_refused_before_anything_changes(tmp_path, scheme, why):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    for given in (scheme, tt.Mastered(scheme), {"*": scheme}):
        with pytest.raises(tt.SchemeError, match=f"^{why}"):
            tt.quantize(model, given)
    assert type(model[0].weight) is torch.nn.Parameter
    with pytest.raises(tt.SchemeError, match=f"^{why}"):
        tt.save({"w": tt.Weight.encode(torch.ones(4, 8), scheme)}, tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())


def test_fields_that_a_file_can_hold_come_back():
    for extra in (1, 1.5, -0.0, True, "text", None, torch.float16, tt.int4(), (1, ("a", tt.fp8())), numpy.float64(2)):
        assert scheme_from_json(json.loads(json.dumps(_Held(extra=extra).to_json()))) == _Held(extra=extra)
