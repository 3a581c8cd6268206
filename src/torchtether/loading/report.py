"""The report of a load: text, numbers and a picture; and the error that lists the faults of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike

from .._checks import describe_some
from ..errors import LoadError
from ..pictures.drawing import describe_bytes, draw_timeline
from ..pictures.storage_map import written
from ..progress import Sample
from ..weights.spec import Tie
from .steps import describe_left

_SHOWN = 12
"""The most faults that one error lists."""


def raise_faults(faults: Sequence[str], name: str, where: str, done: str = "") -> None:
    """Raise LoadError about ``name`` if there are ``faults``; ``where`` tells where to find all of them, if not shown.

    ``done`` tells the user which changes took place in spite of the faults.
    """
    if not faults:
        return
    more = f" | and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    count = "" if len(faults) == 1 else f"{len(faults)} faults: "
    fix = " ".join(one for one in (done, "" if len(faults) <= _SHOWN else where) if one)
    error = LoadError(f"{count}{' | '.join(faults[:_SHOWN])}{more}", name=name, fix=fix)
    error.faults = tuple(faults)
    try:
        raise error
    finally:
        del error  # else its traceback and this frame would keep the caller's model until a garbage collection


@dataclass(frozen=True)
class LoadReport:
    """Report the results of a load. ``missing_keys`` and ``unexpected_keys`` are those of torch; empty if ``strict``.

    ``unexpected_keys`` also names non-persistent buffers that the file stores and the model computes itself.

    >>> print(LoadReport(missing_keys=("head.weight",), tensors=3, bytes=5_000_000, seconds=0.5))
    3 tensors, 5 MB in 0.50 s; missing: head.weight
    """

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()
    tied: tuple[Tie, ...] = ()
    quantized: Mapping[str, str] = field(default_factory=dict)
    on_meta: tuple[str, ...] = ()
    """Names of tensors still on ``meta``, because the checkpoint lacks them, or ``only`` left them out."""
    tensors: int = 0
    bytes: int = 0
    """Bytes read from the files; real tensors to be encoded count twice, because a first pass checks their values."""
    mapped: int = 0
    """Bytes of parameters that were not read, but mapped to private pages of the files, read at first use."""
    seconds: float = 0.0
    peak: int | None = None
    """Peak of anonymous memory, above the amount before the load; ``None`` if the system does not report it."""
    mapped_peak: int | None = None
    """Peak of resident pages of mapped files, above the amount before; the system can drop such pages."""
    encoder: str = ""
    """Encoder of the weights: ``compiled``, or ``torch ops`` and the reason; empty if nothing was encoded."""
    timeline: tuple[Sample, ...] = field(default=(), repr=False, compare=False)
    """Memory over time, above the amount before: a few hundred samples, however long the load took."""
    floats: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each matrix that stayed float, and that a rule could select, largest first, if ``quantize`` is set."""

    def __str__(self) -> str:
        words = [f"{self.tensors} tensors, {describe_bytes(self.bytes)} in {self.seconds:.2f} s"]
        if self.mapped:
            words.append(f"{describe_bytes(self.mapped)} mapped")
        if self.peak is not None:
            mapped = "" if self.mapped_peak is None else f" (mapped {describe_bytes(self.mapped_peak)})"
            words.append(f"peak {describe_bytes(self.peak)}{mapped}")
        if self.quantized:
            words.append(f"{len(self.quantized)} quantized" + (f" by {self.encoder}" if self.encoder else ""))
        if self.floats:
            words.append(describe_left(self.floats))
        if self.tied:
            words.append("tied: " + ", ".join(map(str, self.tied[:4])) + ("" if len(self.tied) < 5 else ", ..."))
        for what, names in (
            ("missing", self.missing_keys),
            ("unexpected", self.unexpected_keys),
            ("still on meta", self.on_meta),
        ):
            if names:
                words.append(f"{what}: {describe_some(names)}")
        return "; ".join(words)

    def to_svg(self, path: str | PathLike[str] | None = None) -> str:
        """Return an SVG document of memory over the time of the load; write it to ``path``, too, if given.

        Without a timeline (the system does not report memory) the picture is an empty frame. Raises CheckpointError if
        ``path`` cannot be written.
        """
        curves = (
            ("anonymous memory", "parameter", [sample.anonymous for sample in self.timeline]),
            ("pages of mapped files", "second", [sample.mapped for sample in self.timeline]),
        )
        title = f"{self.tensors} tensors, {describe_bytes(self.bytes)} in {self.seconds:.2f} s"
        return written(draw_timeline([sample.seconds for sample in self.timeline], curves, title, describe_bytes), path)
