"""Patterns of names in a config match as ``re`` does, in bounded time."""

import json
import random
import re
import sys

import pytest
import torch
from torch import nn

import torchtether as tt
from torchtether.errors import CheckpointError
from torchtether.formats import name_patterns
from torchtether.formats.linears import dynamic_overrides, extra_overrides
from torchtether.formats.name_patterns import Clock, NamePattern

PUBLISHED = (
    r".*lm_head",
    r".*mlp.gate$",
    r"model\.layers\.\d+\.self_attn\.(q|k|v)_proj",
    r"model\.layers\.[0-9]{1,2}\.mlp\.(?:gate|up|down)_proj$",
    r".*self_attn.*",
    r"^(?!.*experts).*$",
    r"^(?!.*(self_attn|lm_head).*).*$",
    r".*\.(?<!shared_)experts\.\d+\..*",
    r"(?i).*LM_HEAD",
    r"^model(\.\w+)*\.(q|k)_proj\Z",
    r".*layers\.([0-9]|1[0-9])\..*_proj.*",
    r"[^.]+\.layers\b.*?down",
)
NAMES = (
    "lm_head",
    "model.lm_head",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.gate_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.11.mlp.experts.3.down_proj",
    "model.layers.7.mlp.shared_experts.1.up_proj",
    "",
    "a",
)


def made(text):
    return NamePattern(text, file="config.json", clock=Clock())


@pytest.fixture(params=[False, True], ids=["few ways", "many ways"])
def many(request, monkeypatch):
    """Whether our own matcher answers for all patterns, as it does where there are many ways through one."""
    if request.param:
        monkeypatch.setattr(name_patterns, "_WORK", -1)


def check(text, names):
    stock, ours = re.compile(text), made(text)
    for name in names:
        assert ours.match(name) == bool(stock.match(name)), (text, name)
        assert ours.search(name) == bool(stock.search(name)), (text, name)


@pytest.mark.parametrize("text", PUBLISHED)
def test_published_patterns_say_what_re_says(many, text):
    check(text, NAMES)


def random_pattern(draw, depth=3):
    def atom():
        kind = draw.random()
        if depth and kind < 0.35:
            opening = draw.choice(["(", "(", "(?:", "(?=", "(?!", f"(?P<n{draw.getrandbits(40)}>"])
            return opening + random_pattern(draw, depth - 1) + ")"
        leaves = ["a", "b", "1", ".", r"\.", r"\d", r"\w", r"\W", "[ab]", "[^a.]", "[]a]", "^", "$", r"\b", "{", "}"]
        return draw.choice([*leaves, "(?<=a)", "(?<!b1)"])

    def item():
        made, kind = atom(), draw.random()
        if kind < 0.4 and made not in ("^", "$", r"\b"):
            made += draw.choice(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{2,}"])
        return made

    return "|".join("".join(item() for _ in range(draw.randint(0, 3))) for _ in range(draw.choice([1, 1, 2])))


def test_random_patterns_say_what_re_says(monkeypatch):
    monkeypatch.setattr(name_patterns, "_WORK", -1)
    draw = random.Random(0)
    names = ["".join(draw.choices("ab1.", k=k)) for k in (0, 1, 1, 2, 3, 4, 5, 6) for _ in range(3)]
    for _ in range(800):
        check(random_pattern(draw), names)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("(a+)+$", False),
        ("(a|a)*$", False),
        ("(a|a)" * 40 + "$", False),
        ("a?" * 60 + "a" * 60 + "!$", True),
        (".*.*.*.*.*.*.*=", False),
        ("(.*)*x", False),
        (r"(?!(a+)+$)a", True),
        (r"((a*)*)*b|a{60}!", True),
    ],
)
def test_patterns_that_backtrack_for_ever_are_answered(text, is_found):
    assert made(text).match("a" * 60 + "!") is is_found


def test_what_takes_too_long_is_refused_by_name(monkeypatch):
    for text in ("(" * 40 + "a*" + "b)*" * 40, "(((((a*b?)*c?)*d?)*e?)*(?=(a*)*x))*!"):
        try:
            assert made(text).match("a" * 20_000) in (True, False)
        except CheckpointError as error:
            assert "takes too long for a name of 20000 characters" in str(error)
            assert "\n" not in str(error)
    monkeypatch.setattr(name_patterns, "_SECONDS", -1.0)
    with pytest.raises(CheckpointError, match="and the others of the config take more than"):
        made("a").match("a")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (r"(a)\1", "contains '.*1', which is not supported"),
        (r"(?P<x>a)(?P=x)", "which is not supported"),
        ("(?>a)", "which is not supported"),
        ("a*+", "which is not supported"),
        ("(?x)a", "which is not supported"),
        ("(", "of 1 characters is invalid or longer than"),
        ("a" * 2001, "of 2001 characters is invalid"),
        ("(" * 900 + ")" * 900, "is invalid or longer than|which is not supported"),
    ],
)
def test_what_is_no_pattern_for_names_is_refused_by_name(text, what):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Hypothesis may have raised it for the process
    try:
        with pytest.raises(CheckpointError, match=f"config.json: the regular expression .* {what}") as refused:
            made(text)
    finally:
        sys.setrecursionlimit(limit)
    assert "\n" not in str(refused.value)


def test_a_folder_whose_config_backtracks_is_read(tmp_path):
    """Both lists of compressed-tensors, and the rules of GPTQ and AutoRound."""
    name = "a" * 40 + "!"
    model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False)})
    tt.save(tt.quantize(model, "int8"), tmp_path, format="compressed-tensors")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    settings = config["quantization_config"]
    settings["ignore"] = ["re:(a+)+$"]
    group = next(iter(settings["config_groups"].values()))
    group["targets"] = ["re:(a|a)*(a|a)*$", *group["targets"]]
    path.write_text(json.dumps(config))
    with tt.open(tmp_path) as checkpoint:
        assert isinstance(checkpoint[f"{name}.weight"], tt.Weight)
        held = checkpoint[f"{name}.weight"].parts
        assert all(torch.equal(held[part], tensor) for part, tensor in model[name].weight.parts.items())
    for rules in (
        dynamic_overrides({"dynamic": {"-:(a+)+$": {}}}, file="config.json"),
        extra_overrides({"extra_config": {"(a+)+$": {"bits": 4}, "x[": {"bits": 2}}}, (), file="config.json"),
    ):
        assert [bool(rule.matches(name)) for rule in rules] == [False]
