"""Plans of schemes for a size: they fit it, have about the least error, and predict the real sizes and errors."""

import itertools
import re
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchtether as tt
from torchtether.conversion.sizing import CANDIDATES, Option, allocate


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(96, 64)
        self.up = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.down = nn.Linear(128, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, index):
        return self.head(self.down(self.norm(torch.relu(self.up(self.emb(index))))))


def stored(model):
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in tensors.values())


@st.composite
def priced(draw):
    names = [f"w{i}" for i in range(draw(st.integers(1, 4)))]
    option = st.tuples(st.integers(1, 40), st.floats(0, 1, allow_subnormal=False))
    return {name: [Option(None, *draw(option)) for _ in range(draw(st.integers(1, 4)))] for name in names}


@given(priced(), st.integers(0, 160))
def test_a_plan_loses_no_more_than_the_best_one_that_is_smaller_by_one_step(options, budget):
    every = [(sum(o.nbytes for o in some), sum(o.error for o in some)) for some in itertools.product(*options.values())]
    if min(nbytes for nbytes, _ in every) > budget:
        with pytest.raises(tt.ArgumentError, match="the smallest possible plan takes"):
            allocate(options, budget)
        return
    chosen = allocate(options, budget)
    assert all(chosen[name] in some for name, some in options.items())
    assert sum(option.nbytes for option in chosen.values()) <= budget
    step = max(max(o.nbytes for o in some) - min(o.nbytes for o in some) for some in options.values())
    smaller = [error for nbytes, error in every if nbytes <= budget - step]
    assert sum(option.error for option in chosen.values()) <= min(smaller, default=float("inf")) + 1e-9


@pytest.mark.parametrize("size", [{"bits": 3.6}, {"bits": 4.5}, {"bits": 7}, {"bytes": "20kB"}, {"bytes": 30_000}])
def test_the_model_takes_what_the_plan_says(size):
    model = Tied()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = tt.plan_quantize(model, **size)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert set(plan.choices) == {"emb.weight", "up.weight", "down.weight"}
    tt.quantize(model, plan.rules)
    assert stored(model) == plan.nbytes
    tt.check_ties(model)
    if "bits" in size:
        assert plan.bits <= size["bits"]
    else:
        assert plan.nbytes <= {"20kB": 20_000}.get(size["bytes"], size["bytes"])
    for name, option in plan.choices.items():
        lost = (model.get_parameter(name).dequantize() - before[name]).detach().double().square().sum()
        assert option.error == pytest.approx(float(lost / before[name].double().square().sum()), rel=1e-6)
    assert f"{plan.bits:.2f} bits a weight" in str(plan)


def test_more_bytes_lose_less():
    errors = [tt.plan_quantize(Tied(), bits=bits).error for bits in (3.6, 4, 5, 6, 8.6, 32)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0


def test_rules_are_those_of_a_load(tmp_path):
    model = Tied()
    tt.save(model, tmp_path / "model.safetensors")
    plan = tt.plan_quantize(model, bits=5)
    with torch.device("meta"):
        loaded = Tied()
    tt.load(loaded, tmp_path / "model.safetensors", quantize=plan.rules)
    tt.quantize(model, plan.rules)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_inputs_say_which_columns_count():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    with torch.no_grad():
        model[0].weight[:, 0] *= 50  # its groups lose the small columns
    batches = [
        torch.randn(8, 64) * torch.cat([torch.zeros(1), torch.ones(63)])
    ]  # and nothing comes in by the large one
    weight, moments = model[0].weight.detach(), batches[0].double().square().mean(0)
    whole = (weight.double().square() * moments).sum()
    blind = tt.plan_quantize(model, bits=5)
    for inputs in (batches, [tuple(batches)], [{"input": batches[0]}]):
        seen = tt.plan_quantize(model, bits=5, inputs=inputs)
        error = seen.choices["0.weight"].error
        decoded = tt.Weight.encode(weight, seen.choices["0.weight"].scheme).dequantize()
        lost = ((decoded - weight).double().square() * moments).sum()
        assert error == pytest.approx(float(lost / whole), rel=1e-6)
        assert error > 5 * tt.plan_quantize(model, bits=5, only="0.weight").error
    assert seen.choices != blind.choices
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_some_are_planned_and_others_stay():
    model = Tied()
    tt.quantize(model, {"up.weight": "int8"})
    plan = tt.plan_quantize(model, bits=5, only=["down.*", "up.*"], schemes=["int4", "nf4", tt.int8(32)])
    assert list(plan.choices) == ["down.weight"]
    tt.quantize(model, plan.rules)
    assert model.up.weight.scheme == tt.int8()
    assert stored(model) == plan.nbytes


def test_names_that_look_like_globs_are_names():
    model = nn.Module()
    model.layers = nn.ModuleDict({"a[0]": nn.Linear(64, 64), "a0": nn.Linear(64, 64)})
    plan = tt.plan_quantize(model, bits=4.6)
    tt.quantize(model, plan.rules)
    assert {name: layer.weight.scheme for name, layer in model.layers.items()} == {
        name: plan.choices[f"layers.{name}.weight"].scheme for name in model.layers
    }


@pytest.mark.parametrize(
    ("changes", "kind", "what"),
    [
        ({}, tt.ArgumentError, "exactly one of bytes= and bits= is needed"),
        ({"bits": 4, "bytes": 4}, tt.ArgumentError, "exactly one of bytes= and bits= is needed"),
        ({"bits": 1}, tt.ArgumentError, "^bits: the smallest possible plan takes"),
        ({"bytes": 5000}, tt.ArgumentError, "^bytes: the smallest possible plan takes"),
        ({"bits": -1}, tt.ArgumentError, "bits: -1 is not a positive number"),
        ({"bits": "four"}, tt.ArgumentError, "bits: 'four' is not a positive number"),
        ({"bytes": "4 parsecs"}, tt.ArgumentError, "bytes: '4 parsecs' is not a size"),
        ({"bits": 4, "only": "absent.*"}, tt.RuleError, "absent.*: this glob matches no parameter"),
        ({"bits": 4, "only": "norm.*"}, tt.RuleError, "no float weight of two or more dimensions"),
        ({"bits": 4, "schemes": []}, tt.ArgumentError, "the list of schemes is empty"),
        ({"bits": 4, "schemes": ["int5"]}, tt.RuleError, "^schemes: unknown scheme 'int5'"),
        ({"bits": 4, "schemes": 5}, tt.RuleError, "^schemes: a scheme or its name is needed, got an int"),
        ({"bits": 4, "inputs": 5}, tt.ArgumentError, "^inputs: is an int, not several batches"),
        ({"bits": 4, "inputs": {"x": torch.ones(1)}}, tt.ArgumentError, "^inputs: is a dict, not several batches"),
        ({"bits": 4, "inputs": []}, tt.ArgumentError, "^inputs: has no batches"),
        ({"bits": 4, "inputs": iter(())}, tt.ArgumentError, "^inputs: has no batches"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, kind, what):
    with pytest.raises(kind, match=what) as raised:
        tt.plan_quantize(Tied(), **changes)
    assert "\n" not in str(raised.value)


def test_what_is_quantized_already_is_named_as_the_reason():
    with pytest.raises(tt.RuleError, match=r"^model: has no float weight .* \(2 parameters are quantized already\)"):
        tt.plan_quantize(tt.quantize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "int8"), bits=4)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_inputs_that_are_not_finite_are_refused(value):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    inputs = torch.ones(2, 64)
    inputs[1, 3] = float(value)
    with pytest.raises(tt.ArgumentError, match=r"^inputs: the layer of 0\.weight is given values that are not finite"):
        tt.plan_quantize(model, bits=5, inputs=[torch.ones(2, 64), inputs])


def test_values_are_needed_and_must_be_finite():
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(tt.ArgumentError, match=r"up\.weight: is on meta|emb\.weight: is on meta"):
        tt.plan_quantize(model, bits=4)
    model = Tied()
    with torch.no_grad():
        model.up.weight[3, 5] = float("nan")
    with pytest.raises(tt.SchemeError, match=r"up\.weight"):
        tt.plan_quantize(model, bits=4, schemes=["int8", "int4"])
    with pytest.raises(tt.SchemeError, match=r"up\.weight: 1 of \d+ values are not finite"):
        tt.plan_quantize(model, bits=16)  # among the default schemes is None: as it is


def test_a_candidate_that_does_not_fit_a_shape_is_left_out_there():
    model = nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 48))  # K-quants and nvfp4 want other widths
    plan = tt.plan_quantize(model, bits=6, schemes=[*CANDIDATES, "nvfp4"])
    tt.quantize(model, plan.rules)
    assert stored(model) == plan.nbytes


def test_the_command_line_meets_a_size(tmp_path, capsys):
    from torchtether.cli.main import main

    model = Tied()
    tt.save(model, tmp_path / "source")
    arguments = ["quantize", str(tmp_path / "source"), str(tmp_path / "made"), "--target-size", "24kB"]
    assert main([*arguments, "--rule", "down.*=int8"]) == 0
    shown = capsys.readouterr().out
    with tt.open(tmp_path / "made") as made:
        assert sum(made.nbytes(name) for name in made.entries) <= 24_000
        assert made.spec("down.weight").scheme == tt.int8()
        plan = tt.plan_quantize(
            model, bytes=24_000 - tt.int8().nbytes((64, 128), torch.float32) + 64 * 128 * 4, only=["emb.*", "up.*"]
        )
        assert made.spec("up.weight").scheme == plan.choices["up.weight"].scheme
        assert made.ties[0].names == ("emb.weight", "head.weight")
    assert "bits a weight, summed error" in shown
    assert main([*arguments[:2], str(tmp_path / "other"), "--target-size", "1kB"]) == 1
    assert capsys.readouterr().err.startswith("torchtether: --target-size: the smallest possible plan takes")
    for wrong in (["24kB", "--scheme", "int8"], ["many"], ["24kB", "--max-shard-size", "many"]):
        with pytest.raises(SystemExit) as caught:
            main([*arguments[:2], str(tmp_path / "other"), "--target-size", *wrong])
        assert caught.value.code == 2
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("format", "size", "schemes"),
    [
        ("bitsandbytes", 150_000, 1),  # its config describes 4 bits or 8, not both
        ("bitsandbytes", 250_000, 1),
        ("compressed-tensors", 200_000, 1),  # transformers reads an embedding only if all weights have one scheme
        ("sinq", 150_000, 2),
        ("comfy", 150_000, 2),
        ("gguf", 150_000, 2),
    ],
)
def test_a_plan_is_one_that_the_format_can_store(tmp_path, capsys, format, size, schemes):
    from torchtether.cli.main import main

    torch.manual_seed(0)
    tensors = {f"l{i}.weight": torch.randn(256, 256) for i in range(3)}
    if format == "compressed-tensors":
        tensors["emb.weight"] = tensors["head.weight"] = torch.randn(256, 256)
    tt.save(tensors, tmp_path / "source")
    target = tmp_path / ("made.gguf" if format == "gguf" else "made")
    command = ["quantize", str(tmp_path / "source"), str(target), "--format", format, "--target-size"]
    assert main([*command, "30kB"]) == 1
    least = int(re.search(r"takes ([\d,]+) bytes", capsys.readouterr().err)[1].replace(",", ""))
    assert main([*command, str(least - 1)]) == 1
    assert not target.exists()
    assert main([*command, str(size)]) == 0
    with tt.open(target) as made:
        assert least <= sum(stored.nbytes for stored in made.store.header.tensors.values()) <= size
        assert len({made.spec(name).scheme for name in made.entries} - {tt.Plain()}) == schemes
    target.unlink() if target.is_file() else shutil.rmtree(target)
    assert main([*command, str(least)]) == 0  # the smallest size is not too small


def test_a_plan_for_gguf_has_8_bits_too(tmp_path):
    """They are in blocks of 32, while the candidate of every other format is ``int8()``."""
    from torchtether.cli.main import main

    tt.save({f"l{i}.weight": torch.randn(256, 256) for i in range(3)}, tmp_path / "source")
    command = ["quantize", str(tmp_path / "source"), str(tmp_path / "made.gguf"), "--format", "gguf"]
    assert main([*command, "--target-size", str(3 * 256 * 256 * 34 // 32)]) == 0
    with tt.open(tmp_path / "made.gguf") as made:
        assert {made.spec(name).scheme for name in made} == {tt.int8(32, scale_dtype=torch.float16)}
