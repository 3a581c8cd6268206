"""accelerate's own code with Weights inside: offloading, device maps, checkpoints of a training run."""

import pytest
import torch
from torch import nn

import torchtether as tt

accelerate = pytest.importorskip("accelerate")


pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what accelerate warns about

CPU = torch.device("cpu")
IDS = torch.arange(12).view(2, 6)
SCHEMES = ["int8", "int4", "nf4", tt.Plain()]


class Model(nn.Module):
    """A tied embedding and head, biases, a norm, and layers of one shape, which tools could take for one another."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 32)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        hidden = self.emb(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        return self.head(self.norm(hidden))


quantized = pytest.mark.parametrize("scheme", ["int8", "int4", "nf4"])  # of Plain no file says so


def built(scheme="int8", seed=0):
    torch.manual_seed(seed)
    return tt.quantize(Model().eval(), scheme)


def values_of(tensor):
    return tensor.dequantize() if isinstance(tensor, tt.Weight) else tensor.clone()


def values(model):
    return {name: values_of(tensor) for name, tensor in model.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


@pytest.fixture(params=SCHEMES, ids=str)
def model(request):
    return built(request.param)


def kinds(model):
    return {name: p.scheme for name, p in model.named_parameters(remove_duplicate=False) if isinstance(p, tt.Weight)}


@torch.no_grad()
def test_cpu_offload_gives_the_same_output_and_never_takes_one_weight_for_another(model):
    expected, before = model(IDS), kinds(model)
    held = values(model)
    accelerate.cpu_offload(model, execution_device=CPU)
    assert kinds(model) == before
    assert all(p.is_meta for p in model.parameters())
    for _ in range(2):
        assert torch.equal(model(IDS), expected)
        assert all(p.is_meta for p in model.parameters())
    accelerate.hooks.remove_hook_from_submodules(model)
    assert kinds(model) == before
    assert same(values(model), held)


CHANGES = {
    "load": lambda model, path: tt.load(model, path),
    "convert": lambda model, path: tt.convert(model, dtype=torch.bfloat16),
    "quantize": lambda model, path: tt.quantize(model, "int8"),
    "materialize": lambda model, path: tt.materialize(model),
}


@torch.no_grad()
@pytest.mark.parametrize("appended", range(3))
@pytest.mark.parametrize("verb", CHANGES)
def test_an_offloaded_model_is_refused_because_its_hooks_keep_the_old_values(verb, appended, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tt.save(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tmp_path)
    inputs = torch.ones(1, 8)
    expected = model(inputs)
    accelerate.cpu_offload(model, execution_device=CPU)
    for _ in range(appended):  # each into another SequentialHook
        for layer in model:
            accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook(), append=True)
    with pytest.raises(tt.ConversionError, match=rf"cannot {verb} under accelerate's offloading: .* old values"):
        CHANGES[verb](model, tmp_path)
    assert torch.equal(model(inputs), expected)
    accelerate.hooks.remove_hook_from_submodules(model)
    CHANGES[verb](model, tmp_path)


@torch.no_grad()
@quantized
def test_offloading_to_the_disk_reads_what_we_wrote(scheme, tmp_path):
    """``cpu_offload`` takes any mapping: that of a checkpoint reads each tensor when it is asked for."""
    model = built(scheme)
    expected, before = model(IDS), kinds(model)
    tt.save(model, tmp_path)
    with tt.open(tmp_path) as checkpoint:
        accelerate.cpu_offload(model, execution_device=CPU, state_dict=checkpoint)
        assert kinds(model) == before
        for _ in range(2):
            assert torch.equal(model(IDS), expected)


@torch.no_grad()
@quantized
def test_a_device_map_with_disk_reads_what_we_wrote(scheme, tmp_path):
    model = built(scheme)
    expected, before = model(IDS), kinds(model)
    tt.save(model, tmp_path)
    device_map = {"emb": "cpu", "layers.0": "disk", "layers.1": "cpu", "layers.2": "disk", "norm": "cpu", "head": "cpu"}
    with tt.open(tmp_path) as checkpoint:
        accelerate.dispatch_model(model, device_map, state_dict=checkpoint, offload_index={})
        assert model.layers[0].weight.is_meta
        assert not model.layers[1].weight.is_meta
        assert model.head.weight is model.emb.weight
        assert kinds(model) == before
        assert torch.equal(model(IDS), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_disk_offload_refuses_in_one_line_and_changes_nothing(tmp_path, dtype):
    model = tt.convert(built(), dtype=dtype)
    held = values(model)
    with pytest.raises(tt.UnsupportedOpError, match="tt.save") as caught:
        accelerate.disk_offload(model, tmp_path, execution_device=CPU)
    assert "\n" not in str(caught.value)
    assert same(values(model), held)


@torch.no_grad()
def test_dispatch_model_to_two_places(model):
    expected = model(IDS)
    accelerate.dispatch_model(model, {"emb": "cpu", "layers": "cpu", "norm": "cpu", "head": "cpu"}, force_hooks=True)
    assert model.head.weight is model.emb.weight
    assert torch.equal(model(IDS), expected)


def test_set_module_tensor_to_device(model):
    held, before = values(model), kinds(model)
    weight = model.layers[0].weight
    accelerate.utils.set_module_tensor_to_device(model, "layers.0.weight", "meta")
    assert model.layers[0].weight.is_meta
    assert kinds(model) == before
    accelerate.utils.set_module_tensor_to_device(model, "layers.0.weight", "cpu", value=weight)
    assert isinstance(model.layers[0].weight, nn.Parameter)
    assert model.layers[0].weight.requires_grad is weight.requires_grad
    assert same(values(model), held)
    assert kinds(model) == before
    if not weight.scheme.transparent:
        with pytest.raises(tt.ArgumentError, match="Weight.encode"):
            accelerate.utils.set_module_tensor_to_device(model, "layers.0.weight", "cpu", value=torch.zeros(64, 64))
        assert same(values(model), held)


def trained(model, accelerator, steps=2):
    """A model of which only what is no Weight is trained, prepared, with the losses of some steps."""
    for parameter in model.parameters():
        parameter.requires_grad_(not isinstance(parameter, tt.Weight))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, [step(model, optimizer, accelerator) for _ in range(steps)]


def step(model, optimizer, accelerator):
    loss = model(IDS).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)


def test_prepare_keeps_the_parameters(model, accelerator):
    held, ids = values(model), {name: id(p) for name, p in model.named_parameters()}
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    inner = accelerator.unwrap_model(prepared)
    assert {name: id(p) for name, p in inner.named_parameters()} == ids
    assert inner.head.weight is inner.emb.weight
    assert same(values(inner), held)
    tt.check_optimizer(inner, optimizer.optimizer)


def test_save_state_and_load_state_resume_where_they_were(model, accelerator, tmp_path):
    from torchtether.integrations.accelerate import attach

    attach(accelerator)
    model, optimizer, _ = trained(model, accelerator)
    accelerator.save_state(tmp_path)
    held, before = values(model), kinds(model)
    following = [step(model, optimizer, accelerator) for _ in range(2)]
    parameters = {name: id(p) for name, p in model.named_parameters()}
    accelerator.load_state(tmp_path)
    assert same(values(model), held)
    assert kinds(model) == before
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert model.head.weight is model.emb.weight
    assert [step(model, optimizer, accelerator) for _ in range(2)] == following
    with tt.open(tmp_path / "model.safetensors") as checkpoint:
        assert {tie.names for tie in checkpoint.ties} == {("emb.weight", "head.weight")}
        assert same({n: values_of(checkpoint[n]) for n in checkpoint}, held)


def test_a_state_of_floats_is_loaded_into_a_model_that_was_quantized_since(accelerator, tmp_path):
    from torchtether.integrations.accelerate import attach

    attach(accelerator)
    torch.manual_seed(0)
    model = accelerator.prepare(Model().eval())
    accelerator.save_state(tmp_path)
    tt.quantize(model, "int8")
    held, ids = values(model), {name: id(p) for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path)
    assert same(values(model), held)
    assert {name: id(p) for name, p in model.named_parameters()} == ids
    assert model.head.weight is model.emb.weight


def test_an_accelerate_that_cannot_unwrap_compiled_models_is_refused_before_training(accelerator, monkeypatch):
    from torchtether.integrations.accelerate import attach

    monkeypatch.setattr(accelerator, "unwrap_model", lambda model, keep_fp32_wrapper=True: model)  # as in 1.2
    with pytest.raises(ImportError, match=f"^accelerate: this is {accelerate.__version__}.* 1.3 or newer. Update it.$"):
        attach(accelerator)
    assert not accelerator._save_model_state_pre_hook
    assert not accelerator._load_model_state_pre_hook


def test_two_models_in_one_state(accelerator, tmp_path):
    from torchtether.integrations.accelerate import attach

    attach(accelerator)
    plain = Model()
    weights, plain = accelerator.prepare(built(), plain)
    held = [values(weights), values(plain)]
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        for parameter in (*weights.parameters(), *plain.parameters()):
            parameter.zero_()
    accelerator.load_state(tmp_path)
    assert same(values(weights), held[0])
    assert same(values(plain), held[1])
    assert plain.head.weight is plain.emb.weight


def test_models_without_weights_are_accelerates_own(accelerator, tmp_path):
    from torchtether.integrations.accelerate import attach

    attach(accelerator)
    model = accelerator.prepare(Model())
    held = values(model)
    accelerator.save_state(tmp_path, safe_serialization=False)
    assert (tmp_path / "pytorch_model.bin").exists()
    with torch.no_grad():
        model.norm.weight.zero_()
    accelerator.load_state(tmp_path)
    assert same(values(model), held)


def test_without_the_integration_save_state_says_what_to_do(accelerator, tmp_path):
    model = accelerator.prepare(built())
    held = values(model)
    for write in (accelerator.save_state, lambda path: accelerator.save_model(model, path)):
        with pytest.raises(RuntimeError, match=r"tt\.save.*torchtether\.integrations") as caught:
            write(tmp_path)
        assert "\n" not in str(caught.value)
    accelerator.save_state(tmp_path / "pickled", safe_serialization=False)
    with torch.no_grad():
        model.layers[0].weight.zero_()
    accelerator.load_state(tmp_path / "pickled")
    assert same(values(model), held)
    assert model.head.weight is model.emb.weight
