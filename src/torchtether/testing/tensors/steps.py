"""Laws of use: forward, backward, and a step of the optimizer, also compiled."""

from __future__ import annotations

import itertools
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor

from ..law import Law, NotApplicable, law, require
from .subject import Subject

LAWS: list[Law] = []

_COUNT = itertools.count()


@law(
    LAWS,
    "frozen-step",
    "frozen, it has the product of its values, and gradients pass through to the input",
    "adapters (LoRA) on top of it learn from wrong gradients, or from none",
)
def _frozen_step(subject: Subject) -> None:
    weight = subject.parameter()
    values = subject.values(weight)
    out, grad = _run(subject, weight, values)
    x = _input(values).requires_grad_()
    wanted = F.linear(x, values)
    wanted.sum().backward()
    _close(out, wanted.detach(), values, "the product")
    require(grad is not None, "no gradient reaches the input")
    assert grad is not None
    assert x.grad is not None
    _close(grad, x.grad, values, "the gradient of the input")
    require(weight.grad is None, "a frozen weight has a gradient")


@law(
    LAWS,
    "training-step",
    "with requires_grad it gets a gradient, and an optimizer's step changes its values by it",
    "it never trains: no gradient and no error, or an optimizer that cannot step",
)
def _training_step(subject: Subject) -> None:
    weight = subject.parameter(requires_grad=True)
    before = subject.values(weight).clone()
    eye = torch.eye(before.shape[-1], dtype=before.dtype, device=before.device)
    optimizer = torch.optim.SGD([weight], lr=2.0)
    subject.product(eye, weight).square().mul(0.5).sum().backward()  # its gradient equals the values
    require(weight.grad is not None, "no gradient reaches it, and no error says so")
    assert weight.grad is not None
    require(weight.grad.shape == before.shape, f"its gradient has shape {tuple(weight.grad.shape)}")
    _close(subject.values(weight.grad), before, before, "its gradient")
    optimizer.step()
    after = subject.values(weight)
    off, moved = (after + before).double().norm().item(), (after - before).double().norm().item()
    require(off < moved / 2, "the step of the optimizer does not change its values by the gradient")


@law(
    LAWS,
    "compile",
    "torch.compile(fullgraph=True) compiles a product with it, forward and backward",
    "the compiled model has graph breaks, recompiles, or computes something else",
)
def _compile(subject: Subject) -> None:
    weight = subject.parameter()
    values = subject.values(weight)
    try:
        wanted = _run(subject, weight, values)
    except NotApplicable:
        raise
    except Exception as error:
        raise NotApplicable(f"it does not run uncompiled: {type(error).__name__}") from None
    # A code object of its own, because the compiler caches graphs and counts recompilations for each code object.
    code = _product.__code__.replace(co_name=f"_product_{next(_COUNT)}")
    product = FunctionType(code, _product.__globals__)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    got = _run(subject, weight, values, compiled)
    for made, plain, what in zip(got, wanted, ("its product", "the gradient of its input"), strict=True):
        require((made is None) == (plain is None), f"compiled, {what} is missing")
        if made is not None and plain is not None:
            _close(made, plain, values, f"compiled, {what}")


def _product(subject: Subject, x: Tensor, weight: Tensor) -> Tensor:
    return subject.product(x, weight)


def _run(subject: Subject, weight: Tensor, values: Tensor, product: object = _product) -> tuple[Tensor, Tensor | None]:
    """Return the product with a fixed input, and the gradient of the input."""
    x = _input(values).requires_grad_()
    out = product(subject, x, weight)  # type: ignore[operator]
    if out.requires_grad:
        out.sum().backward()
    return subject.values(out), None if x.grad is None else subject.values(x.grad)


def _input(values: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn((3, values.shape[-1]), generator=generator)
    return x.to(values.device, values.dtype)


def _close(made: Tensor, wanted: Tensor, values: Tensor, what: str) -> None:
    require(tuple(made.shape) == tuple(wanted.shape), f"{what} has shape {tuple(made.shape)}")
    tolerance = 64 * torch.finfo(values.dtype).eps * max(wanted.detach().abs().max().item(), 1e-6)
    off = (made.detach().double() - wanted.detach().double()).abs().max().item()
    require(off <= tolerance, f"{what} is off by {off:.2g}")
