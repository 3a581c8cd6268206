"""Run the same job with torchtether and with stock torch on a small model: ``torchtether demo``.

Each column of the table is measured in its own process, so that the memory of one does not count for the other.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import compiled
from .._dtypes import dtype_name
from ..checkpoint.reader import Checkpoint
from ..checkpoint.saver import save
from ..exchange.scope import swapping
from ..loading.plan import load
from ..pictures.drawing import describe_bytes
from ..progress import Meter
from ..ties.names import named_tensors
from ..ties.records import find_ties
from ..weights.weight import Weight
from .tables import print_wrapped

VOCABULARY, WIDTH, DEPTH, HEADS = 16_384, 512, 6, 8

Column = dict[str, str]


class TransformerBlock(nn.Module):
    """Apply attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Predict tokens with a small language model whose head is tied to its embedding."""

    def __init__(
        self, vocabulary: int = VOCABULARY, width: int = WIDTH, depth: int = DEPTH, heads: int = HEADS
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens) * self.emb.embedding_dim**-0.5
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def run_demo() -> None:
    """Print, side by side, the results of the same job with stock torch and with torchtether."""
    with tempfile.TemporaryDirectory(prefix="torchtether-demo-") as name:
        folder = Path(name)
        torch.manual_seed(0)
        source = Transformer()
        save(source, folder / "source", max_shard_size="32MB", progress=sys.stderr.isatty())
        count = len(list((folder / "source").glob("*.safetensors")))
        size = sum(tensor.nbytes for tensor in source.parameters())
        print(
            f"A transformer of {size // 4 / 1e6:.0f} M parameters, its head tied to its embedding:\n"
            f"{describe_bytes(size)} in {count} shards. It is built on meta, with an AdamW that exists before the\n"
            "weights do; then loaded (ours: int8 on the way in), one training step,\n"
            ".bfloat16(), save, reload.\n"
        )
        columns = [_in_own_process(side, folder) for side in (run_stock, run_ours)]
    rows = [("", "stock torch " + torch.__version__.partition("+")[0], "torchtether")]
    rows += [(key, columns[0].get(key, ""), columns[1].get(key, "")) for key in columns[0] | columns[1]]
    print_wrapped(rows)


def _in_own_process(side: Callable[[Path], Column], folder: Path) -> Column:
    """Run one column in a new process. It ignores Ctrl-C; this process handles it and ends the other."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_and_send, args=(side, folder, sender))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a new process inherits this
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    sender.close()
    try:
        column: Column = receiver.recv()
        return column
    finally:
        process.terminate()
        process.join()


def _run_and_send(side: Callable[[Path], Column], folder: Path, sender: Connection) -> None:
    sender.send(side(folder))


# -- the two columns --------------------------------------------------------------------------------------------------


def run_stock(folder: Path) -> Column:
    """Run the job with stock torch: ``load_state_dict(assign=True)`` and the manual steps that it needs."""
    from safetensors.torch import load_file, load_model, save_model

    column: Column = {}
    model, optimizer = _built()
    before = dict(model.named_parameters(remove_duplicate=False))
    with Meter() as meter:
        state = {
            k: v for shard in sorted((folder / "source").glob("*.safetensors")) for k, v in load_file(shard).items()
        }
        model.load_state_dict(state, assign=True, strict=False)
        del state
        _touch(model)
    _describe_load(column, model, optimizer, before, meter)
    try:
        _train(model, optimizer)
        column["training step"] = "runs"
    except Exception as error:
        column["training step"] = f"{type(error).__name__}; runs after head.weight = emb.weight by hand"
        model.head.weight = model.emb.weight
    column["... changes"] = _changes(model, optimizer)
    before = dict(model.named_parameters(remove_duplicate=False))
    model.bfloat16()
    _describe_conversion(column, model, optimizer, before)
    path = folder / "stock.safetensors"
    save_model(model, str(path))
    again = Transformer().bfloat16()
    load_model(again, str(path))
    column["file"] = f"{describe_bytes(path.stat().st_size)} (save_model: ties known to the model's code only)"
    column["read without the model"] = _read_without_model(path)
    column["reloaded"] = _compare(model, again)
    return column


def run_ours(folder: Path) -> Column:
    """Run the job with torchtether."""
    column: Column = {}
    model, optimizer = _built()
    before = dict(model.named_parameters(remove_duplicate=False))
    with Meter() as meter:
        rules = {"blocks.*.norm?.weight": None, "blocks.*.weight": "int8"}
        load(model, folder / "source", quantize=rules, progress=sys.stderr.isatty())
    _describe_load(column, model, optimizer, before, meter)
    _train(model, optimizer)
    column["training step"] = "runs"
    column["... changes"] = _changes(model, optimizer)
    before = dict(model.named_parameters(remove_duplicate=False))
    with swapping(model, optimizer=optimizer):
        model.bfloat16()
    _describe_conversion(column, model, optimizer, before)
    path = folder / "ours.safetensors"
    save(model, path, progress=sys.stderr.isatty())
    with torch.device("meta"):
        again = Transformer()
    load(again, path)
    column["file"] = f"{describe_bytes(path.stat().st_size)} (ties and schemes in its record)"
    column["read without the model"] = _read_without_model(path)
    column["reloaded"] = _compare(model, again)
    column["computed by"] = compiled.state()
    return column


def _built() -> tuple[Transformer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _touch(model: nn.Module) -> None:
    """Copy every parameter into memory of its own: the mapped pages of a file do not count as such."""
    for tensor in model.parameters():
        if not tensor.is_meta:
            tensor.data = tensor.data.clone()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    optimizer.zero_grad()
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    optimizer.step()


def _changes(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return how many parameters another training step changes, as text."""
    before = {name: _values(tensor).clone() for name, tensor in model.named_parameters()}
    _train(model, optimizer)
    moved = sum(not torch.equal(_values(tensor), before[name]) for name, tensor in model.named_parameters())
    return f"{moved} of {len(before)} parameters"


# -- the rows of a column ---------------------------------------------------------------------------------------------


def _describe_load(
    column: Column, model: nn.Module, optimizer: torch.optim.Optimizer, before: dict[str, Any], meter: Meter
) -> None:
    on_meta = [name for name, tensor in named_tensors(model).items() if tensor.is_meta]
    held = {name: tensor for name, tensor in named_tensors(model).items() if not tensor.is_meta}
    schemes = sum(isinstance(tensor, Weight) for tensor in held.values())
    once = {id(tensor): tensor for tensor in held.values()}.values()
    column["after loading: tie"] = _tie(model) + (f"; left on meta: {', '.join(on_meta)}" if on_meta else "")
    column["Parameter objects kept"] = _kept(model, before)
    column["optimizer holds"] = _live(model, optimizer)
    column["weights"] = (
        f"{describe_bytes(sum(t.nbytes for t in once))}, {schemes} of them int8"
        if schemes
        else (f"{describe_bytes(sum(t.nbytes for t in once))}, float32")
    )
    column["peak while loading"] = "unknown" if meter.peak is None else describe_bytes(meter.peak)
    column["seconds"] = f"{meter.seconds:.2f}"


def _describe_conversion(
    column: Column, model: nn.Module, optimizer: torch.optim.Optimizer, before: dict[str, Any]
) -> None:
    dtypes = {dtype_name(t.dtype) for t in model.parameters()}
    states = {dtype_name(s["exp_avg"].dtype) for s in optimizer.state.values() if "exp_avg" in s}
    column["after .bfloat16(): dtype"] = ", ".join(sorted(dtypes))
    column["optimizer state"] = ", ".join(sorted(states)) or "none"
    column["tie, objects, optimizer"] = f"{_tie(model)}; {_kept(model, before)}; {_live(model, optimizer)}"
    try:
        _train(model, optimizer)
        column["next step"] = "runs"
    except Exception as error:
        column["next step"] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"


def _tie(model: nn.Module) -> str:
    return "kept" if any("head.weight" in tie.names for tie in find_ties(model)) else "lost"


def _kept(model: nn.Module, before: dict[str, Any]) -> str:
    now = dict(model.named_parameters(remove_duplicate=False))
    return f"{sum(now[name] is tensor for name, tensor in before.items())} of {len(before)}"


def _live(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    now = [id(tensor) for tensor in model.parameters()]
    return f"{sum(key in held for key in now)} of {len(now)} parameters"


def _read_without_model(path: Path) -> str:
    with Checkpoint(path) as checkpoint:
        if "head.weight" not in checkpoint:
            return "head.weight is absent"
        shared = checkpoint["head.weight"].data_ptr() == checkpoint["emb.weight"].data_ptr()
        return "head.weight is emb.weight" if shared else "head.weight is a copy"


def _compare(model: nn.Module, again: nn.Module) -> str:
    theirs = named_tensors(again)
    equal = all(torch.equal(_values(tensor), _values(theirs[name])) for name, tensor in named_tensors(model).items())
    kinds = all(type(tensor) is type(theirs[name]) for name, tensor in named_tensors(model).items())
    return f"values {'equal' if equal and kinds else 'DIFFER'}, tie {_tie(again)}"


def _values(tensor: Tensor) -> Tensor:
    return (tensor.dequantize() if isinstance(tensor, Weight) else tensor).detach()
