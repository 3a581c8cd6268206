"""A user's own format, written as the README says: once registered, every function reads and writes it."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import torchtether as tt
from torchtether import formats
from torchtether.cli.main import main
from torchtether.formats import Entry, Found

SCHEME = tt.int8()


def _recognise(contents):
    """``m.weight_q`` (N, K) int8 and ``m.weight_s`` (N,) float32."""
    if contents.method != "acme":
        return None
    found = Found()
    for name in sorted({key[:-2] for key in contents.tensors if key[-2:] in ("_q", "_s")}):
        keys = {role: f"{name}_{role}" for role in "qs" if f"{name}_{role}" in contents.tensors}
        codes, scale = (contents.tensors.get(f"{name}_{role}") for role in "qs")
        if codes is None or scale is None:
            found.fault(name, "half of it is absent", keys)
        elif codes.dtype != torch.int8 or scale.dtype != torch.float32 or scale.shape != codes.shape[:1]:
            found.fault(name, f"its codes are {codes}, its scale {scale}", keys)
        elif len(codes.shape) != 2:
            found.fault(name, f"has shape {codes.shape}, not two positive integers", keys)
        else:
            found.weights[name] = Entry.of(keys, tt.WeightSpec.of(codes.shape, contents.dtype, SCHEME))
    return found


def _layout(name, spec):
    if spec.scheme != SCHEME or len(spec.shape) != 2:
        raise tt.SchemeError(f"acme has no words for {spec.scheme}", name=name, fix="Use tt.int8().")
    return {f"{name}_q": (torch.int8, spec.shape), f"{name}_s": (torch.float32, spec.shape[:1])}


def _pack(name, weight):
    _layout(name, weight.spec)
    return {f"{name}_q": weight.parts["qdata"], f"{name}_s": weight.parts["scale"].reshape(-1)}


def _announce(specs, plain):
    for name, spec in specs.items():
        _layout(name, spec)
    return {"config.json": {"quantization_config": {"quant_method": "acme"}}}


ACME = SimpleNamespace(
    name="acme",
    recognise=_recognise,
    unpack=lambda entry, tensors: {"qdata": tensors["q"], "scale": tensors["s"].view(-1, 1)},
    layout=_layout,
    pack=_pack,
    announce=_announce,
)


@pytest.fixture(autouse=True)
def _forgotten():
    before = list(formats.FORMATS), list(formats.WRITABLE)
    yield
    formats.FORMATS[:], formats.WRITABLE[:] = before


def _model(scheme=SCHEME):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    tt.quantize(model, scheme)
    return model


def test_it_keeps_the_laws():
    tt.testing.check_format(ACME, schemes=[SCHEME, tt.nf4()]).check()


def test_everything_reads_and_writes_it(tmp_path, capsys):
    model, folder = _model(), tmp_path / "acme"
    with pytest.raises(tt.CheckpointError, match="unknown format 'acme'"):
        tt.save(model, folder, format="acme")
    formats.register(ACME)
    tt.save(model, folder, format="acme")
    with tt.open(folder) as checkpoint:
        assert checkpoint.format == "acme"
        assert checkpoint.spec("0.weight").scheme == SCHEME
        assert torch.equal(checkpoint["0.weight"].dequantize(), model[0].weight.dequantize())
    for held in (nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)), _model(tt.nf4()), _model()):
        ids = [id(p) for p in held.parameters()]
        tt.load(held, folder)
        assert [id(p) for p in held.parameters()] == ids
    assert torch.equal(held[0].weight.dequantize(), model[0].weight.dequantize())
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    for words in (
        ["inspect", str(folder)],
        ["convert", str(folder), there, "--format", "compressed-tensors"],
        ["convert", there, back, "--format", "acme"],
        ["verify", back, "--against", str(folder)],
    ):
        assert main(words) == 0, (words, capsys.readouterr())
    assert "acme" in capsys.readouterr().out
    with pytest.raises(tt.SchemeError, match=r"^0\.weight: acme has no words for .* Use tt\.int8\(\)\."):
        tt.save(_model(tt.nf4()), tmp_path / "refused", format="acme")
    assert not (tmp_path / "refused").exists()


def test_a_fault_of_it_is_one_of_the_plan(tmp_path):
    formats.register(ACME)
    tt.save(_model(), tmp_path / "acme", format="acme")
    (file,) = (tmp_path / "acme").glob("*.safetensors")
    stored = load_file(file)
    del stored["1.weight_s"]
    save_file(stored, file)
    plan = tt.plan_load(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)), tmp_path / "acme")
    assert any("1.weight" in fault and "half of it is absent" in fault for fault in plan.faults)


@pytest.mark.parametrize(
    ("format", "said"),
    [
        (3, "the int has no name"),
        (SimpleNamespace(name="mine"), r"mine: the format has no recognise\(\)"),
        (
            SimpleNamespace(name="mine", recognise=_recognise, unpack=_pack, pack=_pack),
            r"mine: the format has no layout\(\)",
        ),
        (
            type("Mine", (), {**vars(ACME), "name": "mine"}),
            "^format: is the class Mine, not a format. Give an instance",
        ),
        (SimpleNamespace(**{**vars(ACME), "name": "gptq"}), "gptq: a format of this name exists already"),
        (SimpleNamespace(**{**vars(ACME), "name": "safetensors"}), "safetensors: a format of this name exists"),
    ],
)
def test_what_is_no_format_is_refused(format, said):
    before = list(formats.FORMATS), list(formats.WRITABLE)
    with pytest.raises(tt.TetherError, match=said):
        formats.register(format)
    assert before[0] == formats.FORMATS
    assert before[1] == formats.WRITABLE
