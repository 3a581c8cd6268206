"""Quantized models from ``tt.quantize`` under ``torch.export``, AOTInductor and ``torch.compile``."""

import warnings

import pytest
import torch

import torchtether as tt
from torchtether.schemes.named import NAMED

OFTEN = {"int8", "nf4"}
"""The others take the same ways, and are slow: each takes dynamo some seconds."""

NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in sorted(NAMED)]
own_warnings = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's, of itself


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mid = torch.nn.Embedding(32, 128), torch.nn.Linear(128, 128)
        self.head = torch.nn.Linear(128, 32, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.mid(self.emb(tokens))))


def quantized(scheme):
    torch.manual_seed(0)
    model = tt.quantize(Tied(), {"*.weight": scheme})
    assert all(parameter.requires_grad for parameter in model.parameters())
    return model, torch.arange(6).view(2, 3)


def bits(tensors):
    return {name: one.detach().reshape(-1).view(torch.uint8) for name, one in tensors.items()}


def same(got, expected):
    return all(torch.equal(one, bits(got)[name]) for name, one in bits(expected).items())


@own_warnings
@pytest.mark.parametrize("scheme", NAMES)
def test_weights_that_require_grad_are_exported_and_decomposed(scheme):
    model, tokens = quantized(scheme)
    expected = model(tokens)
    exported = torch.export.export(model, (tokens,))
    torch.testing.assert_close(exported.module()(tokens), expected, rtol=1e-5, atol=1e-5)
    decomposed = exported.run_decompositions()
    torch.testing.assert_close(decomposed.module()(tokens), expected, rtol=1e-5, atol=1e-5)  # other sums
    state = decomposed.state_dict
    assert state["mid.bias"].requires_grad
    assert not any(one.requires_grad for name, one in state.items() if ".parametrizations." in name)
    heads, embs = ([state[k] for k in sorted(state) if k.startswith(m)] for m in ("head.", "emb."))
    assert [one.data_ptr() for one in heads] == [one.data_ptr() for one in embs]  # still tied
    assert all(isinstance(one, tt.Weight) for one in (model.mid.weight, model.head.weight))
    assert model.head.weight is model.emb.weight
    assert model.head.weight.requires_grad


class Einsum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 8, 64))

    def forward(self, x):
        return torch.einsum("bni,eoi->bneo", x, self.weight)


BATCHED = [
    Einsum,
    lambda: torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True),
    lambda: torch.nn.GRU(64, 64, batch_first=True),
]


@own_warnings
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # of recurrent modules, also of plain ones
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", BATCHED)
def test_products_of_batches_are_exported_and_compiled(make, grad):
    """Below these functions the compiler would meet a Weight that is repeated for each matrix of a batch."""
    model = make().eval().requires_grad_(grad)
    names = [name for name, one in model.named_parameters() if one.dim() > 1]
    tt.quantize(model, dict.fromkeys(names, "int8"))
    x = torch.randn(2, 3, 64)
    expected, runs = model(x), [torch.export.export(model, (x,)).module()]
    if not isinstance(model, torch.nn.GRU):  # dynamo does not support it
        torch._dynamo.reset()
        runs.append(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for run in runs:
        torch.testing.assert_close(run(x), expected, rtol=1e-5, atol=1e-5)


@own_warnings
def test_a_wrapped_parameter_and_an_own_kind_are_exported_as_they_train():
    class Sixteenths(tt.WrapperTensor):
        inner_names = ("codes",)

        def decode(self):
            return self.codes.to(self.dtype) / 16

    model, tokens = quantized(tt.Plain())
    kind = Sixteenths(codes=torch.arange(-64, 64, dtype=torch.int8).repeat(128, 1), dtype=torch.float32)
    model.mid.weight = torch.nn.Parameter(kind)
    assert model.mid.weight.requires_grad
    decomposed = torch.export.export(model, (tokens,)).run_decompositions()
    torch.testing.assert_close(decomposed.module()(tokens), model(tokens), rtol=1e-5, atol=1e-3)
    state = decomposed.state_dict
    assert {one.requires_grad for name, one in state.items() if name.startswith("emb.")} == {True}
    assert {one.requires_grad for name, one in state.items() if name.startswith("mid.par")} == {False}


def test_other_parametrizations_of_a_weight_still_train():
    layer = tt.quantize(torch.nn.Linear(64, 64), "int8")
    torch.nn.utils.parametrizations.weight_norm(layer)
    assert all(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.slow
@pytest.mark.usefixtures("cxx")
@own_warnings
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own: which compiler it takes, that there is no GPU
def test_weights_that_require_grad_run_from_a_package(tmp_path):
    model, tokens = quantized("nf4")
    batch = {"tokens": {0: torch.export.Dim("batch", min=2, max=64)}}
    exported = torch.export.export(model, (tokens,), dynamic_shapes=batch)
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    run = torch._inductor.aoti_load_package(path)
    for given in (tokens, torch.arange(15).view(5, 3)):
        torch.testing.assert_close(run(given), model(given).detach(), rtol=1e-5, atol=1e-5)


@own_warnings
@pytest.mark.parametrize("scheme", NAMES)
def test_compiled_encoding_gives_the_same_bits(scheme):
    torch._dynamo.reset()
    kind, held = tt.quantize(torch.nn.Linear(256, 16), scheme).weight.scheme, torch.ones(16, 256)
    values = torch.randn(16, 256)
    expected = tt.Weight.encode(values, kind)

    def encode(values, held):
        held.copy_(values)
        parts = held.scheme.encode(values)
        return tt.Weight.encode(values, kind), parts, kind.decode(parts, held.spec.base, held.dtype)

    held = tt.Weight.encode(held, kind)
    made, parts, decoded = torch.compile(encode, fullgraph=True, backend="aot_eager")(values, held)
    assert type(made) is tt.Weight
    assert made.spec == expected.spec == held.spec
    assert all(same(found, expected.parts) for found in (made.parts, parts, held.parts))
    assert torch.equal(decoded, expected.dequantize())


@own_warnings
@pytest.mark.parametrize("scheme", NAMES)
def test_in_place_ops_on_a_frozen_weight_compile_without_a_break(scheme):
    torch._dynamo.reset()
    eager, held = (tt.Weight.encode(torch.linspace(-1, 1, 4096).view(16, 256), NAMED[scheme]()) for _ in range(2))

    def change(weight):
        weight.mul_(0.25).clamp_(max=0.125)

    change(eager)
    torch.compile(change, fullgraph=True, backend="aot_eager")(held)
    assert torch.allclose(held.dequantize(), eager.dequantize(), atol=0.01)  # eager writes keep scales that fit


@own_warnings
def test_schemes_are_made_in_compiled_code():
    torch._dynamo.reset()
    values = torch.randn(4, 256)
    compiled = torch.compile(lambda x: tt.Weight.encode(x.bfloat16(), tt.nf4()), fullgraph=True, backend="aot_eager")
    assert same(compiled(values).parts, tt.Weight.encode(values.bfloat16(), tt.nf4()).parts)


@own_warnings
def test_a_model_is_quantized_inside_compiled_code():
    """The graph ends before the verb, and a next one begins after it."""
    torch._dynamo.reset()
    model, twin = (torch.nn.Linear(64, 64) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    held, x = model.weight, torch.randn(2, 64)

    def run(model, x):
        x = x + 1
        tt.convert(tt.quantize(model, "int8"), dtype=torch.float32)
        return torch.nn.functional.linear(x, model.weight, model.bias)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = torch.compile(run, backend="aot_eager")(model, x)
    assert not [one for one in seen if "torchtether" in str(one.message) or "trace the builtin" in str(one.message)]
    torch.testing.assert_close(got, tt.quantize(twin, "int8")(x + 1))
    assert model.weight is held
    assert same(held.parts, twin.weight.parts)
