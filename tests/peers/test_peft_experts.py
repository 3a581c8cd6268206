"""PEFT's adapters on fused experts that are Weights: PEFT's results on their values, with no layer dense."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchtether as tt
from tests.distributed.spawn import spawn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
import torchtether.integrations.peft  # noqa: E402 - it needs both
from torchtether.integrations.peft_experts import AdaptedExperts, _low_rank  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what PEFT and transformers warn about

IDS = torch.arange(24).view(2, 12)
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "head_dim": 16,
}  # fmt: skip
KINDS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, moe_intermediate_size=32, num_experts=8),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=8),
    "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, num_local_experts=8),
}
CASES = [("qwen3_moe", "nf4"), ("mixtral", "int8"), ("gpt_oss", "mxfp4"), ("gpt_oss", "nf4")]
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def built(kind, scheme="nf4", experts="grouped_mm"):
    torch.manual_seed(0)
    config = KINDS[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    return tt.quantize(model, {"*experts*_proj": scheme}).requires_grad_(False)


def lora(**more):
    options = {"target_modules": ["q_proj", "v_proj"], "target_parameters": TARGETS, "r": 3, "lora_alpha": 12}
    return peft.LoraConfig(**options | more)


def adapted(model, config=None, name="default", seed=1):
    """With an adapter that does something."""
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, config or lora())
    else:
        model = peft.get_peft_model(model, config or lora(), adapter_name=name)
    torch.manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "lora_" in key and f".{name}." in key:
            parameter.data.normal_(std=0.05)
    return model


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


def step(model):
    """The loss and the gradients, by name."""
    model.zero_grad()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def same(one, other, tolerance=2e-5):
    torch.testing.assert_close(one[0], other[0], rtol=tolerance, atol=0)
    assert one[1].keys() == other[1].keys() != set()
    for name, grad in one[1].items():
        assert (grad - other[1][name]).norm() <= tolerance * other[1][name].norm(), name


def codes_of(model):
    return [
        part.clone() for one in model.parameters() if isinstance(one, tt.Weight) for part in one.parts.values()
    ]  # fmt: skip


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest floating-point tensor has that any op gives."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and not isinstance(one, tt.Weight) and one.is_floating_point():
                self.count = max(self.count, one.numel() if one.dtype.itemsize > 1 else 0)
        return made


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_losses_and_gradients_are_those_of_peft_on_the_values(kind, scheme, experts):
    ours, plain = (adapted(one) for one in (built(kind, scheme, experts), tt.dequantize(built(kind, scheme, experts))))
    found = step(ours)
    assert len([name for name in found[1] if "experts" in name]) == 8
    same(found, step(plain))
    torch.testing.assert_close(logits_of(ours), logits_of(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_experts_of_a_layer_are_never_dense_together(kind, experts):
    model = adapted(built(kind, experts=experts), lora(r=1))
    experts = min(one.numel() for one in model.parameters() if isinstance(one, tt.Weight))
    with Largest() as largest:
        step(model)
    assert 0 < largest.count <= experts / 2
    with Largest() as largest:
        step(tt.dequantize(model))  # and PEFT's own way is seen
    assert largest.count >= experts


def test_adapters_in_sixteen_bits_are_as_exact_as_peft_up_to_one_rounding():
    exact = step(adapted(tt.dequantize(built("gpt_oss", "mxfp4"))))[1]
    ours, plain = (
        step(adapted(model).bfloat16())[1]
        for model in (built("gpt_oss", "mxfp4"), tt.dequantize(built("gpt_oss", "mxfp4")))
    )
    names = [name for name in exact if "experts" in name]
    errors = [sum((one[name] - exact[name]).norm() ** 2 for name in names).sqrt() for one in (ours, plain)]
    assert errors[0] <= 1.5 * errors[1]  # sqrt(2), and what one draw differs from another by


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_adapter_files_are_those_of_peft(kind, tmp_path):
    ours = adapted(built(kind))
    plain = adapted(tt.dequantize(built(kind)), seed=2)
    for name, model in {"ours": ours, "plain": plain}.items():
        model.save_pretrained(tmp_path / name)
    with (
        tt.open(tmp_path / "ours/adapter_model.safetensors") as one,
        tt.open(tmp_path / "plain/adapter_model.safetensors") as other,
    ):
        assert {name: one[name].shape for name in one} == {name: other[name].shape for name in other}
    crossed = peft.PeftModel.from_pretrained(tt.dequantize(built(kind)), tmp_path / "ours")
    torch.testing.assert_close(logits_of(crossed), logits_of(ours), rtol=1e-4, atol=1e-5)
    crossed = peft.PeftModel.from_pretrained(built(kind), tmp_path / "plain")
    torch.testing.assert_close(logits_of(crossed), logits_of(plain), rtol=1e-4, atol=1e-5)


def test_several_adapters_add_up_and_none_is_the_base():
    ours, plain = built("qwen3_moe"), tt.dequantize(built("qwen3_moe"))
    base = logits_of(ours)
    ours, plain = (adapted(adapted(one, name="a"), lora(r=2), "b", seed=2) for one in (ours, plain))
    for names in (["a"], ["b"], ["a", "b"]):
        for model in (ours, plain):
            model.base_model.set_adapter(names)
        same(step(ours), step(plain))
    with ours.disable_adapter():
        assert torch.equal(logits_of(ours), base)


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_adapters_merge_and_unmerge(kind, scheme):
    model = adapted(built(kind, scheme), lora(target_modules=[]))
    before, codes = logits_of(model), codes_of(model)
    model.merge_adapter()
    merged = logits_of(model)
    assert (merged - before).norm() < {"int8": 0.05}.get(scheme, 0.5) * before.norm()
    model.unmerge_adapter()
    assert all(torch.equal(*pair) for pair in zip(codes_of(model), codes, strict=True))
    assert torch.equal(logits_of(model), before)
    plain = model.merge_and_unload()
    assert torch.equal(logits_of(plain), merged)
    assert isinstance(plain.model.layers[0].mlp.experts.gate_up_proj, tt.Weight)


def test_recomputed_activations_give_the_same_gradients():
    model = adapted(built("qwen3_moe")).train()
    wanted = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    same(step(model), wanted)


def test_autocast_is_as_close_as_peft_on_the_values():
    exact = step(adapted(tt.dequantize(built("qwen3_moe"))))[1]
    with torch.autocast("cpu", torch.bfloat16):
        found, plain = (step(adapted(one))[1] for one in (built("qwen3_moe"), tt.dequantize(built("qwen3_moe"))))
    errors = [sum((one[name] - exact[name]).norm() ** 2 for name in exact).sqrt() for one in (found, plain)]
    assert errors[0] <= 1.5 * errors[1]


def test_compiled_layers_compute_the_same():
    layer = adapted(built("qwen3_moe")).bfloat16().get_base_model().model.layers[0].mlp
    torch._dynamo.reset()
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager")):
        x = torch.linspace(-1, 1, 2 * 6 * 64, dtype=torch.bfloat16).view(2, 6, 64).requires_grad_()
        made = run(x)
        grads = torch.autograd.grad(made.square().sum(), [x, *(p for p in layer.parameters() if p.requires_grad)])
        results.append((made, *grads))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_the_parameter_is_the_weight_again_when_a_forward_fails():
    model = adapted(built("qwen3_moe"))
    experts = model.get_base_model().model.layers[0].mlp.experts.get_base_layer()
    held = experts.gate_up_proj
    experts.act_fn = None
    with pytest.raises(TypeError):
        model(IDS)
    assert experts.gate_up_proj is held


# -- what stands for the sum ------------------------------------------------------------------------------------------

PRODUCTS = {
    "linear": lambda w, x: F.linear(x[0], w[1]),
    "linear, bias": lambda w, x: F.linear(x, w[2], torch.ones(32)),
    "matmul": lambda w, x: x[0, 0] @ w[1].t(),
    "matmul of many": lambda w, x: x @ w[-1].mT,
    "matmul, first": lambda w, x: w[1] @ x[0].t(),
    "matmul of all": lambda w, x: torch.matmul(x, w.mT),
    "mm": lambda w, x: torch.mm(x[0], w[torch.tensor(1)].transpose(0, 1)),
    "bmm": lambda w, x: torch.bmm(x, w.transpose(-2, -1)),
    "bmm, first": lambda w, x: torch.bmm(w, x.mT),
    "bmm of some": lambda w, x: torch.bmm(w[torch.tensor([2, 0, 2, 1])], x.mT[[0, 1, 2, 3]]),
    "grouped": lambda w, x: F.grouped_mm(x.flatten(0, 1), w.mT, offs=torch.tensor([3, 3, 11, 12], dtype=torch.int32)),
    "grouped in part": lambda w, x: F.grouped_mm(  # what torch has behind the last group is any memory
        x.detach().flatten(0, 1), w.mT, offs=torch.tensor([3, 3, 5, 7], dtype=torch.int32)
    )[:7],
    "others": lambda w, x: torch.einsum("smk,snk->smn", x, w),
    "slices": lambda w, x: F.linear(x[0], w[1:3].flatten(0, 1)),
    "some, transposed": lambda w, x: w[torch.tensor([1, 3])].transpose(0, 1) + 1,
    "a table of some": lambda w, x: torch.einsum("smk,abnk->smabn", x, w[torch.tensor([[0, 1], [3, 3]])]),
    "methods": lambda w, x: w[1].float().sum() + w.size(1) + w.dim() + len(w) + w[torch.tensor([1, 3])].shape[0],
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_what_stands_for_the_sum_computes_as_the_sum(product):
    torch.manual_seed(0)
    weight = tt.Weight.encode(torch.randn(4, 32, 64), tt.nf4())
    lhs, rhs = torch.randn(4, 32, 5, requires_grad=True), torch.randn(4, 5, 64, requires_grad=True)
    x = torch.randn(4, 3, 64, requires_grad=True)
    results = []
    for one in (AdaptedExperts(weight, lhs, rhs), weight.dequantize() + lhs @ rhs):
        made = PRODUCTS[product](one, x)
        grads = torch.autograd.grad(made.square().sum(), (lhs, rhs, x), allow_unused=True)
        results.append((made, *grads))
    for ours, wanted in zip(*results, strict=True):
        assert (ours is None) == (wanted is None)
        if ours is not None:
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-3)


# -- on several ranks -------------------------------------------------------------------------------------------------


def losses_of(world):
    """The losses of three steps of each kind, on this rank's rows of every batch, averaged over all ranks."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank() if world > 1 else 0
    found = []
    for kind in ("qwen3_moe", "gpt_oss"):
        model = adapted(built(kind)).train()
        if world > 1:
            layers = type(model.get_base_model().model.layers[0])
            plan = tt.distributed.plan_units(model, layers, mesh=init_device_mesh("cpu", (world,)))
            assert not plan.faults, plan.faults
            tt.distributed.shard(model, plan)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
        for number in range(3):
            ids = torch.randint(64, (6, 5), generator=torch.Generator().manual_seed(number))[rank::world]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = loss.detach().clone()
            if world > 1:
                dist.all_reduce(value)
            found.append(float(value / world))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_losses_on_ranks_are_those_of_one_process(world):
    wanted = losses_of(1)
    assert wanted[2] < wanted[0] != wanted[3] > wanted[5]
    for found in spawn(losses_of, world, world):
        assert found == pytest.approx(wanted, rel=2e-5)


def test_a_peft_that_gives_no_factors_keeps_its_own_code():
    from torchtether.integrations.peft_experts import install

    class Old:  # ParamWrapper before PEFT 0.21
        def _activate_lora(self, active_adapters): ...

        def forward(self, x): ...

    before = dict(vars(Old))
    install(Old)
    assert dict(vars(Old)) == before


@pytest.mark.parametrize("is_autocast", [False, True])
def test_factors_are_multiplied_in_float32_and_rounded_once(is_autocast):
    torch.manual_seed(0)
    rows, lhs, rhs = torch.randn(40, 64).bfloat16(), torch.randn(2, 64, 8), torch.randn(2, 8, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        made = _low_rank(rows, lhs, rhs, [15, 40])
    groups = zip((rows[:15], rows[15:]), lhs, rhs, strict=True)
    wanted = torch.cat([x.double() @ left.double() @ right.double() for x, left, right in groups])
    assert ((made.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-4).all()
