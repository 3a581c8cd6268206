"""The command line: ``torchtether inspect PATH`` and ``torchtether demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .checkpoint import Checkpoint, open_checkpoint
from .errors import TetherError
from .report import said_bytes
from .schemes import Plain, dtype_name

Verb = Callable[[argparse.Namespace], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. 0: done; 1: it could not be done, and one line on stderr says why; 2: it was not understood."""
    parsed = _parser().parse_args(arguments)
    verb: Verb = parsed.verb
    try:
        verb(parsed)
    except TetherError as error:
        print(f"torchtether: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads our output has seen enough
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("torchtether: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchtether", description="Checkpoints that remember ties and quantization.")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = verbs.add_parser("inspect", help="what a checkpoint holds, without reading the tensors")
    inspect.add_argument("path", type=Path, help="a safetensors file, a folder of them, or an index")
    inspect.set_defaults(verb=_inspect)
    demo = verbs.add_parser("demo", help="load, train, convert and save a small tied model, beside stock torch")
    demo.set_defaults(verb=_demo)
    return parser


def _inspect(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    with open_checkpoint(arguments.path) as checkpoint:
        console = Console()
        if not console.is_terminal:
            console.width = 200  # names must not be cut in a file or a pipe
        table = Table("name", "dtype", "shape", "bytes", "kind", box=None, pad_edge=False)
        total = 0
        for name in checkpoint:
            nbytes = checkpoint.nbytes(name) if name in checkpoint.entries else 0
            total += nbytes
            spec = checkpoint.spec(name)
            shape = " x ".join(map(str, spec.shape)) or "()"
            table.add_row(
                name, dtype_name(spec.dtype), shape, said_bytes(nbytes) if nbytes else "", _kind(checkpoint, name)
            )
        console.print(table)
        files = len(checkpoint.store.files)
        console.print(
            f"{len(checkpoint)} tensors, {said_bytes(total)} in {files} file{'s' * (files > 1)}, "
            f"format {checkpoint.format}, {len(checkpoint.ties)} ties",
            highlight=False,
        )


def _kind(checkpoint: Checkpoint, name: str) -> str:
    owner, view = checkpoint.find(name)
    if owner == name:
        scheme = checkpoint.spec(name).scheme
        return "" if isinstance(scheme, Plain) else str(scheme)
    return f"= {owner}" if view is None else f"= {owner} (view, stride {list(view.stride)}, offset {view.offset})"


def _demo(arguments: argparse.Namespace) -> None:
    from .demo import run_demo

    run_demo()


if __name__ == "__main__":
    sys.exit(main())
