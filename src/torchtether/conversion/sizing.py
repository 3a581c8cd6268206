"""Choosing a scheme for each weight so that a model has a given size and the least error."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from glob import escape
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import as_module, as_size, check_callable, describe
from ..errors import ArgumentError, RuleError, SchemeError
from ..exchange.refusals import ON_DISK, is_on_disk
from ..progress import Progress, ticking
from ..schemes import Affine, Scheme, SuperBlocks, int8, nf4, scheme_to_text
from ..ties.components import find_components, tie_of
from ..ties.names import named_tensors
from ..weights.weight import Weight
from .selection import matched_names, resolved, schemes_for

CANDIDATES: tuple[Scheme | None, ...] = (
    None,
    int8(),
    *(Affine(bits, symmetric=False, block=(1, 64), scale_dtype=torch.float16) for bits in (6, 5, 4, 3)),
    nf4(double_quant=True),
    SuperBlocks(6, 16, scale_bits=8, offset=32),
    SuperBlocks(5, 32, minimum=True),
    SuperBlocks(4, 32, minimum=True),
    SuperBlocks(3, 16, offset=4),
    SuperBlocks(2, 16, scale_bits=4, minimum=True),
)
"""The default candidates for a weight: codes of 2 to 8 bits. ``None`` leaves it as it is."""

_CHUNK = 2**20
"""Elements decoded at once."""


class Option(NamedTuple):
    """A scheme for one weight: its ``nbytes``, and its squared ``error`` as a fraction of the weight's squared norm."""

    scheme: Scheme | None
    nbytes: int
    error: float


@dataclass(frozen=True)
class QuantizePlan:
    """Hold one scheme for each planned weight, by the name of its owner; ``print`` shows it as a table.

    ``tt.plan_quantize`` makes it. ``choices`` has an ``Option`` (scheme, nbytes, error) for each weight, ``elements``
    its number of elements. ``rules`` is an argument for ``tt.quantize`` and ``tt.load(quantize=)``.

    >>> import torch, torchtether as tt
    >>> plan = tt.plan_quantize(torch.nn.Linear(64, 64), bits=9)
    >>> plan.rules == {"weight": tt.int8()}, plan.nbytes == 4352 + 256
    (True, True)
    """

    choices: Mapping[str, Option]
    elements: Mapping[str, int] = field(repr=False)
    others: int = 0
    """Bytes of all tensors that were not planned: norms, biases, tensors that are quantized already."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors of the model after the plan, tied ones counted once."""
        return self.others + sum(option.nbytes for option in self.choices.values())

    @property
    def bits(self) -> float:
        """Return the bits per element of the planned weights, scales and zero points included."""
        return 8 * sum(option.nbytes for option in self.choices.values()) / max(sum(self.elements.values()), 1)

    @property
    def error(self) -> float:
        """Return the sum of the errors of all planned weights, which the plan minimises for the size."""
        return sum(option.error for option in self.choices.values())

    @property
    def rules(self) -> dict[str, Scheme | None]:
        """Return the scheme of each weight by its name, as rules of ``tt.quantize``."""
        return {escape(name): option.scheme for name, option in self.choices.items()}

    def __str__(self) -> str:
        rows = [("weight", "scheme", "MB", "bits", "error")]
        for name, (scheme, nbytes, error) in self.choices.items():
            bits, words = (
                8 * nbytes / max(self.elements[name], 1),
                "as it is" if scheme is None else scheme_to_text(scheme),
            )
            rows.append((name, words, f"{nbytes / 1e6:.3f}", f"{bits:.2f}", f"{error:.2e}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        total = f"{self.nbytes / 1e6:.3f} MB in all, {self.others / 1e6:.3f} of them not planned"
        return "\n".join([*lines, f"{total}; {self.bits:.2f} bits a weight, summed error {self.error:.2e}"])


def plan_quantize(
    model: nn.Module,
    *,
    bytes: int | str | None = None,
    bits: float | None = None,
    schemes: Iterable[Scheme | str | None] | None = None,
    only: str | Iterable[str] | None = None,
    inputs: Iterable[Any] | None = None,
    progress: Progress = None,
) -> QuantizePlan:
    """Choose a scheme for each weight of ``model`` that meets a size with the least error; nothing is changed.

    Size: ``bytes`` of all parameters and buffers (a number, or ``"4GB"``), or ``bits`` per element of the planned
    weights, scales included. Planned are the weights that a bare scheme quantizes (see ``tt.quantize``), or those that
    the globs ``only`` match; a tied group is planned once, and a Weight stays as it is. ``schemes`` are the candidates
    for each weight, ``None`` among them meaning as it is; a scheme that does not fit a shape is left out there. By
    default they are ``None``, ``tt.int8()``, and ten others with codes of 2 to 6 bits.

    The error of a scheme is the squared error of the decoded values as a fraction of the weight's squared norm. It is
    the relative squared error of outputs whose inputs are white noise. With ``inputs`` (batches: a mapping is passed to
    the model by name, a tuple by position, anything else as the only argument) each column of a linear layer is
    weighted by the mean square of its inputs. The sum of errors over weights is minimised by Lagrange's method, which
    takes, one after the other, the step that saves most error per byte. Each weight is encoded once in each scheme;
    scratch is one tensor. ``progress`` is ``True`` for a bar, or a function of (bytes done, bytes in all) of the
    weights that have been tried.

    Raises:
        ArgumentError: not exactly one size is given, it is not a size or too small, a weight is on ``meta``, diffusers
            keeps the model in files, or with ``inputs`` a layer is given values that are not finite.
        RuleError: a glob or a scheme is unknown, or there is no weight to plan.
        SchemeError: no scheme fits a weight, or its values are not finite.

    >>> import torch, torchtether as tt
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False), torch.nn.Linear(256, 256, bias=False))
    >>> with torch.no_grad():
    ...     _ = model[0].weight[:, 0].mul_(100)  # columns of two sizes: hard to quantize
    >>> plan = tt.plan_quantize(model, bits=6)
    >>> plan.bits <= 6, plan.choices["0.weight"].nbytes > plan.choices["1.weight"].nbytes
    (True, True)
    """
    model = as_module(model)
    check_callable(progress, "progress", or_flag=True)
    candidates = CANDIDATES if schemes is None else _candidates(schemes)
    if (bytes is None) == (bits is None):
        raise ArgumentError(
            "exactly one of bytes= and bits= is needed", name="plan_quantize", fix="Give one of the two."
        )
    if inputs is not None and (isinstance(inputs, (str, Mapping)) or not isinstance(inputs, Iterable)):
        raise ArgumentError(f"is {describe(inputs)}, not several batches", name="inputs", fix="Give a list of batches.")
    if is_on_disk(model.modules()):
        raise ArgumentError(ON_DISK, name="model", fix="Plan before it is offloaded.")
    components = find_components(model)
    ties = [tie_of(component) for component in components]
    tensors = named_tensors(model)
    if only is None:
        names = set(schemes_for(model, int8(), [tie for tie in ties if tie is not None]))
    else:
        known = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        names = set(matched_names(only, known, RuleError, "this glob matches no parameter"))
    planned: dict[str, Tensor] = {}
    others = 0
    for component, tie in zip(components, ties, strict=True):
        owner = component.names[0] if tie is None else tie.owner
        tensor = tensors[owner]
        is_planned = not names.isdisjoint(component.names) and not isinstance(tensor, Weight) and tensor.numel()
        if is_planned and tensor.is_floating_point() and tensor.dim() >= 2:
            if tensor.is_meta:
                raise ArgumentError(
                    "is on meta, and has no values from which errors could be computed",
                    name=owner,
                    fix="Load it first.",
                )
            planned[owner] = tensor.detach()
        else:
            others += max(component.nbytes, tensor.nbytes if isinstance(tensor, Weight) else 0)
    if not planned and only is not None:
        raise RuleError(
            "selects no float weight of two or more dimensions", name="only", fix="Give globs of such weights."
        )
    if not planned:
        quantized = sum(isinstance(one, Weight) and not one.scheme.transparent for one in tensors.values())
        what = f"has no float weight of linear layers to plan ({quantized} parameters are quantized already)"
        raise RuleError(what, name="model", fix="Plan before it is quantized, or give only=.")
    moments = {} if inputs is None else _mean_squares(model, planned, inputs)
    options = {}
    with ticking(progress, sum(tensor.nbytes for tensor in planned.values()), "plan") as tick:
        for name, tensor in planned.items():
            options[name] = options_of(name, tensor, candidates, moments.get(name))
            tick(tensor.nbytes)
    elements = {name: tensor.numel() for name, tensor in planned.items()}
    if bytes is not None:
        budget = as_size(bytes, "bytes") - others
    else:
        if not isinstance(bits, (int, float)) or not 0 < bits < math.inf:
            raise ArgumentError(f"{bits!r:.40} is not a positive number", name="bits", fix="Give a number such as 4.5.")
        budget = int(bits * sum(elements.values()) / 8)
    asked = "bits" if bytes is None else "bytes"
    return QuantizePlan(allocate(options, budget, others, asked), elements, others)


def _candidates(schemes: Iterable[Scheme | str | None]) -> list[Scheme | None]:
    several: Iterable[Any] = schemes if isinstance(schemes, Iterable) and not isinstance(schemes, str) else [schemes]
    made = [None if scheme is None else resolved("schemes", scheme) for scheme in several]
    if not made:
        raise ArgumentError("the list of schemes is empty", name="schemes", fix="Give some, such as ['int8', 'int4'].")
    return made


def options_of(
    name: str, tensor: Tensor, candidates: Sequence[Scheme | None], moments: Tensor | None = None
) -> list[Option]:
    """Return an Option for each scheme that fits ``tensor`` (..., K); ``moments`` (K,) are weights of its columns.

    Raises SchemeError if none fits, or if values are not finite.
    """
    found: list[Option] = []
    refused = ""
    for scheme in candidates:
        try:
            error = 0.0 if scheme is None else relative_error(tensor, scheme, moments)
        except SchemeError as fault:
            if not bool(tensor.isfinite().all()):  # no scheme can hold it, and as it is it would seem exact
                raise fault.named(name) from None
            refused = fault.what
            continue
        nbytes = tensor.nbytes if scheme is None else scheme.nbytes(tuple(tensor.shape), tensor.dtype)
        found.append(Option(scheme, nbytes, error))
    if not found:
        raise SchemeError(f"no scheme fits it: {refused}", name=name, fix="Give others, or leave it out.")
    return found


def relative_error(tensor: Tensor, scheme: Scheme, moments: Tensor | None = None) -> float:
    """Return the squared error of ``tensor`` (..., K) in ``scheme`` as a fraction of its squared norm.

    Columns are weighted by ``moments`` (K,). Sums are float64.
    """
    values = tensor.detach().reshape(-1, tensor.shape[-1])
    parts = scheme.encode(tensor.detach())
    step = max(_CHUNK // max(values.shape[1], 1), 1)
    lost = whole = 0.0
    for start in range(0, values.shape[0], step):
        some = values[start : start + step].float()
        decoded = torch.empty_like(some)
        scheme.decode_into(parts, tuple(tensor.shape), start, start + some.shape[0], decoded)
        lost += _weighted(decoded.sub_(some), moments)
        whole += _weighted(some, moments)
    if not math.isfinite(whole):
        raise SchemeError("it holds values that are not finite", fix="Repair them, or leave it out.")
    return lost / whole if whole else 0.0


def _weighted(x: Tensor, moments: Tensor | None) -> float:
    squares = x.double().square_()
    return float((squares if moments is None else squares.mul_(moments)).sum())


def allocate(
    options: Mapping[str, Sequence[Option]], budget: int, others: int = 0, name: str = "size"
) -> dict[str, Option]:
    """Return one option for each name, of at most ``budget`` bytes in sum, with about the least sum of errors.

    Only options on the lower convex hull of (bytes, error) are chosen. Steps along the hulls are taken in the order of
    error saved per byte, which is optimal for the bytes that result. Raises ArgumentError about the argument ``name``
    if the smallest options exceed the budget.
    """
    hulls = {name: _hull(some) for name, some in options.items()}
    at = dict.fromkeys(hulls, 0)
    left = budget - sum(hull[0].nbytes for hull in hulls.values())
    if left < 0:
        least, asked = others + budget - left, others + budget
        raise ArgumentError(
            f"the smallest possible plan takes {least:,} bytes, more than {asked:,}",
            name=name,
            fix="Give more, or a scheme of fewer bits.",
        )
    heap = [(_slope(hull[0], hull[1]), i, name) for i, (name, hull) in enumerate(hulls.items()) if len(hull) > 1]
    heapq.heapify(heap)
    while heap:
        _, i, name = heapq.heappop(heap)
        hull, now = hulls[name], at[name]
        cost = hull[now + 1].nbytes - hull[now].nbytes
        if cost > left:
            continue  # later steps of this hull save less per byte; steps of other hulls may fit
        left, at[name] = left - cost, now + 1
        if now + 2 < len(hull):
            heapq.heappush(heap, (_slope(hull[now + 1], hull[now + 2]), i, name))
    return {name: hull[at[name]] for name, hull in hulls.items()}


def _hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull of (bytes, error), smallest first."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda one: (one.nbytes, one.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(a: Option, b: Option) -> float:
    """Return the change of the error per byte from ``a`` to ``b``; negative on a hull."""
    return (b.error - a.error) / (b.nbytes - a.nbytes)


def _mean_squares(model: nn.Module, planned: Mapping[str, Tensor], inputs: Iterable[Any]) -> dict[str, Tensor]:
    """Run the model on ``inputs``; return the mean square of each input column (K,) of each planned linear layer."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def listen(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].shape[-1] == planned[name].shape[-1]:
                x = args[0].detach().reshape(-1, args[0].shape[-1]).double()
                sums[name] = sums.get(name, 0) + x.square().sum(0)  # type: ignore[operator]
                counts[name] = counts.get(name, 0) + x.shape[0]

        return hook

    owners = {id(tensor): name for name, tensor in named_tensors(model).items() if name in planned}
    with ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and id(module.weight) in owners:
                stack.callback(module.register_forward_pre_hook(listen(owners[id(module.weight)])).remove)
        is_empty = True
        for batch in inputs:
            is_empty = False
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, (tuple, list)):
                model(*batch)
            else:
                model(batch)
    if is_empty:
        fix = "Give some; a generator can be used once only."
        raise ArgumentError("has no batches", name="inputs", fix=fix)
    for name, total in sums.items():
        if not bool(total.isfinite().all()):
            fix = "Give batches for which the model computes finite values."
            raise ArgumentError(f"the layer of {name} is given values that are not finite", name="inputs", fix=fix)
    return {name: total / counts[name] for name, total in sums.items() if counts[name]}
