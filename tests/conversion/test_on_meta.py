"""Buffers that constructors compute are restored exactly: a catalog of them."""

import copy
import gc
import math
import pickle
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import torchtether as tt
from tests.ties.models import transposed
from torchtether.conversion import building
from torchtether.conversion.recording import Recorder
from torchtether.conversion.replaying import Replay
from torchtether.ties.names import named_tensors

F = torch.nn.functional


def rotary():
    return 1.0 / (10000 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16))


def causal_mask():
    return torch.tril(torch.ones(6, 6, dtype=torch.bool)).view(1, 1, 6, 6)


def additive_mask():
    mask = torch.full((5, 5), float("-inf"))
    return torch.triu(mask, diagonal=1)


def sinusoid():
    table = torch.zeros(10, 8)
    position = torch.arange(10, dtype=torch.float).unsqueeze(1)
    step = torch.exp(torch.arange(0, 8, 2).float() * -(math.log(10000.0) / 8))
    table[:, 0::2] = torch.sin(position * step)
    table[:, 1::2] = torch.cos(position * step)
    return table.unsqueeze(0)


def complex_rotary():
    angles = torch.outer(torch.arange(6), rotary())
    return torch.polar(torch.ones_like(angles), angles)


def conjugate():
    return complex_rotary().conj()


def negative():
    return complex_rotary().conj().imag


def constant():
    return torch.tensor([1.5, -2.0, 3.25])


def constant_of_ints():
    return torch.tensor([[1, 2], [3, 4]])


def scalar():
    return torch.tensor(7, dtype=torch.int32)


def as_tensor():
    return torch.as_tensor([0.1, 0.2], dtype=torch.float64)


def from_numpy():
    return torch.as_tensor(np.linspace(0, 1, 5, dtype=np.float32))


def new_tensor():
    return torch.zeros(2, dtype=torch.float16).new_tensor([5, 6])


def in_place():
    table = torch.ones(4, 4)
    table.mul_(3).add_(torch.eye(4)).clamp_(max=3.5)
    table[1].fill_(-1)
    table[table < 0] = 9
    table[2, 3] = 7
    return table


def view():
    return torch.arange(24.0).view(2, 3, 4).transpose(0, 2)[1:, :, 0]


def expanded():
    return torch.arange(5).expand((1, -1))


def half():
    return torch.linspace(0, 1, 7).half()


def default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return torch.arange(6) / 7 + torch.ones(6)
    finally:
        torch.set_default_dtype(before)


def relative_positions():
    """Swin's index table."""
    grid = torch.stack(torch.meshgrid([torch.arange(3), torch.arange(3)], indexing="ij")).flatten(1)
    relative = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += 2
    relative[:, :, 1] += 2
    relative[:, :, 0] *= 5
    return relative.sum(-1)


def alibi():
    slopes = torch.tensor([2 ** (-8 * (i + 1) / 4) for i in range(4)])
    return slopes.view(4, 1, 1) * torch.arange(6).view(1, 1, 6)


def indexed_by_lists():
    table = torch.arange(24.0).view(4, 6)
    table[[0, 2]] = -1.0
    table[:, [1, 3]] += 0.5
    table[range(2), (4, 5)] = 7.0
    table[[]] = 9.0
    return torch.cat([table[[3, 1]], table[[True, False, True, False]], table[([[0, 1], [2, 3]],)].flatten(0, 1)])


def of_scalars():
    return torch.tensor([[rate * 2, 1.0] for rate in torch.linspace(0, 1, 3)] + [[torch.tensor(3.0), 4]])


def element_by_element():
    table = torch.arange(6.0).view(2, 3)
    table[1].apply_(lambda x: x * x)
    return table.map_(torch.ones(2, 3), lambda x, y: x - y)


def data_dependent():
    return torch.tensor([0, 3, 0, 1]).nonzero().flatten()


def kernel():
    window = torch.hann_window(6, periodic=False)
    return F.pad((window / window.sum()).outer(window), (1, 1))


def from_cpu():
    """Some code names the CPU, and moves what it made there."""
    return (torch.arange(4.0, device="cpu") * 2).to(torch.empty(0).device)


def empty():
    return torch.zeros(0, 4)


CATALOGUE = [
    rotary, causal_mask, additive_mask, sinusoid, complex_rotary, conjugate, negative, constant, constant_of_ints,
    scalar, as_tensor, from_numpy, new_tensor, in_place, view, expanded, half, default_dtype, relative_positions, alibi,
    indexed_by_lists, of_scalars, element_by_element, data_dependent, kernel, from_cpu, empty,
]  # fmt: skip


class Holder(nn.Module):
    def __init__(self, make, persistent=False):
        super().__init__()
        self.register_buffer("it", make(), persistent=persistent)
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("make", CATALOGUE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("through", ["as built", "deepcopy", "pickle"])
def test_buffers_come_back_exactly(make, through):
    expected = make()
    with tt.on_meta():
        model = Holder(make)
    assert model.it.is_meta
    if through == "deepcopy" and make not in (conjugate, negative):  # stock deepcopy refuses lazy bits on meta
        model.it = copy.deepcopy(model.it)
    if through == "pickle" and make not in (conjugate, negative):
        model = pickle.loads(pickle.dumps(model))
    buffer = model.it
    assert tt.materialize(model) is model
    assert model.it is buffer
    assert (buffer.dtype, buffer.shape) == (expected.dtype, expected.shape)
    assert buffer.stride() == expected.stride() or through == "deepcopy"
    assert torch.equal(buffer, expected)
    assert not [name for name in (*vars(buffer), *vars(model)) if "tether" in name]


def test_a_deepcopied_model_keeps_its_buffers():
    with tt.on_meta():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model.register_buffer("inv", rotary(), persistent=False)
    other = tt.materialize(copy.deepcopy(model))
    assert torch.equal(other.inv, rotary())
    assert model.inv.is_meta
    assert torch.equal(tt.materialize(model).inv, rotary())


class Views(nn.Module):
    """A table, rows of it, and a view that is a mere attribute."""

    def __init__(self):
        super().__init__()
        table = torch.ones(4, 6)
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("rows", table[1:3], persistent=False)
        self.first = [table[0]]


@pytest.mark.parametrize("way", ["materialize", "load"])
def test_copies_made_after_the_block_share_no_memory(way, tmp_path):
    def copies(module):
        return nn.ModuleList([module, copy.deepcopy(module), torch.optim.swa_utils.AveragedModel(module)])

    torch.manual_seed(3)
    eager = copies(Views())
    with tt.on_meta():
        module = Views()
    model = copies(module)
    torch.manual_seed(3)
    if way == "materialize":
        tt.materialize(model)
    else:
        tt.save(eager, tmp_path / "copies.safetensors")
        tt.load(model, tmp_path / "copies.safetensors")
    assert tt.find_ties(model) == tt.find_ties(eager)
    for name, tensor in named_tensors(eager).items():
        assert torch.equal(named_tensors(model)[name], tensor), name
    firsts = [model[0].first[0], model[1].first[0], model[2].module.first[0]]
    tables = [model[0].table, model[1].table, model[2].module.table]
    assert [x.data_ptr() for x in firsts] == [x.data_ptr() for x in tables]
    assert len({x.data_ptr() for x in tables}) == 3


def test_an_untied_tensor_has_memory_of_its_own():
    with tt.on_meta():
        model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        model[1].weight = model[0].weight
    tt.untie(model, "1.weight")
    tt.materialize(model)
    assert torch.equal(model[0].weight, model[1].weight)
    assert tt.find_ties(model) == ()


def test_modules_that_are_copied_in_a_constructor_have_what_they_copy():
    """``deepcopy`` registers the parts of a copy nowhere."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
            nn.init.constant_(self.inner[0].weight, 5.0)
            self.inner[1].register_buffer("shift", torch.arange(3.0), persistent=False)

    def make():
        layer = Scaled()
        copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        return nn.ModuleList([copies, encoder, nn.Transformer(8, 2, 1, 1, 16, batch_first=True)])

    torch.manual_seed(3)
    eager = make()
    with tt.on_meta():
        model = make()
    torch.manual_seed(3)
    tt.materialize(model)
    for name, tensor in named_tensors(eager).items():
        assert torch.equal(named_tensors(model)[name], tensor), name


def test_buffers_follow_a_dtype_conversion_on_meta():
    with tt.on_meta():
        model = Holder(rotary)
    model.bfloat16()
    assert torch.equal(tt.materialize(model).it, rotary().bfloat16())


def test_writes_after_registration_and_between_modules_count():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.zeros(4))
            self.register_buffer("tail", self.a[2:])
            self.a[1] = 5
            self.tail.add_(1)
            self.same = self.a

    eager = Late()
    with tt.on_meta():
        model = Late()
    tt.materialize(model)
    assert torch.equal(model.a, eager.a)
    assert torch.equal(model.tail, eager.tail)
    model.a.zero_()
    assert not model.tail.any()
    assert model.same is model.a
    assert [tie.names for tie in tt.find_ties(model)] == [("a", "tail")]


def materialized(model, path):
    return tt.materialize(model)


def loaded(model, path):
    tt.save(nn.Linear(2, 2), path / "linear.safetensors")
    tt.load(model, path / "linear.safetensors", rename=[("^", "linear.")])
    return model


class Attribute(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept = keep(self)


KEPT = {
    "plain": (lambda _: alibi(), lambda kept: kept),
    "list": (lambda _: [1, alibi()], lambda kept: kept[1]),
    "tuple": (lambda _: (alibi(), "cos"), lambda kept: kept[0]),
    "dict": (lambda _: {8: {"cos": alibi()}}, lambda kept: kept[8]["cos"]),
    "object": (lambda _: SimpleNamespace(cos=alibi()), lambda kept: kept.cos),
}


@pytest.mark.parametrize("way", [materialized, loaded])
@pytest.mark.parametrize("kind", KEPT)
def test_tensors_that_are_mere_attributes_come_back(kind, way, tmp_path):
    keep, find = KEPT[kind]
    with tt.on_meta():
        model = nn.Sequential(OrderedDict(first=Attribute(keep)))
        model.again = model.first.kept
    model = model.first if way is loaded else model
    module = model if way is loaded else model.first
    before = find(module.kept)
    assert way(model, tmp_path) is model
    assert torch.equal(find(module.kept), alibi())
    assert find(module.kept) is before
    assert not [name for held in (before, module.linear.weight) for name in vars(held) if "tether" in name]


def test_a_container_is_searched_from_its_nearest_holder():
    """Its first path may be so long that the search ends within it."""
    with tt.on_meta():
        cache = {"cos": {8: alibi()}}
        model = nn.Sequential(OrderedDict(far=Attribute(lambda _: [[[cache]]]), near=Attribute(lambda _: cache)))
    tt.materialize(model)
    assert torch.equal(cache["cos"][8], alibi())


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_weights_that_hooks_compute_are_left_to_them(normed):
    with tt.on_meta():
        layer = normed(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    assert torch.equal(tt.materialize(layer)(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert not layer.weight.is_meta


@pytest.mark.parametrize("way", [materialized, loaded])
@pytest.mark.parametrize("where", [torch.device("meta"), None], ids=["meta", "on_meta"])
def test_attributes_that_stay_on_meta_are_named(where, way, tmp_path):
    """A view of a parameter would get the values from before the load; one without a record has none."""
    with where or tt.on_meta():
        model = Attribute(lambda module: [module.linear.weight.detach().t()])
    if way is materialized and where is None:
        assert torch.equal(way(model, tmp_path).kept[0], model.linear.weight.t())
        assert model.kept[0].data_ptr() == model.linear.weight.data_ptr()
        return
    with pytest.warns(UserWarning, match=r"^kept\[0\]: neither a parameter nor a buffer of .* stays on meta\. "):
        way(model, tmp_path)
    assert not model.linear.weight.is_meta


class Hidden(nn.Module):
    """A teacher in a list, so that it is no part of the model, and a child that knows its parent."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.linear.parent = [self]
        self.teacher = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]
        self.teacher[0][0].parent = [self]
        self.teacher[0].kept = {"ramp": torch.arange(3)}


@pytest.mark.parametrize("way", [materialized, loaded])
def test_modules_that_are_hidden_in_lists_are_computed_too(way, tmp_path):
    torch.manual_seed(5)
    eager = Hidden()
    with tt.on_meta():
        model = Hidden()
    weight = model.teacher[0][0].weight
    torch.manual_seed(5)
    way(model, tmp_path)
    (teacher,), (expected,) = model.teacher, eager.teacher
    assert teacher[0].weight is weight
    assert type(weight) is nn.Parameter
    assert {n: t.device.type for n, t in teacher.state_dict().items()} == dict.fromkeys(expected.state_dict(), "cpu")
    assert torch.equal(teacher.kept["ramp"], torch.arange(3))
    assert torch.equal(teacher[1].running_var, expected[1].running_var)
    if way is materialized:  # a load draws no numbers for the weights of the model
        assert all(torch.equal(tensor, expected.state_dict()[n]) for n, tensor in teacher.state_dict().items())
    assert b"torchtether" not in pickle.dumps(model)  # no record is left behind


def test_views_of_buffers_may_be_plain_attributes():
    with tt.on_meta():
        model = Views()
    tt.materialize(model)
    model.table.fill_(3)
    assert torch.equal(model.rows, torch.full((2, 6), 3.0))
    assert torch.equal(model.first[0], torch.full((6,), 3.0))


@pytest.mark.parametrize("way", [materialized, loaded])
def test_no_record_is_left_behind(way, tmp_path):
    with tt.on_meta():
        model = Attribute(lambda _: None)
    assert b"torchtether" not in pickle.dumps(way(model, tmp_path))


@pytest.mark.parametrize("way", [materialized, loaded])
def test_modules_hidden_in_lists_that_stay_on_meta_are_named(way, tmp_path):
    with torch.device("meta"):
        model = Hidden()
    with pytest.warns(UserWarning, match=r"^teacher\[0\]\.kept\['ramp'\], teacher\[0\]\.0\.weight, .* stays on meta"):
        way(model, tmp_path)


def test_a_hidden_module_that_was_converted_since_is_named():
    """Its record has the old dtype."""
    with tt.on_meta():
        model = Hidden()
    model.teacher[0][0].bfloat16()
    with pytest.warns(UserWarning, match=r"^teacher\[0\]\.0\.weight, teacher\[0\]\.0\.bias: neither a parameter"):
        tt.materialize(model)
    assert {tensor.dtype for tensor in model.teacher[0][0].parameters()} == {torch.bfloat16}


def test_the_parent_of_a_module_is_left_alone():
    with tt.on_meta():
        model = Hidden()
    tt.materialize(model.linear)
    tt.materialize(model)
    with torch.device("meta"):
        model = Hidden()
    tt.materialize(model.linear)  # no warning of the parent's other modules
    assert all(tensor.is_meta for tensor in model.teacher[0].parameters())


def test_code_that_asks_for_values_gets_them():
    with tt.on_meta():
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        table = torch.arange(4).tolist()
        asked = (bool(torch.ones(1)), int(torch.tensor(3)), torch.equal(torch.ones(2), torch.ones(2)))
    assert rates == [rate.item() for rate in torch.linspace(0, 0.1, 3)]
    assert table == [0, 1, 2, 3]
    assert asked == (True, 3, True)


def test_text_of_a_scalar_is_that_of_its_value():
    with tt.on_meta():
        half = torch.linspace(0, 1, 3)[1]
        assert (f"{half}", f"{half:.2f}", f"level_{torch.tensor(3)}") == ("0.5", "0.50", "level_3")
        assert "meta" in f"{torch.ones(3)}"


def test_random_values_are_not_made_up():
    with tt.on_meta(), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        torch.rand(1).item()


def test_a_tensor_of_random_scalars_can_be_made():
    """Stock ``meta`` makes it; what its values are, the record does not say."""
    with tt.on_meta():
        made = torch.tensor([torch.rand(()), torch.rand(())])
    assert made.is_meta
    assert made.shape == (2,)


def test_random_values_that_python_changes_one_by_one_are_not_made_up():
    with tt.on_meta():
        model = Holder(lambda: torch.rand(3).apply_(lambda x: x + 1))
    with pytest.raises(tt.ConversionError, match=r"^it: on meta, without a record of values"):
        tt.materialize(model)


def test_parameters_are_what_their_constructor_makes():
    """Also where reset_parameters knows nothing of it: zeroed residual branches, bare parameters."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
            nn.init.zeros_(self.down.weight)
            self.scale = nn.Parameter(torch.full((3,), 0.5))
            self.emb = nn.Embedding(5, 4, padding_idx=2)
            self.register_buffer("shadow", self.up.weight.detach().clone())

    torch.manual_seed(3)
    eager = Block()
    with tt.on_meta():
        model = Block()
    torch.manual_seed(3)
    tt.materialize(model)
    for name, tensor in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("is_training", [True, False])
def test_a_forward_in_a_constructor_changes_the_running_statistics(is_training):
    """The schema of the op does not say that it writes."""

    def make():
        model = nn.Sequential(nn.LazyConv1d(3, 2), nn.LazyBatchNorm1d(), nn.InstanceNorm1d(3, track_running_stats=True))
        model.train(is_training)(torch.ones(2, 4, 8))
        return model

    torch.manual_seed(3)
    eager = make().state_dict()
    with tt.on_meta():
        model = make()
    torch.manual_seed(3)
    state = tt.materialize(model).state_dict()
    assert {name: tensor.tolist() for name, tensor in state.items()} == {n: t.tolist() for n, t in eager.items()}
    assert state["1.running_var"].eq(1).all() != is_training


def test_the_output_of_a_batch_norm_that_does_not_train():
    """The op returns its statistics, too: of the features on ``meta``, and empty on the CPU."""

    def make():
        norm = nn.BatchNorm1d(4).eval()
        norm.register_buffer("made", norm(torch.arange(8.0).view(2, 4)).detach())
        return norm

    with tt.on_meta():
        norm = make()
    assert torch.equal(tt.materialize(norm).made, make().made)


def test_a_dropped_tie_partner_and_a_tie_made_later():
    with tt.on_meta():
        model = nn.ModuleDict({"emb": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        nn.init.constant_(model["emb"].weight, 2.0)
        nn.init.constant_(model["head"].weight, 3.0)
    tt.tie(model, "head.weight", "emb.weight")
    tt.materialize(model)
    assert model["emb"].weight is model["head"].weight
    assert torch.equal(model["emb"].weight, torch.full((6, 4), 3.0))


def test_a_large_real_tensor_that_changes_later_is_not_trusted():
    with tt.on_meta():
        source = torch.zeros(2**20 + 1, device="cpu")
        model = nn.Module()
        model.register_buffer("kept", source.to("meta"))
        other = torch.ones(2**20 + 1, device="cpu")
        model.register_buffer("lost", other.to("meta"))
        other.zero_()
    with pytest.raises(tt.ConversionError, match=r"^lost: on meta, without a record of values"):
        tt.materialize(model)


def test_the_record_keeps_nothing_of_the_model():
    with tt.on_meta():
        model = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.BatchNorm1d(4))
    reference = weakref.ref(model[0])
    program = model[1].running_var._tether_recipe.program
    assert not [x for x in gc.get_referrers(model[0].weight) if isinstance(x, Recorder)]
    del model
    gc.collect()
    assert reference() is None
    assert program.steps


def test_an_error_inside_leaves_no_mode_and_nothing_that_watches():
    with pytest.raises(ZeroDivisionError), tt.on_meta():
        nn.Linear(2, 1 // 0)
    assert torch.ones(1).device.type == "cpu"
    assert not building._WATCHERS.all


def test_a_block_in_another_thread_while_a_module_is_built():
    """torch loops over the hooks of all threads for each parameter, which fails if one comes or goes meanwhile."""

    def build():
        with tt.on_meta():
            nn.Linear(2, 2)

    def during(module, name, parameter):
        if threading.current_thread() is not threading.main_thread():
            return
        other = threading.Thread(target=build)
        other.start()
        other.join()

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(during)
    try:
        build()
    finally:
        hook.remove()


def test_an_alias_alone_does_not_tell_the_owners_values():
    with tt.on_meta():
        model = transposed()
    del model.a._tether_recipe
    with pytest.raises(tt.ConversionError, match=r"^a: on meta, without a record of values"):
        tt.materialize(model)


def test_replaying_frees_what_only_led_to_the_result():
    with tt.on_meta():
        model = Holder(sinusoid)
    assert len(Replay([model.it._tether_recipe], torch.device("cpu"))._memory) == 1


def test_replaying_restores_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    with tt.on_meta():
        model = nn.Module()
        model.register_buffer("it", torch.arange(6) / 7)
    torch.set_default_dtype(torch.float32)
    assert tt.materialize(model).it.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_results_that_depend_on_the_default_dtype_by_their_out_come_back():
    """The dtype of ``out=`` is not that in which integers are divided."""

    def make():
        return torch.div(torch.arange(6), torch.tensor(7), out=torch.empty(6, dtype=torch.float32))

    torch.set_default_dtype(torch.bfloat16)
    expected = make()
    with tt.on_meta():
        model = Holder(make)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(tt.materialize(model).it, expected)


def test_ops_of_other_libraries_are_replayed_with_the_arguments_that_they_had():
    """They may take a dtype without a name, and mean by one what they want."""
    library = torch.library.Library("tether_recorded", "DEF")
    try:
        library.define("filled(int n, ScalarType dtype, Device device) -> Tensor")
        library.define("counted(int n, *, ScalarType? dtype=None, Device device) -> Tensor")
        filled = lambda n, dtype, device: torch.full((n,), 1.5, dtype=dtype, device=device)  # noqa: E731
        counted = lambda n, *, dtype=None, device: torch.full((n,), 1 if dtype is None else 2, device=device)  # noqa: E731
        library.impl("filled", filled, "CompositeExplicitAutograd")
        library.impl("counted", counted, "CompositeExplicitAutograd")
        ops, meta = torch.ops.tether_recorded, torch.device("meta")
        with tt.on_meta():
            one, other = Holder(lambda: ops.filled(3, torch.float32, meta)), Holder(lambda: ops.counted(3, device=meta))
        assert tt.materialize(one).it.tolist() == [1.5] * 3
        assert tt.materialize(other).it.tolist() == [1] * 3
    finally:
        library._destroy()


def test_layers_are_replayed_without_setting_the_default_dtype(monkeypatch):
    """It holds in all threads: one that builds a layer meanwhile would get the wrong dtype."""
    torch.set_default_dtype(torch.bfloat16)
    with tt.on_meta():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Embedding(4, 4), nn.Conv1d(4, 4, 1))
        model.register_buffer("it", torch.arange(6.0).sin() + torch.full((6,), 0.5))
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(torch, "set_default_dtype", None)
    tt.materialize(model)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16, torch.int64}


def test_the_compiler_is_not_imported():
    code = "import sys, torch, torchtether as tt\nwith tt.on_meta(): torch.nn.Linear(2, 2)\n"
    subprocess.run([sys.executable, "-c", code + "assert 'torch._dynamo' not in sys.modules"], check=True)


def test_another_thread_is_not_recorded():
    made = []
    with tt.on_meta():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert made[0].weight.device.type == "cpu"
    assert not vars(made[0].weight)


def test_what_cannot_run_still_says_so():
    with tt.on_meta(), pytest.raises(RuntimeError, match="must match"):
        torch.ones(2, 3) + torch.ones(4)


def test_a_constructor_that_goes_on_without_an_op_is_warned_of():
    """``parametrizations.orthogonal`` catches NotImplementedError, and leaves a weight that is not orthogonal."""

    with pytest.warns(UserWarning, match=r"aten::geqrf: not possible on meta, and the code") as caught, tt.on_meta():
        nn.utils.parametrizations.orthogonal(nn.Linear(3, 4), orthogonal_map="householder", use_trivialization=False)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(NotImplementedError), tt.on_meta():
        torch.geqrf(torch.rand(3, 3))  # an error that leaves the block needs no warning
