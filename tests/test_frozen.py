"""Compatibility: public names and signatures, and the files and pickles in ``tests/frozen``, must stay valid.

``python -m tests.test_frozen`` rewrites ``tests/frozen`` after an intended change.
"""

import inspect
import io
import json
import pickle
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtether as tt
from torchtether import distributed

FOLDER = Path(__file__).with_name("frozen")
SCHEMES = {
    "int8": tt.int8(), "int4": tt.int4(group_size=32), "fp8": tt.fp8(), "nf4": tt.nf4(), "mxfp4": tt.mxfp4(),
    "nvfp4": tt.nvfp4(), "plain": tt.Plain(), "biased": tt.Biased(), "nested": tt.nf4(double_quant=True),
}  # fmt: skip
MAY_BE_NAMED = {"rebuild_weight", "rebuild_wrapper", "keep_policy"}
"""All that pickles of ours may name in ``torchtether``, so that no module of it can be moved under them."""


def values():
    return torch.arange(512.0).view(8, 64).sub(200) / 64


def weights():
    return {name: tt.Weight.encode(values(), scheme) for name, scheme in SCHEMES.items()}


def model():
    """A tied, quantized model with a plain tensor beside it."""
    made = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 8))
    with torch.no_grad():
        made[0].weight.copy_(values())
        made[1].bias.copy_(torch.arange(8.0))
    made[1].weight = made[0].weight
    return tt.quantize(made, {"0.weight": "int8"}).requires_grad_(False)


def check_model(found):
    assert found[0].weight is found[1].weight
    check_weight(found[0].weight, "int8")
    assert torch.equal(found[1].bias, torch.arange(8.0))


def check_weight(found, name):
    made = tt.Weight.encode(values(), SCHEMES[name])
    assert isinstance(found, tt.Weight)
    assert found.spec.replace(tie=None) == made.spec
    assert torch.equal(found.dequantize(), made.dequantize())


# -- signatures -------------------------------------------------------------------------------------------------------


def signature(function):
    """Names, kinds and defaults of parameters; annotations may become better."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [
        f"{one.kind.description}: {one.name}" + ("" if one.default is one.empty else f" = {_default(one.default)}")
        for one in parameters
    ]


def _default(value):
    return value.__name__ if isinstance(value, type) or inspect.isfunction(value) else repr(value)


def public():
    """Each public name with its signature; of our classes the public methods too."""
    found = {}
    for module, names in ((tt, tt.__all__), (distributed, distributed.__all__), (tt.testing, tt.testing.__all__)):
        for name in names:
            thing, full = getattr(module, name), f"{module.__name__}.{name}"
            if inspect.ismodule(thing):
                continue
            found[full] = signature(thing)
            if isinstance(thing, type):
                for leaf, method in _methods(thing).items():
                    if not leaf.startswith("_") and callable(method):
                        found[f"{full}.{leaf}"] = signature(method)
                    elif not leaf.startswith("_") and isinstance(method, (property, classmethod, staticmethod)):
                        found[f"{full}.{leaf}"] = type(method).__name__
    return found


def _methods(kind):
    """What a class defines, and what it has from bases of ours that are not public themselves."""
    bases = [base for base in kind.__mro__[1:] if base.__module__.startswith("torchtether.")]
    private = [base for base in bases if getattr(tt, base.__name__, None) is not base]
    return {leaf: method for base in (*reversed(private), kind) for leaf, method in vars(base).items()}


def test_public_names_and_signatures_are_those_that_are_written_down():
    known = json.loads((FOLDER / "public.json").read_text())
    now = public()
    assert sorted(now) == sorted(known)
    for name, one in now.items():
        assert one == known[name], name


# -- pickles and files ------------------------------------------------------------------------------------------------


def named_by(data):
    """The names in ``torchtether`` that a pickle looks up."""
    found, texts = set(), []
    for code, argument, _ in pickletools.genops(data):
        if code.name == "GLOBAL":
            found.add(tuple(argument.split(" ")))
        elif code.name == "STACK_GLOBAL":
            found.add(tuple(texts[-2:]))
        elif "UNICODE" in code.name:
            texts.append(argument)
    return {f"{module}.{name}" for module, name in found if module.partition(".")[0] == "torchtether"}


@pytest.mark.parametrize("make", [weights, model], ids=lambda make: make.__name__)
@pytest.mark.parametrize("protocol", [2, 5])
def test_pickles_name_nothing_but_what_stays(make, protocol):
    assert named_by(pickle.dumps(make(), protocol)) <= {f"torchtether.{name}" for name in MAY_BE_NAMED}
    saved = io.BytesIO()
    torch.save(make(), saved)
    with zipfile.ZipFile(saved) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        assert named_by(archive.read(entry)) <= {f"torchtether.{name}" for name in MAY_BE_NAMED}


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_of_then_are_read(name):
    check_weight(pickle.loads((FOLDER / "weights.pickle").read_bytes())[name], name)
    check_weight(torch.load(FOLDER / "weights.pt", weights_only=True)[name], name)
    with tt.open(FOLDER / "weights.pt") as checkpoint:
        if name != "plain":
            check_weight(checkpoint[name], name)


def test_a_model_of_then_is_read():
    check_model(pickle.loads((FOLDER / "model.pickle").read_bytes()))


@pytest.mark.parametrize("where", ["one.safetensors", "shards"])
def test_files_of_then_are_read(where):
    made = nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 8))
    made[1].weight = made[0].weight
    tt.load(made, FOLDER / where)
    check_model(made)
    with tt.open(FOLDER / where) as checkpoint:
        assert [tie.names for tie in checkpoint.ties] == [("0.weight", "1.weight")]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "public.json").write_text(json.dumps(public(), indent=1, sort_keys=True) + "\n")
    (FOLDER / "weights.pickle").write_bytes(pickle.dumps(weights(), 4))
    torch.save(weights(), FOLDER / "weights.pt")
    (FOLDER / "model.pickle").write_bytes(pickle.dumps(model(), 4))
    tt.save(model(), FOLDER / "one.safetensors")
    tt.save(model(), FOLDER / "shards", max_shard_size=256)
