"""The command ``torchtether``: inspect, verify, quantize and convert checkpoints without the model's code."""

from __future__ import annotations

import argparse
import inspect
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .._checks import as_size
from .._dtypes import dtype_from_name, dtype_name
from .._version import __version__
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..compiled import state
from ..errors import CheckpointError, TetherError
from ..formats import WRITABLE
from ..geometry.views import View
from ..pictures import storage_map
from ..pictures.drawing import clean, describe_bytes
from ..pictures.rows import counted
from ..schemes import NAMED, Plain, Scheme, scheme_from_text, scheme_to_text
from ..schemes.search import FITS
from .made import print_made, print_plan
from .tables import print_table
from .transform import convert_checkpoint, quantize_checkpoint, ties_of
from .verify import VerifyReport, verify_checkpoint

Verb = Callable[[argparse.Namespace], None]

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 for success, 1 after an error on stderr, 130 after an interrupt.

    A command line that argparse does not accept exits with 2.
    """
    _open_streams()
    parser = _parser()
    parsed = parser.parse_args(arguments)
    verb: Verb = parsed.verb
    if verb is _quantize and parsed.scheme is not None and parsed.target_size is not None:
        parser.error("quantize takes --scheme or --target-size, not both")
    if verb is _quantize and parsed.fit is not None and parsed.target_size is not None:
        parser.error("quantize takes --fit with --scheme or --rule, not with --target-size")
    is_asked = verb is not _quantize or parsed.scheme is not None or parsed.target_size is not None
    if not is_asked and (parsed.include or not parsed.rule):
        parser.error("quantize needs --scheme or --target-size, or --rule GLOB=SCHEME without --include")
    try:
        verb(parsed)
    except TetherError as error:
        said, options = str(error), ("format", "max_shard_size", "target_size")
        if error.name in options and getattr(parsed, error.name, None) not in (None, "native"):  # else a tensor
            said = f"--{error.name.replace('_', '-')}{said.removeprefix(error.name)}"
        print("\n".join(clean(line) for line in f"torchtether: {said}".split("\n")), file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has closed the pipe, as ``head`` does
        sys.stderr.close()
        return 1
    except OSError as error:  # a path that the system refuses, such as one that is too long
        print(clean(f"torchtether: {error.filename or 'the system'}: {error.strerror or error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("torchtether: interrupted", file=sys.stderr)
        return 130
    return 0


def _open_streams() -> None:
    """Open a standard stream that is closed on the null device, and have stdout escape what its encoding lacks.

    The next file would get the number of the closed stream otherwise, and messages of libraries would be written to it.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtether", description="Checkpoints that remember ties and quantization.", epilog=_CODES
    )
    version = f"torchtether {__version__}, torch {torch.__version__}, {state()}"
    parser.add_argument("--version", action="version", version=version)
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, verb: Verb, help: str, *paths: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help, description=help, epilog=_CODES)
        made.set_defaults(verb=verb)
        for path in paths:
            made.add_argument(path, help=_PATHS[path])
        return made

    inspect = add("inspect", _inspect, "list the tensors of a checkpoint, without reading their values", "path")
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add("ties", _ties, "list the names of a checkpoint that are one tensor, as a tree", "path")
    mapped = add("map", _map, "show the storages of a checkpoint and the tensors in each, as text or a page", "path")
    mapped.add_argument("--html", type=Path, metavar="OUT", help="write one self-contained HTML page")
    mapped.add_argument("--svg", type=Path, metavar="OUT", help="write the picture as SVG")
    mapped.add_argument(
        "--against", metavar="SRC", help="print the differences from this checkpoint; --html draws them"
    )
    mapped.add_argument("--all", action="store_true", help="show all tensors, even if there are many")
    verify = add("verify", _verify, "check every byte and every record of a checkpoint", "path")
    verify.add_argument("--against", metavar="SRC", help="compare every tensor with this checkpoint's")
    quantize = add("quantize", _quantize, "write a quantized copy of a float checkpoint", "source", "target")
    quantize.epilog = f"{_SCHEMES}\n\n{_CODES}"
    quantize.formatter_class = argparse.RawDescriptionHelpFormatter
    quantize.add_argument(
        "--scheme", type=_scheme, help="scheme of tensors that no rule matches, such as int8 or 'int4(group_size=64)'"
    )
    quantize.add_argument(
        "--fit",
        choices=FITS,
        help="how scales are computed: from the range of each block (range), or by least squares (mse)",
    )
    quantize.add_argument(
        "--target-size",
        type=_size,
        metavar="SIZE",
        help="instead of --scheme: choose one for each tensor, with the least error in SIZE (such as 4GB) altogether",
    )
    globs: dict[str, Any] = {"action": "append", "default": [], "metavar": "GLOB"}
    quantize.add_argument(
        "--rule",
        **globs | {"type": _rule, "metavar": "GLOB=SCHEME"},
        help="the scheme of tensors that GLOB matches, or none to leave them as they are; the first match wins",
    )
    quantize.add_argument(
        "--include", **globs, help="tensors that --scheme or --target-size applies to, instead of linear layers"
    )
    quantize.add_argument("--exclude", **globs, help="tensors to leave as they are, whatever else matches")
    convert = add(
        "convert", _convert, "write a copy in another format, dtype or shards, or with aliases", "source", "target"
    )
    convert.add_argument("--dtype", choices=_DTYPES, help="the dtype of all floats; codes of quantized weights stay")
    convert.add_argument(
        "--aliases", choices=("drop", "copy"), default="drop", help="whether tied tensors are stored once (drop)"
    )
    convert.add_argument(
        "--requantize",
        type=_scheme,
        metavar="SCHEME",
        help="encode weights again in SCHEME if --format cannot store theirs; without it they are an error",
    )
    convert.add_argument("--dequantize", **globs, help="weights to decode and store as floats")
    for verb in (quantize, convert):
        verb.add_argument(
            "--format",
            default="native",
            help=f"the format of quantized weights: {', '.join(f.name for f in WRITABLE)}",
        )
        verb.add_argument(
            "--max-shard-size", type=_size, metavar="SIZE", help="the largest size of a shard, such as 5GB"
        )
    add("demo", _demo, "load, train, convert and save a small tied model, and compare with stock torch")
    return parser


_CODES = "Exit codes: 0 success; 1 an error, described by one line on stderr; 2 invalid arguments; 130 interrupted."


def _described_schemes() -> str:
    """Return the help text that lists every scheme with its options and their defaults."""
    lines = []
    for name, make in NAMED.items():
        options = (
            f"{one.name}={dtype_name(one.default) if isinstance(one.default, torch.dtype) else one.default}"
            for one in inspect.signature(make).parameters.values()
        )
        lines.append(f"  {name}({', '.join(options)})")
    lines.append("  Affine, Biased, Codebook, ColumnScaled, ScaledFloat, SuperBlocks as in Python: 'Affine(bits=6)'")
    return "Schemes, with their options and defaults (quote the brackets for the shell):\n" + "\n".join(lines)


_SCHEMES = _described_schemes()


def _scheme(text: str) -> Scheme:
    try:
        return scheme_from_text(text)
    except TetherError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    try:
        return as_size(text, "")
    except TetherError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rule(text: str) -> tuple[str, Scheme | None]:
    """Parse ``GLOB=SCHEME`` at the first ``=``, because the options of a scheme contain ``=`` too."""
    glob, equals, scheme = text.partition("=")
    if not glob or not equals or not scheme:
        raise argparse.ArgumentTypeError(f"{text!r} is not GLOB=SCHEME, such as 'lm_head.*=none'")
    return glob, None if scheme.strip().lower() == "none" else _scheme(scheme)


_SOURCE = (
    "a file (.safetensors, .gguf, or of torch.save), a folder of such files, an index, a DCP folder, or "
    "org/name[@revision] or hf://org/name[@revision]/path on the Hugging Face Hub"
)
_PATHS = {
    "path": _SOURCE,
    "source": _SOURCE,
    "target": "a folder that is new or empty, or a new .safetensors file; with --format gguf a new .gguf file",
}


# -- reading ----------------------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> None:
    with open_checkpoint(arguments.path) as checkpoint:
        if arguments.json:
            print(json.dumps(_facts(checkpoint), indent=2, sort_keys=True))
        else:
            _show(checkpoint)


def _show(checkpoint: Checkpoint) -> None:
    rows = [("name", "dtype", "shape", "bytes", "kind")]
    for name in checkpoint:
        spec = checkpoint.spec(name)
        nbytes = describe_bytes(checkpoint.nbytes(name)) if name in checkpoint.entries else ""
        shape = " x ".join(map(str, spec.shape)) or "()"
        rows.append((name, dtype_name(spec.dtype), shape, nbytes, _kind(checkpoint, name)))
    print_table(rows)
    print("")
    _show_ties(checkpoint)
    for scheme, (count, size) in _totals(checkpoint).items():
        print(f"{scheme}: {counted(count, 'tensor')}, {describe_bytes(size)}")
    for name, what in checkpoint.faults.items():
        print(clean(f"fault: {name}: {what}"))
    files = len(checkpoint.store.files)
    total = sum(checkpoint.nbytes(name) for name in checkpoint.entries)
    print(
        f"{counted(len(checkpoint), 'tensor')}, {describe_bytes(total)} in {counted(files, 'file')}, "
        f"format {checkpoint.format}, {counted(len(checkpoint.ties), 'tie')}"
    )


def _ties(arguments: argparse.Namespace) -> None:
    with open_checkpoint(arguments.path) as checkpoint:
        _show_ties(checkpoint)
        print(counted(len(ties_of(checkpoint)), "tie"))


def _show_ties(checkpoint: Checkpoint) -> None:
    for owner, tie in ties_of(checkpoint).items():
        print(clean(owner))
        for i, (alias, view) in enumerate(zip(tie.aliases, tie.views[1:], strict=True), 1):
            print(f"{'└──' if i == len(tie.aliases) else '├──'} {clean(alias)}{_geometry(view)}")


def _geometry(view: View | None) -> str:
    return "" if view is None else f" (view {list(view.size)}, stride {list(view.stride)}, offset {view.offset})"


def _map(arguments: argparse.Namespace) -> None:
    made = storage_map(arguments.path)
    limit = None if arguments.all else 300
    if arguments.svg:
        made.to_svg(arguments.svg, limit=limit)
    if arguments.against:
        diff = made.diff(storage_map(arguments.against))
        if arguments.html:
            diff.to_html(arguments.html, limit=limit)
        print(diff)
        return
    if arguments.html:
        made.to_html(arguments.html, limit=limit)
    width = shutil.get_terminal_size((160, 24)).columns
    print(made.to_text(limit=None if arguments.all else 40, width=width))


def _kind(checkpoint: Checkpoint, name: str) -> str:
    owner, view = checkpoint.find(name)
    if owner == name:
        scheme = checkpoint.spec(name).scheme
        return "" if isinstance(scheme, Plain) else scheme_to_text(scheme)
    return f"= {owner}" if view is None else f"= {owner} (view, stride {list(view.stride)}, offset {view.offset})"


def _totals(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Return the number of tensors and bytes by scheme, or by dtype for plain tensors."""
    found: dict[str, tuple[int, int]] = {}
    for name in checkpoint.entries:
        spec = checkpoint.spec(name)
        scheme = dtype_name(spec.dtype) if isinstance(spec.scheme, Plain) else scheme_to_text(spec.scheme)
        count, nbytes = found.get(scheme, (0, 0))
        found[scheme] = (count + 1, nbytes + checkpoint.nbytes(name))
    return dict(sorted(found.items(), key=lambda item: (-item[1][1], item[0])))


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the object that ``inspect --json`` prints. Keys stay from release to release; new ones may be added."""
    tensors = {}
    for name in checkpoint:
        (owner, view), spec = checkpoint.find(name), checkpoint.spec(name)
        tensors[name] = {
            "dtype": dtype_name(spec.dtype),
            "shape": list(spec.shape),
            "stride": list(spec.stride),
            "bytes": checkpoint.nbytes(name) if owner == name else 0,
            "scheme": None if isinstance(spec.scheme, Plain) else spec.scheme.to_json(),
            "owner": owner,
            "view": view and view.to_json(),
        }
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "files": [file.path.name for file in checkpoint.store.files],
        "bytes": sum(checkpoint.nbytes(name) for name in checkpoint.entries),
        "tensors": tensors,
        "ties": [tie.to_json() for tie in ties_of(checkpoint).values()],
        "faults": dict(checkpoint.faults),
        "schemes": {
            scheme: {"tensors": count, "bytes": nbytes} for scheme, (count, nbytes) in _totals(checkpoint).items()
        },
    }


def _verify(arguments: argparse.Namespace) -> None:
    report = verify_checkpoint(arguments.path, against=arguments.against, progress=sys.stderr.isatty())
    if report.differences:
        _show_differences(report)
    if report.faults:
        more = f" | and {len(report.faults) - 1} more" if len(report.faults) > 1 else ""
        raise CheckpointError(f"{report.faults[0]}{more}", name=str(arguments.path))
    count, stored = report.without_checksum, report.stored
    without = f"; {count} of {stored} stored tensors have no checksum" if count else ""
    print(f"{counted(report.tensors, 'tensor')}, {describe_bytes(report.bytes)}: nothing wrong{without}")


def _show_differences(report: VerifyReport) -> None:
    rows = [("name", "max abs error", "SQNR dB", "scheme")]
    rows += [(one.name, f"{one.largest:.3g}", f"{one.sqnr:.1f}", one.scheme) for one in report.differences]
    print_table(rows)


# -- writing ----------------------------------------------------------------------------------------------------------


def _quantize(arguments: argparse.Namespace) -> None:
    rules = dict(reversed(arguments.rule))  # if two rules have the same glob, the first wins
    report = quantize_checkpoint(
        arguments.source,
        arguments.target,
        arguments.scheme,
        rules={glob: rules[glob] for glob, _ in arguments.rule},
        fit=arguments.fit,
        include=arguments.include,
        exclude=arguments.exclude,
        format=arguments.format,
        max_shard_size=arguments.max_shard_size,
        progress=sys.stderr.isatty(),
        target_size=arguments.target_size,
        show=print_plan,
    )
    print_made(arguments.target, report, is_quantized=True)


def _convert(arguments: argparse.Namespace) -> None:
    report = convert_checkpoint(
        arguments.source,
        arguments.target,
        dtype=None if arguments.dtype is None else dtype_from_name(arguments.dtype),
        format=arguments.format,
        requantize=arguments.requantize,
        dequantize=arguments.dequantize,
        aliases=arguments.aliases,
        max_shard_size=arguments.max_shard_size,
        progress=sys.stderr.isatty(),
    )
    print_made(arguments.target, report)


def _demo(arguments: argparse.Namespace) -> None:
    from .demonstration import run_demo

    run_demo()


if __name__ == "__main__":
    sys.exit(main())
