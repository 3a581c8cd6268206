"""Laws of modules: torch's own conversions keep the Parameter object, its tie and its place in the optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...exchange.scope import swapping
from ...torch_private.tensors import hooks_of
from ..law import Law, law, require
from .subject import Subject, Tied

LAWS: list[Law] = []

Convert = Callable[[Tied], object]

_UNTRAINED = "the optimizer silently trains a parameter that the model no longer has, and ties are lost"


@law(
    LAWS,
    "module-to",
    "Module.to() and .bfloat16() keep the Parameter, its tie and its place in the optimizer",
    _UNTRAINED,
)
def _module_to(subject: Subject) -> None:
    conversions: tuple[tuple[str, Convert], ...] = (
        (".bfloat16()", lambda module: module.bfloat16()),
        (".to(torch.float64)", lambda module: module.to(torch.float64)),
        (".half()", lambda module: module.half()),
        (".cpu()", lambda module: module.cpu()),
    )
    for how, convert in conversions:
        for swap in (False, True):
            _keeps(subject.tied(), convert, how, swap)


@law(
    LAWS,
    "module-to-empty",
    "Module.to_empty() keeps the Parameter, its class, its tie and its place in the optimizer",
    "a model that was built on meta cannot get memory, or its optimizer holds other parameters",
)
def _module_to_empty(subject: Subject) -> None:
    for swap in (False, True):
        _keeps(subject.tied(), lambda module: module.to_empty(device="cpu"), ".to_empty()", swap)

    def there_and_back(module: Tied) -> None:
        module.to("meta")
        module.to_empty(device="cpu")

    made = _keeps(subject.tied(), there_and_back, '.to("meta") and .to_empty()', True)
    require(made.device.type == "cpu", f'.to("meta") and .to_empty(device="cpu") return {made.device}')


@law(
    LAWS,
    "module-load",
    "load_state_dict() keeps the Parameter, its class, its tie and its place in the optimizer",
    _UNTRAINED,
)
def _module_load(subject: Subject) -> None:
    for swap, assign in ((False, False), (True, False), (True, True)):
        state = subject.tied(1).state_dict()
        how = f"load_state_dict(assign={assign})"
        _keeps(subject.tied(), lambda m: m.load_state_dict(state, assign=assign), how, swap)  # noqa: B023


@law(
    LAWS,
    "hooks",
    "inside tt.swapping, conversions keep gradients, hooks and attributes too",
    "gradient clipping, sharding and logging hooks silently stop running",
)
def _hooks(subject: Subject) -> None:
    conversions: tuple[tuple[str, Convert], ...] = (
        (".bfloat16()", lambda module: module.bfloat16()),
        ("load_state_dict(assign=True)", lambda held: held.load_state_dict(subject.tied(1).state_dict(), assign=True)),
    )
    converts = subject.parameter(requires_grad=True).bfloat16().dtype == torch.bfloat16  # if not, the law "dtype" fails
    for how, convert in conversions:
        module = subject.tied(requires_grad=True)
        weight = module.weight
        weight.register_hook(lambda grad: grad)
        weight.register_post_accumulate_grad_hook(lambda held: None)
        weight.note = "kept"  # type: ignore[attr-defined]
        has_grad = "load" not in how and converts  # a load replaces the values that a gradient belongs to
        if has_grad:
            weight.grad = torch.zeros(weight.shape, dtype=weight.dtype)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with swapping(module, optimizer=optimizer):
            convert(module)
        where = f"{how} inside tt.swapping"
        _same_places(module, weight, type(weight), optimizer, where)
        hooks, after = hooks_of(weight)
        require(bool(hooks), f"{where} loses the gradient hook")
        require(bool(after), f"{where} loses the hook after accumulation")
        require(getattr(weight, "note", None) == "kept", f"{where} loses the attributes that users set")
        require(not has_grad or isinstance(weight.grad, Tensor), f"{where} loses the gradient")


def _keeps(module: Tied, convert: Convert, how: str, swap: bool) -> nn.Parameter:
    how = f"{how} with the swap flag on" if swap else how
    weight, kind = module.weight, type(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        convert(module)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return _same_places(module, weight, kind, optimizer, how)


def _same_places(
    module: Tied, weight: nn.Parameter, kind: type, optimizer: torch.optim.Optimizer, how: str
) -> nn.Parameter:
    is_plain = type(module.weight) is nn.Parameter
    require(module.emb.weight is module.head.weight, f"{how} unties it")
    require(module.weight is weight, f"{how} replaces the Parameter, which the optimizer still holds")
    require(optimizer.param_groups[0]["params"][0] is module.weight, f"{how} removes it from the optimizer")
    require(type(module.weight) is kind, f"{how} makes it a {'plain ' * is_plain}{type(module.weight).__name__}")
    require(isinstance(module.weight, nn.Parameter), f"{how} leaves a tensor that is not a Parameter")
    return module.weight
