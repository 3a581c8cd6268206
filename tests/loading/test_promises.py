"""What a load promises: Parameter objects, optimizers, hooks and ties stay; values and dtypes are those asked for."""

import contextlib
import copy

import pytest
import safetensors.torch
import torch
from torch import nn

import torchtether as tt
from tests.loading.models import MODELS, Counted, Fused, Tied, Turned, build
from torchtether.ties.names import named_tensors


@pytest.fixture
def saved(tmp_path):
    """A float checkpoint of ``Tied``, its model, and its folder."""
    model = build(Tied)
    tt.save(model, tmp_path / "saved", max_shard_size=300)
    return model, tmp_path / "saved"


def test_an_optimizer_that_was_built_before_trains_the_loaded_model(saved):
    _, folder = saved
    with torch.device("meta"):
        model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tt.load(model, folder, quantize={"mid.weight": "int8"})
    tt.check_optimizer(model, optimizer)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()
    for name, tensor in model.named_parameters():
        assert not torch.equal(tensor, before[name]), name
    assert model.head.weight is model.emb.weight


@pytest.mark.parametrize("kind", MODELS)
def test_loading_on_meta_gives_the_values_of_load_state_dict(tmp_path, kind):
    model = build(kind)
    tt.save(model, tmp_path / "x", aliases="copy")
    reference = build(kind, seed=3)
    state = safetensors.torch.load_file(tmp_path / "x" / "model.safetensors")
    state = {name: tensor for name, tensor in state.items() if not name.startswith("torchtether.storage.")}
    if "wide" not in state:  # an expanded buffer cannot be copied into
        reference.load_state_dict(state)
    else:
        reference.load_state_dict(state, assign=True)
    again = build(kind, meta=True)
    tt.load(again, tmp_path / "x")
    for name, tensor in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("quantize", [None, "int8", {"emb.weight": tt.Plain()}], ids=str)
def test_objects_hooks_attributes_and_requires_grad_stay(saved, meta, quantize):
    _, folder = saved
    model = build(Tied, meta=meta)
    model.mid.bias.requires_grad_(False)
    model.emb.weight.note = "mine"
    fired = []
    model.emb.weight.register_post_accumulate_grad_hook(lambda p: fired.append("post"))
    before = named_tensors(model)
    tt.load(model, folder, quantize=quantize)
    assert all(before[name] is tensor for name, tensor in named_tensors(model).items())
    assert not model.mid.bias.requires_grad
    assert model.emb.weight.requires_grad
    assert model.emb.weight.note == "mine"
    model(torch.tensor([1])).sum().backward()
    assert fired == ["post"]


def test_dtypes_on_meta_are_those_of_the_file_and_on_a_real_model_its_own(saved):
    source, folder = saved
    meta = build(Tied, meta=True, dtype=torch.float64)
    tt.load(meta, folder)
    assert meta.mid.weight.dtype == torch.float32
    real = build(Tied, dtype=torch.float64)
    place = real.mid.weight.data_ptr()
    tt.load(real, folder)
    assert real.mid.weight.dtype == torch.float64
    assert real.mid.weight.data_ptr() == place
    assert torch.equal(real.mid.weight, source.mid.weight.double())


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [Tied, Turned, Fused])
def test_dtype_converts_floats_and_keeps_ties(tmp_path, kind, dtype, meta):
    source = build(kind)
    tt.save(source, tmp_path / "x")
    model = build(kind, meta=meta, seed=4)
    optimizer = torch.optim.AdamW(model.parameters())
    tt.load(model, tmp_path / "x", dtype=dtype, optimizer=optimizer)
    expected = {n: t.to(dtype) if t.is_floating_point() else t for n, t in named_tensors(source).items()}
    for name, tensor in named_tensors(model).items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    assert [tie.names for tie in tt.find_ties(model)] == [tie.names for tie in tt.find_ties(source)]
    tt.check_optimizer(model, optimizer)


def test_only_models_of_libraries_list_what_stays_float32(saved):
    model, folder = saved
    model._keep_in_fp32_modules = True  # of the user's own, with a meaning of his
    tt.load(model, folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("scheme", [tt.int8(), tt.int4(4), tt.nf4()], ids=str)
@pytest.mark.parametrize("meta", [True, False])
def test_quantizing_while_loading_is_loading_and_quantizing(tmp_path, scheme, meta):
    source = build(Turned)
    tt.save(source, tmp_path / "x")
    model = build(Turned, meta=meta, seed=4)
    report = tt.load(model, tmp_path / "x", quantize=scheme, dtype=torch.bfloat16)
    tt.quantize(source, scheme)
    for name, tensor in named_tensors(source).items():
        given = named_tensors(model)[name]
        if isinstance(tensor, tt.Weight):
            assert given.dtype == torch.bfloat16
            assert given.tie == tensor.tie
            for part, values in tensor.parts.items():
                assert torch.equal(given.parts[part], values)
    assert model.turned.parts["qdata"].data_ptr() == model.emb.weight.parts["qdata"].data_ptr()
    assert set(report.quantized) == {"emb.weight", "mid.weight"}


@pytest.mark.parametrize("scheme", [tt.int8(), tt.int4(4), tt.nf4()], ids=str)
def test_codes_that_are_loaded_into_an_emptied_weight_are_not_encoded_again(tmp_path, scheme):
    model = build(Tied)
    tt.quantize(model, {"*.weight": scheme})
    tt.save(model, tmp_path / "x")
    stored = model.mid.weight.detach().clone()
    with tt.swapping(model):
        model.to_empty(device="meta")
    tt.load(model, tmp_path / "x", device="cpu")
    assert model.mid.weight.scheme == scheme
    assert all(torch.equal(part, stored.parts[role]) for role, part in model.mid.weight.parts.items())


@pytest.mark.parametrize("meta", [True, False])
def test_a_float_checkpoint_never_unquantizes(saved, meta):
    source, folder = saved
    model = build(Tied, meta=meta, seed=4)
    tt.quantize(model, "int8")
    weight = model.mid.weight
    tt.load(model, folder)
    assert model.mid.weight is weight
    assert weight.scheme == tt.int8()
    assert torch.equal(weight, tt.Weight.encode(source.mid.weight, tt.int8()))
    assert model.head.weight is model.emb.weight


def test_stock_load_state_dict_keeps_the_scheme_afterwards(saved):
    source, folder = saved
    model = build(Tied, meta=True)
    tt.load(model, folder, quantize="int8")
    model.load_state_dict(source.state_dict(), assign=True)
    assert isinstance(model.mid.weight, tt.Weight)


def test_a_real_model_is_filled_where_it_is(saved):
    source, folder = saved
    model = build(Tied, seed=4)
    outside = model.emb.weight.detach()  # a view, which forbids an exchange
    tt.load(model, folder)
    assert torch.equal(outside, source.emb.weight)


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view], ids=["conjugate", "negative"])
@pytest.mark.parametrize("is_parameter", [True, False], ids=["parameter", "buffer"])
@pytest.mark.parametrize("fill", [tt.load, tt.refit])
def test_a_lazy_conjugate_or_negative_is_filled_with_the_values_of_the_file(tmp_path, view, is_parameter, fill):
    values = torch.randn(3, 4, dtype=torch.complex64)
    tt.save({"value": values}, tmp_path / "x.safetensors")
    held = view(torch.zeros(3, 4, dtype=torch.complex64))
    model = nn.Module()
    if is_parameter:
        model.value = nn.Parameter(held)
    else:
        model.register_buffer("value", held)
    fill(model, tmp_path / "x.safetensors")
    assert torch.equal(model.value.detach().resolve_conj().resolve_neg(), values)
    assert (model.value.is_conj(), model.value.is_neg()) == (held.is_conj(), held.is_neg())


def test_non_persistent_buffers(tmp_path):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("freq", 1.0 / torch.arange(1, 4), persistent=False)

    source = Rotary()
    tt.save(source, tmp_path / "x")
    with tt.on_meta():
        model = Rotary()
    tt.load(model, tmp_path / "x")
    assert torch.equal(model.freq, source.freq)
    with torch.device("meta"):
        model = Rotary()
    plan = tt.plan_load(model, tmp_path / "x")
    assert plan.faults == (
        "freq: it is a non-persistent buffer on meta, which the checkpoint does not have. "
        "Build the model under tt.on_meta().",
    )
    report = tt.load(model, tmp_path / "x", strict=False)
    assert report.on_meta == ("freq",)
    assert torch.equal(model.w, source.w)
    real = Rotary()
    real.freq.fill_(7)
    assert tt.load(real, tmp_path / "x").missing_keys == ()
    assert real.freq.tolist() == [7, 7, 7]
    tt.save({"w": source.w, "freq": source.freq}, tmp_path / "y")
    with torch.device("meta"):
        model = Rotary()
    tt.load(model, tmp_path / "y")
    assert torch.equal(model.freq, source.freq)
    report = tt.load(real, tmp_path / "y")
    assert report.unexpected_keys == ("freq",)
    assert real.freq.tolist() == [7, 7, 7]


def test_not_strict_reports_and_leaves_what_it_did_not_load(saved):
    source, folder = saved
    model = build(Tied, seed=4)
    model.register_parameter("extra", nn.Parameter(torch.ones(2)))
    del model.mid.bias
    report = tt.load(model, folder, strict=False)
    assert report.missing_keys == ("extra",)
    assert report.unexpected_keys == ("mid.bias",)
    assert model.extra.tolist() == [1, 1]
    assert torch.equal(model.mid.weight, source.mid.weight)
    with torch.device("meta"):
        model = Tied()
        model.register_parameter("extra", nn.Parameter(torch.ones(2)))
    report = tt.load(model, folder, strict=False)
    assert report.on_meta == ("extra",)
    assert "still on meta: extra" in str(report)


@pytest.mark.parametrize(
    "rename",
    [
        {f"old.{name}": name for name in build(Tied).state_dict()},
        [(r"^old\.", "")],
        lambda name: name.removeprefix("old."),
    ],
    ids=["mapping", "patterns", "function"],
)
def test_rename(tmp_path, rename):
    source = build(Tied)
    tt.save({f"old.{name}": tensor for name, tensor in source.state_dict(keep_vars=True).items()}, tmp_path / "x")
    model = build(Tied, meta=True)
    tt.load(model, tmp_path / "x", rename=rename)
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.head.weight is model.emb.weight


def test_a_name_that_is_renamed_to_nothing_is_left_out(tmp_path):
    tt.save({"weight": torch.ones(2, 2), "junk": torch.ones(1)}, tmp_path / "x")
    model = nn.Linear(2, 2, bias=False)
    tt.load(model, tmp_path / "x", rename=lambda name: None if name == "junk" else name)
    assert model.weight.tolist() == [[1, 1], [1, 1]]


def _counted(*calls):
    made = [Counted(2, 2) for _ in calls]
    for module, number in zip(made, calls, strict=True):
        module.calls = number
    return nn.Sequential(*made, made[0], nn.Linear(2, 2))


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_tensor_of_extra_state_comes_back(tmp_path, suffix, strict):
    model, path = _counted(7, 8), tmp_path / f"x.{suffix}"
    torch.save(model.state_dict(), path) if suffix == "pt" else tt.save(model, path)
    with torch.device("meta"):
        again = _counted(0, 0)
    report = tt.load(again, path, strict=strict)
    assert (report.missing_keys, report.unexpected_keys) == ((), ())
    assert [again[i].calls for i in range(3)] == [7, 8, 7]
    plan = tt.plan_load(_counted(0, 0), path)
    assert [name for name in plan.left if "extra" in name] == [f"{i}._extra_state" for i in range(3)]
    plan.apply(only="1._extra_state")
    assert [plan.model[i].calls for i in range(3)] == [0, 8, 0]
    plan.apply()
    assert ([plan.model[i].calls for i in range(3)], plan.left) == ([7, 8, 7], ())


def test_extra_state_is_unexpected_where_no_module_takes_it(tmp_path):
    tt.save(_counted(1, 2), tmp_path)
    plain = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    with pytest.raises(tt.LoadError, match="0._extra_state: the model does not have it"):
        tt.load(plain, tmp_path, ties="model")


def test_progress_is_told_every_byte(saved, capsys):
    _, folder = saved
    told = []
    report = tt.load(build(Tied, meta=True), folder, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (report.bytes, report.bytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    tt.load(build(Tied, meta=True), folder, progress=True)
    assert "100%" in capsys.readouterr().err


@pytest.mark.parametrize("is_held", [False, True], ids=["plain", "Weight"])
def test_a_real_model_that_is_encoded_twice_reports_all_bytes(tmp_path, is_held):
    """Faults of values are found before anything changes, which takes a first reading without memory for its result."""
    tt.save(nn.Linear(8, 4), tmp_path / "x")
    model, stored, told = nn.Linear(8, 4), 4 * (8 * 4 + 4), []
    if is_held:
        tt.quantize(model, "int8")
    plan = tt.plan_load(model, tmp_path / "x", quantize="int8")
    report = plan.apply(progress=lambda done, total: told.append((done, total)))
    plan.close()
    assert plan.bytes == report.bytes == stored + 4 * 8 * 4
    assert told[-1] == (report.bytes, report.bytes)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert tt.load(nn.Linear(8, 4, device="meta"), tmp_path / "x", quantize="int8").bytes == stored


def test_the_report_is_one_line_of_facts(saved):
    _, folder = saved
    report = tt.load(build(Tied, meta=True), folder, quantize="int8")
    assert "\n" not in str(report)
    assert "tied: emb.weight = head.weight" in str(report)
    assert "2 quantized" in str(report)
    assert report.seconds > 0
    assert report.tensors == 6


def test_planning_touches_nothing_and_shows_every_step(saved):
    _, folder = saved
    model = build(Tied, meta=True)
    plan = tt.plan_load(model, folder, quantize="int8")
    assert all(tensor.is_meta for tensor in named_tensors(model).values())
    text = str(plan)
    assert "emb.weight = head.weight: [12, 8] torch.float32 -> torch.float32 on cpu as int8" in text
    plan.apply()
    plan.close()
    assert isinstance(model.head.weight, tt.Weight)


def test_a_plan_for_a_model_that_changed_is_refused(saved):
    _, folder = saved
    model = build(Tied)
    plan = tt.plan_load(model, folder)
    model.mid.weight = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(tt.LoadError, match=r"mid.weight: the model has another tensor.*Plan again"):
        plan.apply()
    plan.close()
    model = build(Tied)
    plan = tt.plan_load(model, folder)
    del model.mid._parameters["weight"]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(tt.LoadError, match=r"mid.weight: the model has another tensor.*Plan again"):
        plan.apply()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    plan.close()


SINCE = {
    "quantized": lambda model: tt.quantize(model, {"mid.weight": "int8"}),
    "converted": lambda model: tt.convert(model, dtype=torch.bfloat16),
    "dequantized": tt.dequantize,
}


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("since", SINCE)
def test_a_plan_for_tensors_of_another_kind_is_refused(saved, since, meta):
    """The Parameters are the same objects, but the plan would undo the change, or be in between."""
    _, folder = saved
    model = build(Tied, meta=meta)
    if since == "dequantized":
        tt.quantize(model, {"mid.weight": "int8"})
    plan = tt.plan_load(model, folder)
    SINCE[since](model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(tt.LoadError, match=r"weight: the model holds it in another dtype or scheme.*Plan again"):
        plan.apply()
    plan.close()
    for name, tensor in model.state_dict().items():
        assert (tensor.is_meta, tensor.dtype, type(tensor)) == (meta, before[name].dtype, type(before[name]))
        assert meta or torch.equal(tensor, before[name])


@pytest.mark.parametrize("ties", ["match", "file"])
def test_what_a_plan_has_loaded_may_change_before_the_rest_is_loaded(saved, ties):
    _, folder = saved
    model = build(Tied, meta=True)
    if ties == "file":
        tt.untie(model, "head.weight")
    plan = tt.plan_load(model, folder, ties=ties)
    plan.apply(only="mid.*")
    tt.quantize(model, {"mid.weight": "int8"})
    plan.apply()
    plan.close()
    assert isinstance(model.mid.weight, tt.Weight)
    assert not model.emb.weight.is_meta
    assert model.head.weight is model.emb.weight


# -- ties that disagree -----------------------------------------------------------------------------------------------


def untied(**changes):
    """The state dict of a ``Tied`` whose head is stored as a tensor of its own."""
    state = {name: tensor.clone() for name, tensor in build(Tied).state_dict().items()}
    return {**state, **changes}


def test_equal_copies_of_tied_tensors_are_loaded_once(tmp_path):
    tt.save(untied(), tmp_path / "x")
    model = build(Tied, meta=True)
    tt.load(model, tmp_path / "x")
    assert model.head.weight is model.emb.weight


def test_other_values_under_a_tied_name_are_a_fault_unless_one_chooses(tmp_path):
    state = untied(**{"head.weight": torch.full((12, 8), 3.0)})
    tt.save(state, tmp_path / "x")
    for meta in (True, False):
        model = build(Tied, meta=meta, seed=4)
        with pytest.raises(
            tt.LoadError, match="head.weight: the model ties it to emb.weight, the checkpoint has other values"
        ):
            tt.load(model, tmp_path / "x")
        tt.load(model, tmp_path / "x", ties="model")
        assert model.head.weight is model.emb.weight
        assert torch.equal(model.emb.weight, state["emb.weight"])
        model = build(Tied, meta=meta, seed=4)
        tt.load(model, tmp_path / "x", ties="file")
        assert model.head.weight is not model.emb.weight
        assert torch.equal(model.head.weight, state["head.weight"])
        assert torch.equal(model.emb.weight, state["emb.weight"])


@pytest.mark.parametrize("is_tied", [True, False])
def test_ties_of_the_file_do_not_leave_the_optimizer_behind(tmp_path, is_tied):
    tt.save(untied(**{"head.weight": torch.full((12, 8), 3.0)}) if is_tied else build(Tied), tmp_path / "x")
    model = build(Tied, meta=True)
    if not is_tied:
        tt.untie(model, "head.weight")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(tt.LoadError, match="x: head.weight: ties='file' replaces this Parameter, which the optimizer"):
        tt.load(model, tmp_path / "x", ties="file", optimizer=optimizer)
    assert model.emb.weight.is_meta
    assert (model.head.weight is model.emb.weight) == is_tied
    tt.check_optimizer(model, optimizer)
    others = torch.optim.AdamW(model.mid.parameters())
    tt.load(model, tmp_path / "x", ties="file", optimizer=others)
    assert (model.head.weight is model.emb.weight) != is_tied


@pytest.mark.parametrize("flat", [True, False])
def test_a_tie_of_the_file_that_the_model_lacks(tmp_path, flat):
    source = build(Tied)
    if flat:
        safetensors.torch.save_model(source, str(tmp_path / "x.safetensors"))
    else:
        tt.save(source, tmp_path / "x.safetensors")
    for meta in (True, False):
        model = build(Tied, meta=meta, seed=4)
        tt.untie(model, "head.weight")
        with pytest.raises(tt.LoadError, match="head.weight: the checkpoint ties it to emb.weight, the model does not"):
            tt.load(model, tmp_path / "x.safetensors")
        tt.load(model, tmp_path / "x.safetensors", ties="model")
        assert model.head.weight is not model.emb.weight
        assert model.head.weight.data_ptr() != model.emb.weight.data_ptr()
        assert torch.equal(model.head.weight, source.emb.weight)
        assert torch.equal(model.emb.weight, source.emb.weight)
        tt.load(model, tmp_path / "x.safetensors", ties="file")
        assert model.head.weight is model.emb.weight


@pytest.mark.parametrize("meta", [True, False])
def test_rows_that_no_stored_name_has_are_missing(tmp_path, meta):
    table, model = torch.arange(64.0).view(16, 4), nn.Module()
    model.low, model.high = nn.Parameter(table[:8]), nn.Parameter(table[4:12])
    safetensors.torch.save_file({"low": torch.ones(8, 4)}, tmp_path / "x.safetensors")
    if meta:
        with tt.swapping(model):
            model.to_empty(device="meta")
    with pytest.raises(tt.LoadError, match="high"):
        tt.load(model, tmp_path / "x.safetensors", device="cpu")
    with pytest.raises(tt.LoadError, match="high"):
        tt.refit(model, {"low": torch.ones(8, 4)})


@pytest.mark.parametrize("meta", [True, False])
def test_views_that_are_stored_apart_fill_one_memory(tmp_path, meta):
    source = build(Fused)
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    tt.save(state, tmp_path / "x")
    model = build(Fused, meta=meta, seed=4)
    tt.load(model, tmp_path / "x")
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert model.q.data_ptr() == model.qkv.data_ptr()
    tt.save({**state, "q": state["q"] + 1}, tmp_path / "y")
    with pytest.raises(tt.LoadError, match="q: the model ties it to"):
        tt.load(model, tmp_path / "y")
    for again in (model, build(Fused, meta=meta, seed=5)):
        tt.load(again, tmp_path / "y", ties="model")
        assert torch.equal(again.qkv, source.qkv)  # the owner has the last word
        assert torch.equal(again.q, source.q)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64, torch.float16, torch.int8], ids=str)
def test_views_of_every_width_are_compared(tmp_path, dtype):
    def halves(values):
        model = nn.Module()
        model.low, model.high = (nn.Parameter(part, False) for part in (values[:3], values[1:]))
        return model

    source = halves(torch.arange(16).view(4, 4).to(dtype))
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    torch.save(state, tmp_path / "x.pt")
    model = halves(torch.zeros(4, 4, dtype=dtype))
    tt.load(model, tmp_path / "x.pt")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert model.high.data_ptr() == model.low[1].data_ptr()
    if dtype.is_floating_point or dtype.is_complex:
        state["low"][1, 1] = state["high"][0, 1] = float("nan")
        torch.save(state, tmp_path / "nan.pt")
        tt.load(model, tmp_path / "nan.pt")
        assert model.high[0, 1].isnan()
    state["high"][0, 0] += 1
    torch.save(state, tmp_path / "y.pt")
    with pytest.raises(tt.LoadError, match="high: the model ties it to low, the checkpoint has other values"):
        tt.load(model, tmp_path / "y.pt")


def test_slices_that_do_not_cover_a_tensor_leave_it_missing(tmp_path):
    source = build(Fused)
    tt.save({"q": source.q, "kt": source.kt, "row": source.row}, tmp_path / "x")
    model = build(Fused)
    with pytest.raises(tt.LoadError, match="qkv: the checkpoint does not have it"):
        tt.load(model, tmp_path / "x")


def test_an_alias_that_another_tool_edited_is_a_fault(tmp_path):
    tt.save(build(Turned), tmp_path / "x.safetensors", aliases="copy")
    path = tmp_path / "x.safetensors"
    from torchtether.files import TensorFile

    with TensorFile(path) as file:
        at = file.stored("turned").start
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(tt.LoadError, match="turned: its stored copy differs from emb.weight"):
        tt.load(build(Turned, meta=True), path)


def test_loading_twice_and_a_deepcopy_work(saved):
    source, folder = saved
    model = build(Tied, meta=True)
    tt.load(model, folder)
    other = copy.deepcopy(model)
    tt.load(other, folder)
    assert torch.equal(other(torch.tensor([3])), source(torch.tensor([3])))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_load_inside_autocast_is_seen_at_once(tmp_path, depth):
    """Autocast keeps casts of parameters until its end, those of the values before a load among them."""
    tt.save({"weight": torch.full((2, 2), 9.0)}, tmp_path / "x.safetensors")
    model = nn.Linear(2, 2, bias=False)
    with contextlib.ExitStack() as stack:
        for _ in range(depth):
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            model(torch.ones(1, 2))
        tt.load(model, tmp_path / "x.safetensors")
        assert model(torch.ones(1, 2)).tolist() == [[18.0, 18.0]]


def test_materializing_inside_autocast_is_seen_at_once():
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)

    def init(module):
        with torch.no_grad():
            module.weight.fill_(1)
        module(torch.ones(1, 2))
        with torch.no_grad():
            module.weight.fill_(9)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        tt.materialize(model, init=init)
        assert model(torch.ones(1, 2)).tolist() == [[18.0, 18.0]]


@pytest.mark.parametrize("way", ["load", "mmap", "plan"])
def test_a_spectral_norm_on_meta_is_computed_after_the_load(tmp_path, way):
    source, x = nn.utils.spectral_norm(nn.Linear(4, 4)), torch.randn(3, 4)
    tt.save(source, tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = nn.utils.spectral_norm(nn.Linear(4, 4))
    if way == "plan":
        tt.plan_load(model, tmp_path / "x.safetensors").apply()
    else:
        tt.load(model, tmp_path / "x.safetensors", mmap=way == "mmap")
    assert not model.weight.is_meta
    source.eval(), model.eval()
    torch.testing.assert_close(model(x), source(x))
