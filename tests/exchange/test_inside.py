"""Weight to Weight: parts are exchanged inside the object, so that weak references to it do not prevent it."""

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.interrupts import count_steps, interrupted
from torchtether.exchange.exchange import Exchange
from torchtether.exchange.replacement import Refill, replace

CHANGES = {
    "dtype": lambda w: w.detach().to(torch.bfloat16),
    "scheme": lambda w: tt.Weight.encode(w.detach().dequantize() * 2, tt.int4(32)),
    "plain scheme": lambda w: tt.Weight.encode(w.detach().dequantize(), tt.Plain()),
    "copy": lambda w: w.detach().clone(),
}
each_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def subject():
    """A trained Weight with a grad, both kinds of hooks, an attribute and a tie; and what the hooks have seen."""
    torch.manual_seed(0)
    tie = tt.Tie(("a", "b"))
    weight = nn.Parameter(tt.Weight.encode(torch.randn(8, 64), tt.int8(), tie=tie))
    weight.set_activations("int8")
    seen = []
    weight.register_hook(lambda grad: seen.append(("hook", grad.dtype)))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(("post", p.grad.dtype)))
    weight.note = ["mine"]
    weight.dequantize().square().sum().backward()
    seen.clear()
    return weight, seen


def facts(weight):
    parts = {name: (id(part), part.data_ptr(), part.clone()) for name, part in weight.parts.items()}
    return {
        "object": (id(weight), type(weight), isinstance(weight, nn.Parameter), id(weight.__dict__)),
        "outside": (weight.shape, weight.stride(), weight.dtype, weight.device, weight.requires_grad, weight._version),
        "spec": weight.spec,
        "parts": parts,
        "grad": (id(weight.grad), weight.grad.dtype, weight.grad.clone()),
        "hooks": (weight._backward_hooks, weight._post_accumulate_grad_hooks),
        "note": id(weight.note),
    }


def equal(one, two):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return one == two


@each_change
@pytest.mark.parametrize("atomic", ["checked", "full"])
def test_everything_but_the_contents_stays(change, atomic):
    weight, seen = subject()
    model, made = nn.ParameterDict({"w": weight}), change(weight)
    grad, values = weight.grad, weight.grad.clone()
    reference, version = torch._C._WeakTensorRef(weight), weight._version
    with Exchange(model, atomic=atomic) as exchange:
        exchange.check([weight], stay_weights=True)
        exchange.put(weight, made)
    assert not reference.expired()
    assert model["w"] is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight._version == version
    assert weight.note == ["mine"]
    assert weight.spec == made.spec.replace(tie=tt.Tie(("a", "b")), activations="int8")
    assert (weight.dtype, weight.device) == (made.dtype, made.device)
    assert torch.equal(weight.dequantize(), made.dequantize())
    assert weight.grad is grad
    assert grad.dtype == made.dtype
    assert torch.equal(grad, values.to(made.dtype))
    weight.dequantize().sum().backward()
    assert seen == [("hook", made.dtype), ("post", made.dtype)]
    assert weight.grad is grad


@each_change
def test_undo_restores_every_bit_from_wherever_it_came(change):
    weight, _ = subject()
    steps = count_steps(replace(weight, change(weight)).apply, {"replacement.py", "contents.py"})
    assert steps > 20
    for at in range(0, steps, 3):
        weight, _ = subject()
        before = facts(weight)
        refill = replace(weight, change(weight))
        assert isinstance(refill, Refill)
        interrupted(refill.apply, at, {"replacement.py", "contents.py"})
        refill.undo()
        assert equal(facts(weight), before), at
        assert torch._C._is_torch_function_enabled()  # nothing was left in the middle of a scope of torch's


@each_change
def test_an_error_later_takes_it_back(change):
    weight, seen = subject()
    before, model = facts(weight), nn.ParameterDict({"w": weight})
    with pytest.raises(MemoryError), Exchange(model, atomic="full") as exchange:  # noqa: PT012
        exchange.put(weight, change(weight))
        raise MemoryError
    assert equal(facts(weight), before)
    weight.dequantize().sum().backward()
    assert seen == [("hook", torch.float32), ("post", torch.float32)]


def model_of(scheme="int8"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return tt.quantize(model, scheme)


@pytest.mark.parametrize("atomic", ["checked", "full"])
def test_an_autocast_cache_and_cpp_weak_references_do_not_refuse(atomic):
    model = model_of()
    weights = [p for p in model.parameters() if isinstance(p, tt.Weight)]
    references = [torch._C._WeakTensorRef(p) for p in weights]
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(x)
        tt.quantize(model, "int4", atomic=atomic)
        out = model(x)
    assert not any(reference.expired() for reference in references)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(model(x), out)
    tt.convert(model, dtype=torch.bfloat16, atomic=atomic)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(tt.ConversionError, match=r"2 of 2 tensors are held by a weak reference in C\+\+"):
        tt.dequantize(model, atomic=atomic)
    with pytest.raises(tt.ConversionError, match=r"2 of 4 tensors are held by a weak reference in C\+\+"):
        tt.convert(model, device="meta", atomic=atomic)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_graph_sees_the_new_contents(backend):
    torch._dynamo.reset()
    model = model_of()
    compiled, x = torch.compile(model, backend=backend, fullgraph=True), torch.randn(3, 64)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
        for change in (
            lambda: tt.quantize(model, "nf4"),
            lambda: tt.convert(model, dtype=torch.float64),
            lambda: tt.quantize(model, "int8"),
        ):
            before = model(x.to(model[0].weight.dtype))
            change()
            given = x.to(model[0].weight.dtype)
            assert torch.allclose(compiled(given), model(given), atol=1e-5)
            assert before.dtype != given.dtype or not torch.equal(before, model(given))
    torch._dynamo.reset()


def test_views_and_live_graphs_still_refuse():
    model = model_of()
    view = model[0].weight.t()
    with pytest.raises(tt.ConversionError, match=r"0\.weight: held by a view"):
        tt.convert(model, dtype=torch.bfloat16)
    del view
    loss = model(torch.randn(3, 64)).square().sum()
    with pytest.raises(tt.ConversionError, match=r"4 of 4 tensors: 3 are held by a live graph"):
        tt.convert(model, dtype=torch.bfloat16)
    loss.backward()
    tt.convert(model, dtype=torch.bfloat16)
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
