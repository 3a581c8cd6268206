"""What survives in which library: each cell of the table in the guide ``laws.md`` is a function here.

python -m tests.peers.promises
"""

import copy
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import torchtether as tt

PARTIES = ("torch", "safetensors", "transformers", "accelerate", "torchao", "optimum-quanto", "torchtether")
ROWS = {
    "tie": "loaded into a model on `meta`, tied weights are one Parameter",
    "optimizer": "an optimizer built before that load trains the model",
    "views": "a transposed view shares memory with its owner after save and load",
    "once": "a tied tensor is stored once",
    "quantized tie": "quantizing keeps tied weights one Parameter",
    "quantized optimizer": "an optimizer built before quantizing holds the model's parameters",
    "stays quantized": "a float checkpoint loaded with `assign=True` leaves a quantized model quantized",
}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(256, 64), nn.Linear(64, 256, bias=False)
        self.head.weight = self.emb.weight


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64))
        self.turned = nn.Parameter(self.weight.detach().t())


def on_meta(make=Tied):
    with torch.device("meta"):
        model = make()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def holds(model, optimizer):
    """Whether every parameter of the model is one that the optimizer steps."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return all(id(p) in stepped and not p.is_meta for p in model.parameters())


def is_tied(model):
    return model.head.weight is model.emb.weight and not model.emb.weight.is_meta


# -- save a model, load it into one on meta: as each party's own documentation does -----------------------------------


def _torch(source, model, folder):
    torch.save(source.state_dict(), folder / "x.pt")
    model.load_state_dict(torch.load(folder / "x.pt"), assign=True)


def _safetensors(source, model, folder):
    from safetensors.torch import load_file, save_model

    save_model(source, folder / "x.safetensors")
    model.load_state_dict(load_file(folder / "x.safetensors"), assign=True, strict=False)


def _accelerate(source, model, folder):
    import accelerate

    accelerate.Accelerator(cpu=True).save_model(source, folder)
    accelerate.load_checkpoint_in_model(model, folder, device_map={"": "cpu"})


def _torchtether(source, model, folder):
    tt.save(source, folder / "x.safetensors")
    tt.load(model, folder / "x.safetensors")


LOADERS = {"torch": _torch, "safetensors": _safetensors, "accelerate": _accelerate, "torchtether": _torchtether}


def tie(party, folder):
    model, _ = on_meta()
    LOADERS[party](Tied(), model, folder)
    return is_tied(model)


def optimizer(party, folder):
    model, held = on_meta()
    LOADERS[party](Tied(), model, folder)
    return holds(model, held)


def views(party, folder):
    source = Turned()
    model, _ = on_meta(Turned)
    LOADERS[party](source, model, folder)
    with torch.no_grad():
        model.weight.zero_()
    return not model.turned.is_meta and bool((model.turned == 0).all())


def once(party, folder):
    model, source = on_meta()[0], Tied()
    LOADERS[party](source, model, folder)
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return stored < 1.5 * source.emb.weight.nbytes


# -- transformers makes its models itself ------------------------------------------------------------------------------


def _llama():
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=2048, tie_word_embeddings=True, num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config)


def transformers_tie(folder):
    source = _llama()
    source.save_pretrained(folder)
    model = type(source).from_pretrained(folder)
    return model.lm_head.weight is model.model.embed_tokens.weight


def transformers_once(folder):
    source = _llama()
    source.save_pretrained(folder)
    stored = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    return stored < sum(p.nbytes for p in source.parameters()) + 0.5 * source.lm_head.weight.nbytes


# -- quantizing --------------------------------------------------------------------------------------------------------


def _torchao_quantize(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(
        model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: isinstance(module, (nn.Linear, nn.Embedding))
    )


def _quanto_quantize(model):
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8)
    freeze(model)


QUANTIZERS = {
    "torchao": _torchao_quantize,
    "optimum-quanto": _quanto_quantize,
    "torchtether": lambda model: tt.quantize(model, "int8"),
}


def quantized_tie(party, folder):
    model = Tied()
    QUANTIZERS[party](model)
    return is_tied(model)


def quantized_optimizer(party, folder):
    model = Tied()
    held = torch.optim.SGD(model.parameters(), lr=1.0)
    QUANTIZERS[party](model)
    return holds(model, held)


def stays_quantized(party, folder):
    model = nn.Sequential(nn.Linear(64, 64))
    values = copy.deepcopy(model.state_dict())
    QUANTIZERS[party](model)
    before = type(model[0].weight)
    model.load_state_dict(values, assign=True, strict=False)
    return type(model[0].weight) is before


CELLS = {
    "tie": tie,
    "optimizer": optimizer,
    "views": views,
    "once": once,
    "quantized tie": quantized_tie,
    "quantized optimizer": quantized_optimizer,
    "stays quantized": stays_quantized,
}
OF_TRANSFORMERS = {"tie": transformers_tie, "once": transformers_once}


def cell(row, party):
    """``"yes"``, ``"no"``, ``"raises"``, or ``"-"`` where the party does nothing of the kind."""
    known = QUANTIZERS if "quantized" in row else LOADERS
    if (party != "transformers" and party not in known) or (party == "transformers" and row not in OF_TRANSFORMERS):
        return "-"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = OF_TRANSFORMERS[row](Path(folder)) if party == "transformers" else CELLS[row](party, Path(folder))
        except Exception:  # whatever it is, it is no silence
            return "raises"
    return "yes" if found else "no"


def table():
    """The table of the guide, as markdown."""
    lines = ["| | " + " | ".join(PARTIES) + " |", "|---|" + "---|" * len(PARTIES)]
    lines += [f"| {text} | " + " | ".join(cell(row, party) for party in PARTIES) + " |" for row, text in ROWS.items()]
    return "\n".join(lines)


def versions():
    return ", ".join(f"{party} {version(party).partition('+')[0]}" for party in PARTIES[:-1])


if __name__ == "__main__":
    print(f"{table()}\n\n{versions()}")
