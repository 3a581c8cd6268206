"""Whether an optimizer and a model belong together, and how state follows a changed parameter."""

import pytest
import torch
from torch import nn

from tests.conversion.models import KINDS, OPTIMIZERS, rig
from torchtether import OptimizerError
from torchtether.conversion.converting import convert
from torchtether.exchange.optimizer_state import check_optimizer
from torchtether.exchange.scope import swapping


def test_check_optimizer_accepts_what_belongs():
    for kind in KINDS.values():
        made = rig(kind)
        check_optimizer(made.model, made.optimizer)
    model = KINDS["frozen"]()
    check_optimizer(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))
    model = KINDS["plain"]()
    check_optimizer(model, [torch.optim.SGD(model.a.parameters()), torch.optim.AdamW(model.b.parameters())])


def test_check_optimizer_names_both_sides():
    model = KINDS["plain"]()
    optimizer = torch.optim.SGD(model.named_parameters())
    model.b.weight = nn.Parameter(model.b.weight.data)
    text = r"b\.weight: is trainable, but not in the optimizer, and the optimizer holds 1 .*\(group 0, b\.weight, "
    with pytest.raises(OptimizerError, match=text):
        check_optimizer(model, optimizer)
    with pytest.raises(OptimizerError, match=r"group 0, index 2, shape \(4, 4\)"):
        check_optimizer(model, torch.optim.SGD([*model.a.parameters(), torch.zeros(4, 4)]))
    with pytest.raises(OptimizerError, match=r"^a\.bias, b\.weight, b\.bias: are trainable, but not in the optimizer"):
        check_optimizer(model, torch.optim.SGD([model.a.weight]))


@pytest.mark.parametrize("none", [None, [], (), iter(())])
def test_without_an_optimizer_no_trainable_parameter_is_in_one(none):
    model = KINDS["plain"]()
    with pytest.raises(OptimizerError, match=r"^a\.weight, .*: are trainable, but not in the optimizer"):
        check_optimizer(model, none)
    check_optimizer(model.requires_grad_(False), none)
    convert(model.requires_grad_(True), dtype=torch.float64, optimizer=none)


def test_a_conversion_accepts_partial_and_wider_optimizers():
    model, loss = KINDS["plain"](), nn.Linear(1, 1)
    convert(model, dtype=torch.float64, optimizer=torch.optim.SGD(model.a.parameters()))
    convert(model, dtype=torch.float32, optimizer=torch.optim.SGD([*model.parameters(), *loss.parameters()]))


def test_a_conversion_refuses_an_optimizer_of_parameters_that_were_replaced():
    made = rig(KINDS["plain"])
    made.model.b.weight = nn.Parameter(made.model.b.weight.data.clone())
    with pytest.raises(OptimizerError, match=r"b\.weight: is trainable, but not in the optimizer, and .* holds 1"):
        convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    assert made.model.a.weight.dtype == torch.float32


def test_several_optimizers_follow():
    made = rig(KINDS["plain"])
    other = torch.optim.SGD(made.model.b.parameters(), lr=0.1, momentum=0.9)
    made.step(update=False)
    other.step()
    convert(made.model, dtype=torch.float64, optimizer=(one for one in [made.optimizer, other]))
    assert other.state[made.model.b.weight]["momentum_buffer"].dtype == torch.float64
    assert made.optimizer.state[made.model.a.weight]["exp_avg"].dtype == torch.float64


class Lookahead(torch.optim.Optimizer):
    """Slow weights beside another optimizer, with a state of its own for them, as in packages of others."""

    def __init__(self, inner):
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("slow", parameter.detach().clone())
        self.inner.step()
        with torch.no_grad():
            for parameter, state in self.state.items():
                parameter.copy_(state["slow"].lerp_(parameter, 0.5))


@pytest.mark.parametrize("is_scope", [False, True], ids=["convert", "swapping"])
def test_the_state_of_a_wrapped_optimizer_follows(is_scope):
    model = KINDS["plain"]()
    inner = torch.optim.AdamW(model.parameters())
    outer = Lookahead(inner)
    for dtype in (torch.float32, torch.float64):
        if is_scope:
            with swapping(model, optimizer=outer):
                model.to(dtype)
        else:
            convert(model, dtype=dtype, optimizer=outer)
        model(torch.ones(2, 4, dtype=dtype)).sum().backward()
        outer.step()
    states = [*inner.state.values(), *outer.state.values()]
    assert {one.dtype for state in states for one in state.values() if one.dim()} == {torch.float64}


def test_master_state_in_another_dtype_is_left_alone():
    made = rig(KINDS["plain"], "sgd")
    convert(made.model, dtype=torch.bfloat16)  # the state stays float32: a master copy
    convert(made.model, dtype=torch.float16, optimizer=made.optimizer)
    assert {s["momentum_buffer"].dtype for s in made.optimizer.state.values()} == {torch.float32}


class Wrapper:
    """As that of accelerate: the wrapped optimizer's groups and state are its own."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state


@pytest.mark.parametrize(
    "wrap", [lambda one: one, Wrapper, lambda one: Wrapper(Wrapper(one))], ids=["bare", "wrapped", "wrapped twice"]
)
def test_state_that_the_optimizer_calls_not_castable_keeps_its_dtype(wrap):
    """Of bitsandbytes: its kernels take these moments as float32, and would read and write past 16-bit ones."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.non_castable_tensor_keys = {"exp_avg"}
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["exp_avg"].clone()
    convert(model, dtype=torch.bfloat16, optimizer=wrap(optimizer))
    state = optimizer.state[model.weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(state["exp_avg"], before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_stay_where_they_were_unless_fused(optimizer):
    made = rig(KINDS["plain"], optimizer)
    steps = [id(s["step"]) for s in made.optimizer.state.values() if "step" in s]
    convert(made.model, dtype=torch.bfloat16, optimizer=made.optimizer)
    assert [id(s["step"]) for s in made.optimizer.state.values() if "step" in s] == steps
    convert(made.model, device="meta", optimizer=made.optimizer)
    for state in made.optimizer.state.values():
        if "step" in state:
            assert state["step"].is_meta == (optimizer == "adamw_fused")


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "ASGD", "Adagrad", "RMSprop", "Rprop"])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("where", [{"dtype": torch.bfloat16}, {"device": "meta"}], ids=["dtype", "device"])
def test_moments_of_a_scalar_parameter_follow_and_numbers_stay(kind, shape, where):
    """Such as the temperature of CLIP: its moments have rank 0, as step counters have."""
    model = nn.Module()
    model.scale = nn.Parameter(torch.full(shape, 2.0))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    model.scale.square().sum().backward()
    optimizer.step()
    before = dict(optimizer.state[model.scale])
    convert(model, **where, optimizer=optimizer)
    numbers = {"step", "mu_product", "mu", "eta"}
    for key, value in optimizer.state[model.scale].items():
        if key in numbers:
            assert value is before[key]
        else:
            assert (value.dtype, value.device) == (model.scale.dtype, model.scale.device), key
    assert set(before) - numbers
    if "device" in where:
        return  # not every optimizer can take a step on meta
    model.scale.grad = torch.ones_like(model.scale)
    optimizer.step()


def test_only_counters_stay_behind_on_the_cpu():
    """Of an optimizer with one second moment for each layer, as NovoGrad has it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = {"moment": torch.tensor(3.0), "count": torch.tensor(7), "step": torch.tensor(1.0)}
    optimizer.state[model.weight] = dict(numbers)
    convert(model, dtype=torch.bfloat16, optimizer=optimizer)
    assert all(one is numbers[key] for key, one in optimizer.state[model.weight].items())
    convert(model, device="meta", optimizer=optimizer)
    assert {key for key, one in optimizer.state[model.weight].items() if one.is_meta} == {"moment"}


def test_nested_state_follows():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2, dtype=model.weight.dtype)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    convert(model, dtype=torch.float64, optimizer=optimizer)
    state = optimizer.state[model.weight]
    assert {t.dtype for t in [state["d"], *state["old_dirs"], *state["old_stps"]]} == {torch.float64}
    optimizer.step(closure)


def test_a_parameter_that_the_optimizer_has_not_met_gets_no_state():
    made = rig(KINDS["plain"], steps=0)
    convert(made.model, dtype=torch.float64, optimizer=made.optimizer)
    assert not made.optimizer.state


@pytest.mark.filterwarnings("ignore:Casting complex values to real", "ignore:Complex modules are a new feature")
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_state_of_complex_parameters_follows(make, dtype):
    """Stock ``.to()`` drops their imaginary part, and state that kept it would stop the next step."""
    model = nn.ParameterList([nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))])
    optimizer = make(model.parameters())
    for _ in range(2):
        model[0].abs().sum().backward()
        optimizer.step()
        (state,) = optimizer.state.values()
        before = {name: value.clone() for name, value in state.items() if value.dim()}
        with swapping(model, optimizer=optimizer):
            model.to(dtype)
        assert {state[name].dtype for name in before} == {model[0].dtype} == {dtype}
        for name, value in before.items():
            assert torch.equal(state[name], value.to(dtype))
