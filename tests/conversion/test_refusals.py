"""A conversion that is impossible raises before any change, with the parameter, its holder, and a fix."""

import pickle
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchtether as tt
from tests.conversion.models import KINDS, OPTIMIZERS, rig, snapshot, tied
from torchtether import ConversionError, OptimizerError
from torchtether.conversion.converting import convert


@contextmanager
def refused(made, match, error=ConversionError):
    """Assert that the block raises ``error`` with a matching text of one line, and changes nothing."""
    before = snapshot(made.model, made.optimizer)
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert snapshot(made.model, made.optimizer) == before


HOLDERS = {
    "C++ weak reference": (torch._C._WeakTensorRef, r"held by a weak reference in C\+\+"),
    "view": (lambda p: p.view(-1), r"held by a view of it \(a tensor of shape \(16,\) .*'holder'.*Delete the view"),
    "view without grad": (
        lambda p: torch.no_grad()(lambda: p[1:])(),
        r"held by a view of it \(a tensor of shape \(3, 4\)",
    ),
    "live graph": (lambda p: (p * p).sum(), r"a live graph, between forward and backward .*SumBackward0.*Run backward"),
    "graph without saved values": (lambda p: p.sum(), r"a live graph"),
    "retained graph": (
        lambda p: [loss := (p * p).sum(), loss.backward(retain_graph=True)][0],
        r"a live graph, between forward and backward",
    ),
    "gradient edge": (torch.autograd.graph.get_gradient_edge, r"a live graph.*GradientEdge"),
    "gradient node": (lambda p: p.expand_as(p).grad_fn.next_functions[0][0], r"outside of any visible graph"),
}


@pytest.mark.parametrize(("hold", "match"), HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("atomic", ["checked", "full"])
def test_a_held_parameter_is_named_with_its_holder(hold, match, atomic):
    made = rig(lambda: tied(2))
    made.optimizer.zero_grad()
    holder = hold(made.model.l0.weight)
    with refused(made, r"l0\.weight \(= l1\.weight\): " + ".*" + match):
        convert(made.model, dtype=torch.float64, optimizer=made.optimizer, atomic=atomic)
    del holder
    convert(made.model, dtype=torch.float64, optimizer=made.optimizer, atomic=atomic)


WEAK = {
    "reference": (weakref.ref, lambda holder, p: holder() is p),
    "proxy": (weakref.proxy, lambda holder, p: holder.dtype == p.dtype),
    "dictionary": (lambda p: weakref.WeakValueDictionary({1: p}), lambda holder, p: holder[1] is p),
    "tensor keys": (
        lambda p: [d := torch.utils.weak.WeakTensorKeyDictionary(), d.__setitem__(p, 1)][0],
        lambda holder, p: holder[p] == 1,
    ),
}


@pytest.mark.parametrize(("hold", "is_good"), WEAK.values(), ids=WEAK)
@pytest.mark.parametrize("atomic", ["checked", "full"])
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_weak_references_find_the_object_with_its_new_contents(hold, is_good, atomic, scheme):
    """Averages of weights hold their parameters so."""
    made = rig(lambda: tied(2))
    tt.quantize(made.model, scheme)
    made.step()
    holders = [(hold(p), p) for p in made.model.parameters()]
    for change in (
        lambda: convert(made.model, dtype=torch.float64, optimizer=made.optimizer, atomic=atomic),
        lambda: tt.quantize(made.model, "int4", optimizer=made.optimizer, atomic=atomic),
        lambda: tt.dequantize(made.model, optimizer=made.optimizer, atomic=atomic),
    ):
        change()
        assert all(is_good(holder, p) for holder, p in holders)
        assert {p.dtype for p in made.model.parameters()} == {torch.float64}
        made.model.zero_grad()


def test_a_frozen_weight_that_a_graph_needs_is_held():
    made = rig(KINDS["plain"])
    made.model.requires_grad_(False)
    held = made.model(torch.ones(3, 4, requires_grad=True))
    with refused(made, r"held by a live graph.*AddmmBackward0.*b\.weight"):
        convert(made.model, dtype=torch.float64)
    held.sum().backward()
    convert(made.model, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_between_forward_and_backward(kind):
    made = rig(kind)
    made.seen.clear()
    loss = made.model(torch.ones(3, 4)).sum()
    before = {name: (id(p), p.dtype, p.detach().clone()) for name, p in made.model.named_parameters()}
    with pytest.raises(ConversionError, match=r"a live graph, between forward and backward.*Run backward first"):
        convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    for name, p in made.model.named_parameters():
        assert (id(p), p.dtype) == before[name][:2]
        assert torch.equal(p, before[name][2])
    loss.backward()  # still goes where it should
    assert made.seen
    del loss  # where a model saves nothing for backward, a graph stays live as long as it is held
    convert(made.model, dtype=torch.float64, optimizer=made.optimizer)


def test_a_loss_that_was_backpropagated_does_not_hold():
    """Its graph keeps a node of every parameter alive, but no gradient can pass it again."""
    made = rig(KINDS["lstm"])
    loss = made.model(torch.ones(3, 4)).square().sum()
    loss.backward()
    convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    made.step()


@pytest.mark.parametrize("quantize", [False, True])
def test_losses_of_all_epochs_do_not_hold(quantize):
    """A model that is evaluated in bfloat16 after each epoch, while all its losses are kept with their freed graphs."""
    made = rig(KINDS["plain"])
    if quantize:
        tt.quantize(made.model, "int8", optimizer=made.optimizer)
    losses = []
    for _ in range(3):
        losses.append(made.model(torch.ones(3, 4)).square().sum())
        losses[-1].backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        convert(made.model, dtype=torch.bfloat16, optimizer=made.optimizer)
        convert(made.model, dtype=torch.float32, optimizer=made.optimizer)
    held = made.model(torch.ones(3, 4)).square().sum()
    with refused(made, "a live graph"):
        convert(made.model, dtype=torch.bfloat16)
    del held


def test_a_view_that_is_converted_too_does_not_hold():
    made = rig(KINDS["plain"])
    with torch.no_grad():
        made.model.register_buffer("row", made.model.a.weight[0])
    loss = made.model(torch.ones(3, 4)).square().sum()
    loss.backward()
    convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    assert made.model.row.data_ptr() == made.model.a.weight.data_ptr()


def test_saved_tensor_hooks_are_not_run_by_the_search():
    """Checkpointing recomputes, and offloading reads the disk, in the hook that unpacks a saved tensor."""
    made = rig(KINDS["plain"])

    def unpack(packed):
        raise AssertionError("unpacked")

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        held = made.model(torch.ones(3, 4)).square().sum()
    with refused(made, "a live graph"):
        convert(made.model, dtype=torch.float64)
    del held


def test_all_refusals_are_told_at_once():
    made = rig(KINDS["plain"])
    made.optimizer.zero_grad()
    holder = torch._C._WeakTensorRef(made.model.a.weight), made.model.b.bias.view(2, 2)
    text = r"convert 2 of 4 tensors: 1 is held by a weak.*: a\.weight; 1 is held by a view.*: b\.bias\. Delete.*Del"
    with refused(made, text):
        convert(made.model, dtype=torch.float64)
    del holder


def test_many_refusals_of_one_cause_are_cut_short():
    made = rig(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(10)]))
    refs = [torch._C._WeakTensorRef(p) for p in made.model.parameters()]
    text = (
        r"^20 of 20 tensors are held by a weak reference .*: 0\.weight, 0\.bias, 1\.weight, and 17 more\. Delete [^:]*$"
    )
    with refused(made, text):
        convert(made.model, dtype=torch.float64)
    del refs


def test_a_live_graph_of_a_whole_model_is_said_once():
    made = rig(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(10)]))
    loss = made.model(torch.ones(2, 4)).square().sum()
    with refused(made, "20 of 20 tensors are held by a live graph") as caught:
        convert(made.model, dtype=torch.float64)
    assert len(str(caught.value)) < 300
    del loss


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.uint8])
def test_integer_and_complex_targets(dtype):
    made = rig(KINDS["plain"])
    with refused(made, rf"cannot convert a model to {dtype}, .*use tt\.quantize"):
        convert(made.model, dtype=dtype, optimizer=made.optimizer)


def test_complex_parameters_into_a_real_dtype():
    made = rig(KINDS["plain"])
    made.model.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with refused(made, r"phase: is torch\.complex64, and torch\.float64 would drop its imaginary part"):
        convert(made.model, dtype=torch.float64)


def test_meta_has_no_values_to_move():
    made = rig(KINDS["plain"])
    made.model.b.to("meta")
    with refused(made, r"b\.weight: is on meta and has no values to move to cpu\. Use tt\.materialize"):
        convert(made.model, device="cpu")
    convert(made.model.b, dtype=torch.float64)  # stays on meta
    assert made.model.b.weight.is_meta


def test_lazy_modules():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(ConversionError, match=r"are lazy.*: 1\.weight, 1\.bias\. Run one forward before you convert"):
        convert(model, dtype=torch.float64)
    assert model[0].weight.dtype == torch.float32


def test_a_buffer_in_a_graph():
    made = rig(KINDS["plain"])
    made.model.register_buffer("state", made.model.a.bias.detach().requires_grad_() * 2)
    with refused(made, r"state: is the result of MulBackward0, not a leaf\. Detach it first"):
        convert(made.model, dtype=torch.float64)


def test_inference_mode():
    made = rig(KINDS["plain"])
    with refused(made, r"cannot convert inside torch\.inference_mode"), torch.inference_mode():
        convert(made.model, dtype=torch.float64)


def test_cached_parametrizations():
    made = rig(KINDS["parametrized"])
    with torch.nn.utils.parametrize.cached():
        with torch.no_grad():
            made.model(torch.ones(3, 4))
        with refused(made, r"inside parametrize\.cached"):
            convert(made.model, dtype=torch.float64)


def test_weights_have_no_one_byte_compute_dtype():
    made = rig(KINDS["quantized"])
    with refused(made, r"a\.weight: is a Weight, and torch\.float8_e4m3fn cannot be its compute dtype"):
        convert(made.model, dtype=torch.float8_e4m3fn)


def test_weights_that_share_some_parts():
    made = rig(KINDS["plain"])
    weight = tt.Weight.encode(torch.randn(4, 4), tt.int8())
    other = tt.Weight({**weight.parts, "scale": weight.parts["scale"] * 2}, weight.spec)
    made.model.a.weight = nn.Parameter(weight)
    made.model.b.weight = nn.Parameter(other)
    with refused(made, r"b\.weight: shares only a part of its memory with a\.weight", tt.TieError):
        convert(made.model, device="meta")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_of_another_model(optimizer):
    made, other = rig(KINDS["plain"], optimizer), rig(KINDS["plain"], optimizer)
    with refused(made, r"a\.weight, a\.bias, .*but not in the optimizer, and .*holds 4", OptimizerError):
        convert(made.model, dtype=torch.float64, optimizer=other.optimizer)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_ddp(process_group):
    made = rig(KINDS["plain"])
    wrapped = nn.parallel.DistributedDataParallel(made.model)
    for module in (wrapped, nn.Sequential(wrapped)):
        with refused(made, r"under DistributedDataParallel: .*then wrap it"):
            convert(module, dtype=torch.float64)
    with refused(made, r"DistributedDataParallel, whose reducer"):
        convert(made.model, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore")
def test_fsdp1(process_group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with pytest.raises(ConversionError, match=r"under FullyShardedDataParallel \(FSDP1\)"):
        convert(wrapped, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore")
def test_a_load_of_a_sharded_model_names_the_call_for_it(process_group, tmp_path):
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    tt.save(model, tmp_path / "x")
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    faults = tt.plan_load(model, tmp_path / "x").faults
    assert len(faults) == 2
    for fault in faults:
        assert fault.endswith("it is a DTensor, which cannot be loaded from a file. Use tt.distributed.load")


@pytest.mark.filterwarnings("ignore")
def test_fsdp2_before_and_after_its_first_forward(process_group):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    before = [id(p) for p in model.parameters()]
    convert(model, dtype=torch.float64)
    assert [id(p) for p in model.parameters()] == before
    assert all(type(p).__name__ == "DTensor" and p.dtype == torch.float64 for p in model.parameters())
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    held = model[1].weight.full_tensor().detach().clone()
    optimizer.step()
    assert not torch.equal(model[1].weight.full_tensor(), held)
    with pytest.raises(ConversionError, match="after its first forward"):
        convert(model, dtype=torch.float32)


def test_a_dtype_that_is_none():
    made = rig(KINDS["plain"])
    with refused(made, r"dtype='bfloat16' is a str"):
        convert(made.model, dtype="bfloat16")


class Sparse(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("heads", torch.eye(4).to_sparse(), persistent=False)


def test_a_sparse_buffer_on_meta_is_refused_as_what_is_not_recorded_until_it_is_real(tmp_path):
    source = Sparse()
    tt.save(source, tmp_path / "x")
    with tt.on_meta():
        model = Sparse()
    with pytest.raises(
        ConversionError, match=r"^heads: on meta, and tt\.on_meta\(\) does not record torch\.sparse_coo tens"
    ):
        tt.materialize(model)
    (fault,) = tt.plan_load(model, tmp_path / "x").faults
    assert fault.endswith("tt.on_meta() does not record torch.sparse_coo tensors: assign a real one first.")
    assert model.weight.is_meta
    model.heads = source.heads
    tt.load(model, tmp_path / "x")
    assert torch.equal(model.weight, source.weight)
    assert model.heads is source.heads


@pytest.mark.filterwarnings("ignore")
def test_a_jagged_buffer_on_meta_is_refused_before_anything_changes():
    model = nn.Linear(2, 2)
    model.register_buffer("rows", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    with pytest.raises(ConversionError, match=r"^rows: on meta, .* does not record torch\.jagged tens"):
        tt.materialize(model.to("meta"), init=nn.Linear.reset_parameters)
    assert model.weight.is_meta
