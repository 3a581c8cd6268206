"""``dtype=`` and ``device=`` by pattern: the first glob that matches a name decides, and faults are found first."""

import pytest
import torch
from torch import nn

import torchtether as tt
import torchtether.loading.steps
from tests.loading.models import Tied, build
from torchtether.ties.names import named_tensors

HALF, FULL, WIDE = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def saved(tmp_path):
    source = build(Tied)
    tt.save(source, tmp_path / "x", max_shard_size=300)
    return source, tmp_path / "x"


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ({"norm.*": FULL, "*": HALF}, {"norm.weight": FULL, "norm.bias": FULL}),
        ({"*.bias": WIDE, "norm.*": FULL, "*": HALF}, {"norm.weight": FULL, "norm.bias": WIDE, "mid.bias": WIDE}),
        ({"head.weight": WIDE, "mid.*": HALF, "norm.*": None}, {"emb.weight": WIDE, "head.weight": WIDE}),
        ({"steps": HALF, "*": HALF}, {}),
    ],
    ids=["norms", "first", "tied", "integers"],
)
def test_the_first_match_decides_and_ties_go_along(saved, meta, dtype, expected):
    source, folder = saved
    model = build(Tied, meta=meta, seed=4)
    before = named_tensors(model)
    tt.load(model, folder, dtype=dtype)
    rest = HALF if "*" in dtype else FULL
    for name, tensor in named_tensors(model).items():
        given = named_tensors(source)[name]
        wanted = expected.get(name, HALF if name.startswith("mid") else rest)
        assert tensor.dtype == (wanted if given.is_floating_point() else torch.int64), name
        assert torch.equal(tensor, given.to(tensor.dtype)), name
        assert tensor is before[name]
    assert model.head.weight is model.emb.weight


def test_compute_dtypes_of_weights(saved):
    _, folder = saved
    model = build(Tied, meta=True)
    tt.load(model, folder, quantize="int8", dtype={"mid.weight": HALF})
    assert isinstance(model.mid.weight, tt.Weight)
    assert (model.mid.weight.dtype, model.emb.weight.dtype) == (HALF, FULL)


FAULTS = {
    "nothing": ({"dtype": {"midd.*": HALF}}, r"dtype: midd\.\*: this rule matches no tensor .* the nearest is 'mid\."),
    "nowhere": ({"device": {"hed.*": "cpu"}}, r"device: hed\.\*: this rule .* the nearest is 'head\."),
    "integer": ({"dtype": {"mid.*": torch.int32}}, r"dtype: mid\.\*: torch.int32 is not a dtype to compute in"),
    "word": ({"device": {"mid.*": "nowhere"}}, r"device: mid\.\*: .*nowhere"),
    "one_word": ({"device": "nowhere"}, r"device: .*nowhere"),
    "meta": ({"device": {"*": "meta"}}, r"device: \*: nothing can be loaded to meta"),
    "tied": (
        {"dtype": {"emb.*": HALF, "head.*": WIDE}},
        r"head.weight: dtype= has torch.float64 for it, and torch.bfloat16 for emb.weight, to which it is tied",
    ),
    "tied_default": (
        {"device": {"emb.*": None, "head.*": "cpu"}},
        r"head.weight: device= has cpu for it, and the default for emb.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("meta", [True, False])
def test_each_fault_is_one_line_and_changes_nothing(saved, fault, meta):
    _, folder = saved
    options, what = FAULTS[fault]
    model = build(Tied, meta=meta, seed=4)
    before = {name: (tensor, tensor.dtype, tensor.device) for name, tensor in named_tensors(model).items()}
    plan = tt.plan_load(model, folder, **options)
    assert len(plan.faults) == 1
    with pytest.raises(tt.LoadError, match=what) as caught:
        plan.apply()
    plan.close()
    assert "\n" not in str(caught.value)
    assert {n: (t, t.dtype, t.device) for n, t in named_tensors(model).items()}.keys() == before.keys()
    for name, tensor in named_tensors(model).items():
        assert (tensor, tensor.dtype, tensor.device)[1:] == before[name][1:]
        assert tensor is before[name][0]


@pytest.mark.parametrize("asked", [{"emb.*": HALF, "head.*": WIDE}, {"emb.*": HALF}])
def test_a_tie_that_the_file_brings_is_asked_for_one_thing(saved, asked):
    _, folder = saved
    model = build(Tied, seed=4)
    tt.untie(model, "head.weight")
    with pytest.raises(
        tt.LoadError, match=r"head.weight: the checkpoint ties it to emb.weight, and dtype= has different values"
    ):
        tt.load(model, folder, ties="file", dtype=asked)
    assert model.head.weight is not model.emb.weight
    tt.load(model, folder, ties="file", dtype={"emb.*": HALF, "head.*": HALF})
    assert model.head.weight is model.emb.weight
    assert model.head.weight.dtype == HALF


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.register_buffer("one", 1.0 / torch.arange(1, 4), persistent=False)
        self.register_buffer("two", 2.0 / torch.arange(1, 4), persistent=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize("meta", [True, False])
def test_each_device_gets_its_names_and_recorded_buffers_too(tmp_path, meta):
    torch.manual_seed(0)
    source = Rotary()
    tt.save(source, tmp_path / "x")
    if meta:
        with tt.on_meta():
            model = Rotary()
    else:
        model = Rotary()
    tt.load(
        model, tmp_path / "x", device={"a.*": "cuda:0", "two": "cuda:0", "one": None}, quantize={"a.weight": "int8"}
    )
    for name, tensor in named_tensors(model).items():
        cuda = name.startswith("a.") or (name == "two" and meta)
        assert tensor.device.type == ("cuda" if cuda else "cpu"), name
        if name != "a.weight":
            assert torch.equal(tensor.cpu(), named_tensors(source)[name])


def test_recorded_buffers_are_computed_on_one_device_and_moved(tmp_path, monkeypatch):
    """``meta`` stands in for a second device, which not every machine has."""
    tt.save(Rotary(), tmp_path / "x")
    monkeypatch.setattr(torchtether.loading.steps, "_check_device", torch.device)
    with tt.on_meta():
        model = Rotary()
    before = named_tensors(model)
    report = tt.load(model, tmp_path / "x", device={"two": "meta"})
    assert report.on_meta == ("two",)
    assert torch.equal(model.one, Rotary().one)
    assert all(before[name] is tensor for name, tensor in named_tensors(model).items())
