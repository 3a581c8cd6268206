"""``check_scheme``, and the laws of schemes, over shapes, dtypes and patterns."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .._dtypes import dtype_name
from ..checkpoint.reader import open_checkpoint
from ..checkpoint.saver import save
from ..errors import LawError, SchemeError, UnsupportedOpError
from ..geometry.views import Shape
from ..schemes import Parts, Scheme, same_bits, scheme_from_json
from ..weights.weight import Weight
from .draws import PATTERNS, SHAPES, Case, cases
from .law import Law, NotApplicable, chosen, law, quiet, require, run
from .report import Report

LAWS: list[Law] = []

_CALM = ("normal", "spike")
_FACTORS = (0.0, -1.0, 0.999, 1.004, 0.5, 3.0)


@dataclass(frozen=True)
class _SchemeUnderTest:
    scheme: Scheme
    shapes: tuple[Shape, ...]
    cases: Callable[[], Iterable[Case]]

    def each(self, patterns: Sequence[str] = PATTERNS, *, rank: int = 1) -> Iterator[tuple[Case, Tensor, Parts]]:
        """Yield every case that the scheme encodes, its values and their parts; "normal" cases must be encoded."""
        for case in self.cases():
            if case.pattern not in patterns or len(case.shape) < rank:
                continue
            values = case.values()
            try:
                parts = self.scheme.encode(values.clone())  # it may write to its argument, which a law is to find
            except SchemeError as error:
                require(case.pattern != "normal", f"encode refuses {case}: {error}")
                continue
            yield case, values, parts

    def weights(self, patterns: Sequence[str] = PATTERNS, *, rank: int = 1) -> Iterator[tuple[Case, Weight]]:
        """Yield every case that ``each`` yields, with its values as a float32 Weight."""
        for case, _, _ in self.each(patterns, rank=rank):
            yield case, Weight.encode(case.values().float(), self.scheme)


def check_scheme(
    scheme: Scheme,
    *,
    shapes: Iterable[Shape] | None = None,
    laws: Iterable[str] | str | None = None,
    seed: int = 0,
) -> Report:
    """Check which laws a scheme keeps, over shapes, dtypes and patterns that are the same in every run.

    Loading, saving, sharding, optimizers and the compiler rely on these laws.  ``strategies`` draws more cases, with
    Hypothesis.

    Args:
        scheme: a scheme of any class; check every setting that you use.
        shapes: the shapes to try; shapes that the scheme does not fit are left out, and those without elements are for
            the law "empty". By default some of one to three dimensions.
        laws: ids of the laws to run; by default all.
        seed: changes the numbers, and the patterns and dtypes of each shape.

    Raises:
        LawError: there is no law of that id, or no shape fits.

    >>> import torchtether as tt
    >>> check_scheme(tt.int8(), laws=["bound", "json"]).ok
    True
    """
    picked = chosen(LAWS, laws)
    if not isinstance(scheme, Scheme):
        raise LawError(f"got a {type(scheme).__name__}, not a scheme", fix="Derive its class from tt.Scheme.")
    if not isinstance(getattr(scheme, "kind", None), str):
        raise LawError(f"{type(scheme).__name__} has no kind", fix='Give its class one: kind: ClassVar[str] = "mine".')
    asked = SHAPES if shapes is None else tuple(tuple(shape) for shape in shapes)
    with quiet():
        fitting = tuple(shape for shape in asked if _fits(scheme, shape))
    if not any(math.prod(shape) for shape in fitting):
        raise LawError(f"{scheme} fits none of the shapes {asked}", fix="Give shapes= that it fits.")
    drawn = cases(tuple(shape for shape in fitting if math.prod(shape)), seed=seed)
    return run(picked, _SchemeUnderTest(scheme, fitting, lambda: drawn), str(scheme))


def _fits(scheme: Scheme, shape: Shape) -> bool:
    try:
        scheme.layout(shape)
    except SchemeError:
        return False
    return True


# -- the dataclass and its layout --------------------------------------------------------------------------------------


@law(
    LAWS,
    "json",
    "it is a frozen, hashable dataclass, and equal after JSON, pickle and deepcopy",
    "a checkpoint loses how its weights are decoded, or torch.compile guards on something that changes",
)
def _json(subject: _SchemeUnderTest) -> None:
    scheme = subject.scheme
    require(dataclasses.is_dataclass(scheme), "it is not a dataclass")
    record = json.loads(json.dumps(scheme.to_json()))
    for how, again in (
        ("JSON", scheme_from_json(record)),
        ("pickle", pickle.loads(pickle.dumps(scheme))),
        ("deepcopy", copy.deepcopy(scheme)),
    ):
        require(again == scheme, f"{how} changes it to {again}")
        require(hash(again) == hash(scheme), f"{how} changes its hash")
    for field in dataclasses.fields(scheme)[:1]:  # type: ignore[arg-type]
        try:
            setattr(scheme, field.name, getattr(scheme, field.name))
        except dataclasses.FrozenInstanceError:
            continue
        require(False, "its fields can be set: it is not frozen")
    require("\n" not in str(scheme), "its str() has more than one line")


@law(
    LAWS,
    "layout",
    "encode returns the parts that layout has, and nbytes is their size",
    "a plan and a load need different memory, and files are written that cannot be read",
)
def _layout(subject: _SchemeUnderTest) -> None:
    for case, values, parts in subject.each((*_CALM, "large")):
        layout = subject.scheme.layout(case.shape)
        want = {name: (tuple(part.shape), part.dtype or values.dtype) for name, part in layout.items()}
        made = {name: (tuple(part.shape), part.dtype) for name, part in parts.items()}
        require(list(made) == list(want), f"encode returns {list(made)}, layout has {list(want)}, for {case}")
        for name in want:
            require(made[name] == want[name], f"{name} is {made[name]}, layout has {want[name]}, for {case}")
        count = sum(part.nbytes for part in parts.values())
        counted = subject.scheme.nbytes(case.shape, values.dtype)
        require(counted == count, f"nbytes is {counted}, the parts have {count}, for {case}")


@law(
    LAWS,
    "repeats",
    "encode returns the same bits again, whatever new memory contains",
    "files of the same values differ, and contain other data of the process",
)
def _repeats(subject: _SchemeUnderTest) -> None:
    for case, values, parts in subject.each(_CALM):
        with _filled_memory():
            again = subject.scheme.encode(values)
        for name, part in parts.items():
            require(same_bits(part, again[name]), f"encode leaves elements of {name} uninitialised, for {case}")


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Make torch fill new memory inside the block with NaN, and with the largest integers."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@law(
    LAWS,
    "refuses-alike",
    "encode refuses the shapes that layout refuses, with a SchemeError of one line",
    "a rule that matches an unsuitable weight fails in the middle of a load, not before it",
)
def _refuses_alike(subject: _SchemeUnderTest) -> None:
    tried = 0
    for shape in ((), *SHAPES, (3, 3), (2, 33), (5, 1)):
        if _fits(subject.scheme, shape):
            continue
        tried += 1
        try:
            subject.scheme.encode(torch.ones(shape))
        except SchemeError as error:
            require("\n" not in str(error), f"the error for {shape} has more than one line")
            continue
        require(False, f"layout refuses {shape}, encode does not")
    if not tried:
        raise NotApplicable("it fits every shape")


# -- values ------------------------------------------------------------------------------------------------------------


@law(
    LAWS,
    "bound",
    "the error of decode(encode(x)) is within bound(), for every pattern",
    "the stated error of a quantized model is too small",
)
def _bound(subject: _SchemeUnderTest) -> None:
    for case, values, parts in subject.each():
        decoded = subject.scheme.decode(parts, case.shape, torch.float32)
        _within(subject, case, parts, decoded, values.float(), "decode(encode(x))")


@law(
    LAWS,
    "decode",
    "decode returns a new contiguous tensor of the requested shape and dtype",
    "views of decoded values fail, and writing to them changes the weight",
)
def _decode(subject: _SchemeUnderTest) -> None:
    for case, _, parts in subject.each(_CALM):
        before = {name: part.clone() for name, part in parts.items()}
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            made = subject.scheme.decode(parts, case.shape, dtype)
            require(tuple(made.shape) == case.shape, f"decode returns shape {tuple(made.shape)} for {case}")
            require(made.dtype == dtype, f"decode returns {made.dtype} instead of {dtype}, for {case}")
            require(made.is_contiguous(), f"decode returns strides {made.stride()} for {case}")
            if not subject.scheme.transparent:
                made.zero_()
        kept = all(same_bits(parts[name], part) for name, part in before.items())
        require(kept, f"writing to decoded values changes the parts, for {case}")


@law(
    LAWS,
    "narrow",
    "decode in 16 bits returns the rounded float32 values, infinite only beyond the range of the dtype",
    "a compute dtype changes values by more than rounding, or hides that they are out of range",
)
def _narrow(subject: _SchemeUnderTest) -> None:
    for case, values, _ in subject.each(_CALM):
        ends = values.float() * (65504 / values.float().abs().max().clamp_min(1e-3)) if values.numel() else values
        for wanted in (values, ends):  # up to the ends of float16, which an encoded value may overshoot
            try:
                parts = subject.scheme.encode(wanted)
            except SchemeError:
                continue
            exact = subject.scheme.decode(parts, case.shape, torch.float32)
            for dtype in (torch.float16, torch.bfloat16):
                made, rounded = subject.scheme.decode(parts, case.shape, dtype), exact.to(dtype)
                what = f"decode in {dtype_name(dtype)} is not the rounded float32, for {case}"
                require(torch.equal(made, rounded), what)


@law(
    LAWS,
    "strides",
    "encode accepts any strides, and neither changes its argument nor returns its memory",
    "a transposed or sliced weight is encoded wrongly, or a later write to one of the two changes the other",
)
def _strides(subject: _SchemeUnderTest) -> None:
    for case, values, parts in subject.each(_CALM):
        wide = torch.empty((*values.shape, 2), dtype=values.dtype)
        spread = wide[..., 1].copy_(values)
        before = values.clone()
        made = subject.scheme.encode(spread)
        alike = all(same_bits(_dense(made[name]), part) for name, part in parts.items())
        require(alike, f"encode returns other parts for other strides, for {case}")
        require(same_bits(_dense(spread), before), f"encode changes its argument, for {case}")
        for name, part in () if subject.scheme.transparent else subject.scheme.encode(values).items():
            is_shared = part.numel() and part.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
            require(not is_shared, f"encode returns {name} in the memory of its argument, for {case}")


@law(
    LAWS,
    "writes-back",
    "writing decoded values back changes nothing, however often",
    "steps of an optimizer with zero gradients change the weights",
)
def _writes_back(subject: _SchemeUnderTest) -> None:
    for case, weight in subject.weights():
        values = weight.dequantize()
        for _ in range(3):
            weight.mul_(1.0)
        require(same_bits(weight.dequantize(), values), f"x.mul_(1) changes {case}")


@law(
    LAWS,
    "writes",
    "the error of an in-place op is within bound() too",
    "a step of an optimizer has a larger error than encoding its result anew",
)
def _writes(subject: _SchemeUnderTest) -> None:
    for index, (case, weight) in enumerate(subject.weights()):
        factor = _FACTORS[index % len(_FACTORS)]
        master = weight.scheme.master(weight.parts, weight.spec.base)
        wanted = (weight.dequantize() if master is None else master.float()) * factor
        try:
            weight.mul_(factor)
        except SchemeError:
            continue
        _within(subject, case, weight.parts, weight.dequantize(), wanted, f"x.mul_({factor})", tolerance=2.0**-8)


@law(
    LAWS,
    "updates",
    "update rounds to one of two neighbours, so that the mean of many draws is the value",
    "training changes the weights by other steps than the optimizer's, or not at all",
)
def _updates(subject: _SchemeUnderTest) -> None:
    drifts = []
    for case, weight in subject.weights(("normal",)):
        held, shape = weight.parts, weight.spec.base
        step = subject.scheme.bound(held, shape).expand(shape)
        wanted = weight.dequantize() + step / 2
        for _ in range(8):
            drawn = None if subject.scheme.master(held, shape) is not None else subject.scheme.update(wanted, held)
            if drawn is None or not bool((step > 0).all()):
                raise NotApplicable("it has no update that rounds")
            made = subject.scheme.decode(drawn, shape, torch.float32)
            drifts.append(((made - wanted) / step).reshape(-1))
            reach = 4 * torch.maximum(step, subject.scheme.bound(drawn, shape))  # from one neighbour to the other
            is_near = bool(((made - wanted).abs() <= reach).all())
            require(is_near, f"update rounds further than to a neighbour, for {case}")
    if not drifts:
        raise NotApplicable("no shape has dimensions")
    drift = torch.cat(drifts).mean().item()
    require(abs(drift) < 0.1, f"the mean of many updates by half of the bound is off by {drift:.2g} of it")


@law(
    LAWS,
    "finite",
    "values that are not finite are refused with a SchemeError of one line, and nothing is written",
    "a NaN in a gradient silently makes a whole block of the weight wrong",
)
def _finite(subject: _SchemeUnderTest) -> None:
    if subject.scheme.transparent:
        raise NotApplicable("a transparent scheme holds any values")
    for case, weight in subject.weights(("normal",)):
        before = weight.dequantize()
        for bad in (math.nan, math.inf, -math.inf):
            values = case.values().float()
            values.view(-1)[-1] = bad
            for write in (subject.scheme.encode, weight.copy_, weight.mul_, _update_of(weight)):
                try:
                    made = write(values)
                except SchemeError as error:
                    require("\n" not in str(error), "the error has more than one line")
                    continue
                require(made is None, f"{bad} is accepted, in {case}")  # of update: it has none
        require(same_bits(weight.dequantize(), before), f"a refused write has changed {case}")


def _update_of(weight: Weight) -> Callable[[Tensor], object]:
    """Return the function that encodes an optimizer's update of ``weight``."""
    return lambda values: weight.scheme.update(values, weight.parts)


# -- parts -------------------------------------------------------------------------------------------------------------


@law(
    LAWS,
    "gather",
    "gather returns the rows that decode returns",
    "an embedding looks up other values than the same weight has in a product",
)
def _gather(subject: _SchemeUnderTest) -> None:
    for case, _, parts in subject.each(_CALM, rank=2):
        index = torch.tensor([case.shape[0] - 1, 0, 0])
        for picked in (index, index[:0]):
            made = subject.scheme.gather(parts, case.shape, picked, torch.bfloat16)
            wanted = subject.scheme.decode(parts, case.shape, torch.bfloat16)[picked]
            require(made.dtype == wanted.dtype, f"gather returns {made.dtype} instead of {wanted.dtype}")
            require(same_bits(made, wanted), f"gather differs from decode()[index], for {case}")


@law(
    LAWS,
    "pieces",
    "decode_into and encode_into write what decode and encode return",
    "large weights are multiplied as other values, and loaded ones hold other codes",
)
def _pieces(subject: _SchemeUnderTest) -> None:
    for case, values, parts in subject.each(_CALM):
        rows, columns = math.prod(case.shape[:-1]), case.shape[-1]
        for dtype in (torch.float32, torch.bfloat16):
            whole = subject.scheme.decode(parts, case.shape, dtype).reshape(-1, columns)
            for start, stop in ((0, rows), (rows // 2, rows), (0, 1)):
                out = torch.full((stop - start, columns), 7.0, dtype=dtype)
                subject.scheme.decode_into(parts, case.shape, start, stop, out)
                alike = same_bits(out, whole[start:stop])
                require(alike, f"decode_into of the rows {start}:{stop} differs from decode, for {case}")
        written = {name: torch.ones_like(part) for name, part in parts.items()}
        subject.scheme.encode_into(values.clone(), written)
        alike = all(same_bits(written[name], part) for name, part in parts.items())
        require(alike, f"encode_into writes other parts than encode returns, for {case}")


@law(
    LAWS,
    "rows",
    "cutting rows keeps their values and memory, or is refused; joining them restores the whole",
    "shards of a weight decode to other values than the whole",
)
def _rows(subject: _SchemeUnderTest) -> None:
    cut = 0
    for case, weight in subject.weights(_CALM, rank=2):
        values = weight.dequantize()
        for at in range(case.shape[0] + 1):
            try:
                top, bottom = weight[:at], weight[at:]
            except UnsupportedOpError:
                continue
            cut += 1
            assert isinstance(top, Weight)
            assert isinstance(bottom, Weight)
            places = {part.untyped_storage().data_ptr() for part in weight.parts.values()}
            shared = all(p.untyped_storage().data_ptr() in places for x in (top, bottom) for p in x.parts.values())
            require(shared, f"rows cut at {at} are a copy, not a view, for {case}")
            require(same_bits(top.dequantize(), values[:at]), f"rows before {at} decode differently, for {case}")
            require(same_bits(bottom.dequantize(), values[at:]), f"rows from {at} decode differently, for {case}")
            whole = torch.cat([top, bottom])
            alike = not isinstance(whole, Weight) or all(
                same_bits(whole.parts[name], part) for name, part in weight.parts.items()
            )
            require(alike, f"rows cut at {at} and joined have other parts, for {case}")
            whole = whole.dequantize() if isinstance(whole, Weight) else whole
            require(same_bits(whole, values), f"rows cut at {at} and joined decode differently, for {case}")
    if not cut:
        raise NotApplicable("none of the shapes has rows that can be cut")


@law(
    LAWS,
    "views",
    "where can_view returns True, the parts are those of the reshaped tensor",
    "a reshaped weight decodes to other values",
)
def _views(subject: _SchemeUnderTest) -> None:
    for case, _, parts in subject.each(_CALM, rank=2):
        merged = (math.prod(case.shape[:-1]), case.shape[-1])
        for new in (merged, (1, *case.shape), (math.prod(case.shape),), case.shape[::-1]):
            if not _fits(subject.scheme, new) or not subject.scheme.can_view(case.shape, new):
                continue
            layout = subject.scheme.layout(new)
            counts = {name: math.prod(part.shape) for name, part in layout.items()}
            alike = all(parts[name].numel() == count for name, count in counts.items())
            require(alike, f"can_view accepts {case.shape} as {new}, but layout has other parts for that")
            made = subject.scheme.decode({n: parts[n].reshape(layout[n].shape) for n in layout}, new, torch.float32)
            wanted = subject.scheme.decode(parts, case.shape, torch.float32).reshape(new)
            require(same_bits(made, wanted), f"viewed as {new}, {case} decodes differently")


@law(
    LAWS,
    "meta",
    "on meta, encode and decode return the same shapes and dtypes",
    "a quantized model cannot be built on meta, and a load cannot be planned",
)
def _meta(subject: _SchemeUnderTest) -> None:
    for case, values, parts in subject.each(("normal",)):
        ghost = subject.scheme.encode(torch.empty(case.shape, dtype=values.dtype, device="meta"))
        want = {name: (part.shape, part.dtype) for name, part in parts.items()}
        require(
            {n: (p.shape, p.dtype) for n, p in ghost.items()} == want, f"encode returns other parts on meta, for {case}"
        )
        require(
            {p.device.type for p in ghost.values()} == {"meta"},
            f"encode on meta returns parts on other devices, for {case}",
        )
        made = subject.scheme.decode(ghost, case.shape, torch.float32)
        require(made.is_meta and tuple(made.shape) == case.shape, f"decode on meta returns {made.device} for {case}")


@law(
    LAWS,
    "dtype",
    "converting the compute dtype there and back changes no value",
    "model.bfloat16().float() has other values than the model",
)
def _dtype(subject: _SchemeUnderTest) -> None:
    if subject.scheme.transparent:
        raise NotApplicable("it holds the values in their own dtype")
    for case, weight in subject.weights(_CALM):
        values = weight.dequantize()
        for dtype in (torch.bfloat16, torch.float64):
            there = weight.to(dtype)
            assert isinstance(there, Weight)
            require(there.dequantize().dtype == dtype, f".to({dtype}) decodes to {there.dequantize().dtype}")
            for name, part in subject.scheme.layout(case.shape).items():
                made, wanted = there.parts[name].dtype, part.dtype or dtype
                require(
                    made == wanted, f".to({dtype}) leaves {name} in {made}, layout has {wanted}: it cannot be saved"
                )
            require(same_bits(there.float().dequantize(), values), f".to({dtype}) and back changes {case}")


@law(
    LAWS,
    "empty",
    "tensors without elements are encoded, if their shape fits",
    "a shard that gets no rows fails",
)
def _empty(subject: _SchemeUnderTest) -> None:
    tried = 0
    given = [shape for shape in subject.shapes if not math.prod(shape)]
    for shape in sorted({(0, shape[-1]) for shape in subject.shapes if len(shape) == 2}.union(given)):
        if _fits(subject.scheme, shape):
            tried += 1
            weight = Weight.encode(torch.zeros(shape), subject.scheme)
            require(tuple(weight.dequantize().shape) == shape, f"{shape} decodes to {weight.dequantize().shape}")
    if not tried:
        raise NotApplicable("it fits no shape without rows")


@law(
    LAWS,
    "file",
    "tt.save and tt.open restore it bit for bit",
    "a loaded model differs from the saved one",
)
def _file(subject: _SchemeUnderTest) -> None:
    weights = {f"w{index}": weight for index, (_, weight) in enumerate(subject.weights(_CALM))}
    with tempfile.TemporaryDirectory() as folder:
        save(dict(weights), folder)
        with open_checkpoint(folder) as checkpoint:
            for name, weight in weights.items():
                read = checkpoint[name]
                require(isinstance(read, Weight) or subject.scheme.transparent, f"{weight.shape} is plain after a save")
                if isinstance(read, Weight):
                    require(read.spec == weight.spec, f"a save changes {weight.spec} to {read.spec}")
                    read = read.dequantize()
                given = weight.dequantize().to(read.device)
                require(same_bits(read, given), f"a save changes the values of {tuple(weight.shape)}")


def _dense(tensor: Tensor) -> Tensor:
    """Return a copy with contiguous strides; ``contiguous()`` keeps odd strides of dimensions of size 1."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _within(
    subject: _SchemeUnderTest, case: Case, parts: Parts, made: Tensor, wanted: Tensor, how: str, tolerance: float = 0.0
) -> None:
    bound = subject.scheme.bound(parts, case.shape)
    off = (made - wanted).abs()
    over = off - bound * (1 + tolerance) - 1e-6 * wanted.abs() - 1e-30
    if over.numel() and not bool((over <= 0).all()):
        at = int(over.argmax())
        allowed = bound.expand(off.shape).reshape(-1)[at].item()
        require(False, f"{how} is off by {off.reshape(-1)[at].item():.3g}, the bound is {allowed:.3g}, for {case}")
