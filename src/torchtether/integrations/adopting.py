"""Turn live modules of quanto, torchao and bitsandbytes into plain modules with Weights."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._checks import Model, as_module, describe_some
from .._warnings import warn
from ..errors import ConversionError, RuleError, TetherError
from ..exchange.exchange import Atomic, Exchange, tell_listeners
from ..exchange.optimizer_state import Optimizers
from ..ties.components import Component, find_components, tie_of
from ..torch_private.modules import buffers_of, forward_hooks_of, load_hooks_of, parameters_of, tables_of
from ..weights.spec import Tie
from ..weights.weight import Weight
from .foreign import Foreign

_READERS = {"optimum.quanto": "quanto", "torchao": "torchao", "bitsandbytes": "bitsandbytes"}
_SHOWN = 8
_HOLD = "Give a module that contains it."


class _Tensors(NamedTuple):
    component: Component
    tie: Tie | None
    foreign: Foreign
    bias: Tensor | None
    """The bias of the same module if its dtype differs: the library converts it in a product, torch refuses it."""


class _Module(NamedTuple):
    module: nn.Module
    plain: type[nn.Module]
    attributes: tuple[str, ...]
    library: str


def adopt(model: Model, *, optimizer: Optimizers = None, atomic: Atomic = "checked") -> Model:
    """Make the live modules of quanto, torchao and bitsandbytes plain modules that hold Weights; return the model.

    A quantized parameter becomes a Weight of the same shape (N, K) with the same codes, and stays the same Parameter
    object. The Weight decodes to the same bits as its library does. A module (``QLinear``, ``Linear4bit``) becomes a
    plain one (``nn.Linear``). It stays the same object, except for quanto, where Python cannot change the class. Ties,
    hooks, ``requires_grad`` and the state of ``optimizer`` are kept; ``atomic`` is as in ``tt.convert``. int8 of
    bitsandbytes stores no dtype: it decodes to the dtype of the bias, else to that of the model's plain parameters.

    If the library rounds inputs by row to int8 or float8, so does the Weight (``spec.activations``). Any other rounding
    of inputs is dropped, with one warning.

    Raises:
        RuleError: the model has no module or parameter of these libraries.
        ConversionError: a class is not known, a module is not quantized yet, or another object holds a parameter;
            nothing has changed.
        OptimizerError: the optimizer belongs to another model; nothing has changed.

    >>> import torch, torchtether as tt
    >>> tt.adopt(torch.nn.Linear(4, 4))
    Traceback (most recent call last):
    torchtether.errors.RuleError: the model has no module or parameter of quanto, torchao or bitsandbytes. To ...
    """
    given, model = model, as_module(model)
    tensors, modules, rounded = _find(model)
    with Exchange(model, optimizer=optimizer, atomic=atomic, verb="adopt") as exchange:
        members = [member.tensor for found in tensors for member in found.component.members]
        exchange.check([*members, *(found.bias for found in tensors if found.bias is not None)])
        for component, tie, foreign, bias in tensors:
            exchange.safe_point()
            weight = Weight(exchange.during(foreign.parts), foreign.spec.replace(tie=tie))
            exchange.put_together(
                ((member.tensor, weight) for member in component.members), replaced=foreign.attributes
            )
            if bias is not None:
                exchange.put(bias, bias.detach().to(weight.dtype))
            exchange.keep_loading(component.names)
        for found in modules:
            exchange.on_rollback(_restorer(found.module))
            _become_plain(found, exchange)
    for module in model.modules():
        _forget_quantizer(module)
    tell_listeners(model, [name for found in tensors for name in found.component.names])
    if rounded:
        how = "; ".join(dict.fromkeys(rounded.values()))
        warn(
            f"{describe_some(list(rounded), 3)}: the library rounded inputs ({how}), and a Weight does not. "
            "To round them by row, call tt.quantize_activations(model)."
        )
    return given


# -- finding ----------------------------------------------------------------------------------------------------------


def _find(model: nn.Module) -> tuple[list[_Tensors], list[_Module], dict[str, str]]:
    """Return the tensors and modules to replace, and by name each rounding of inputs that will be dropped.

    Raises ConversionError with all faults, and RuleError if there is nothing to replace.
    """
    faults: dict[str, TetherError] = {}
    rounded: dict[str, str] = {}
    modules: list[_Module] = []
    found: list[_Tensors] = []
    paths = dict(model.named_modules())
    for path, module in paths.items():
        library = _library_of(type(module))
        try:
            if library:
                if "forward" in vars(module):
                    raise ConversionError(
                        "its forward was replaced", fix="Remove the replacement first, such as accelerate's hooks."
                    )
                plain, attributes, inputs = _reader(library).plain_class(module)
                if not path and not _can_become(type(module), plain):
                    raise ConversionError(
                        f"is the model itself, and a {type(module).__name__} must be replaced by another object",
                        fix=_HOLD,
                    )
                modules.append(_Module(module, plain, attributes, library))
                rounded |= {path: inputs} if inputs else {}
            elif _is_adapter_of_library(module):
                fix = "Take the adapter off, adopt the model, and add the adapter again."
                raise ConversionError(
                    f"is a {type(module).__qualname__} of PEFT, which takes tensors of that library only", fix=fix
                )
        except ConversionError as error:
            faults[path] = error
    dtype = _dtype_of(model)
    for component in find_components(model):
        library = next((one for member in component.members if (one := _library_of(type(member.tensor)))), "")
        if not library:
            continue
        name = component.names[0]
        try:
            tie = tie_of(component)
            if tie is not None and any(view is not None for view in tie.views):
                raise ConversionError(f"shares a part of its memory with {tie.aliases[0]}", fix="Clone one of them.")
            module = paths.get(name.rpartition(".")[0], model)
            bias = parameters_of(module).get("bias")
            foreign = _reader(library).read_tensor(
                component.members[0].tensor, module, dtype if bias is None else bias.dtype
            )
            rounded |= {name: foreign.inputs} if foreign.inputs else {}
            is_apart = bias is not None and bias.is_floating_point() and bias.dtype != foreign.spec.dtype
            found.append(_Tensors(component, tie, foreign, bias if is_apart else None))
        except TetherError as error:
            faults.setdefault(name, error)
    if faults:
        _refuse(faults, len(modules) + len(found))
    if not found and not modules:
        fix = "To quantize it, call tt.quantize."
        raise RuleError("the model has no module or parameter of quanto, torchao or bitsandbytes", fix=fix)
    return found, modules, rounded


def _refuse(faults: dict[str, TetherError], good: int) -> None:
    fixes = " ".join(dict.fromkeys(error.fix for error in faults.values() if error.fix))
    if len(faults) == 1:
        ((name, error),) = faults.items()
        raise ConversionError(error.what, name=name, fix=fixes)
    shown = [f"{name}: {error.what}" for name, error in list(faults.items())[:_SHOWN]]
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    raise ConversionError(f"cannot adopt {len(faults)} of {good + len(faults)}: {'; '.join(shown)}{more}", fix=fixes)


def _library_of(kind: type) -> str:
    """Return the adoptable library in which ``kind`` or one of its bases is defined; empty if there is none."""
    for one in kind.__mro__:
        for library in _READERS:
            if one.__module__ == library or one.__module__.startswith(f"{library}."):
                return library
    return ""


def _reader(library: str) -> Any:
    return import_module(f".{_READERS[library]}", __package__)


def _is_adapter_of_library(module: nn.Module) -> bool:
    """Return whether ``module`` is an adapter layer of PEFT that works with the tensors of one such library alone."""
    package, _, leaf = type(module).__module__.rpartition(".")
    return package.startswith("peft.") and leaf in ("bnb", "torchao")


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the plain parameters if they share one; else float32."""
    plain = (p for p in model.parameters() if not _library_of(type(p)) and p.is_floating_point())
    dtypes = {parameter.dtype for parameter in plain}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


# -- changing modules -------------------------------------------------------------------------------------------------


def _become_plain(found: _Module, exchange: Exchange) -> None:
    """Give a module its plain class, and delete the attributes, buffers and hooks of its old class.

    If Python forbids that (quanto's classes have a second base), replace it by a plain module with the same tables.
    """
    module, plain, attributes, library = found
    for hooks in (load_hooks_of(module), forward_hooks_of(module), module._forward_hooks):
        for key in [key for key, hook in hooks.items() if _is_of(getattr(hook, "hook", hook), library)]:
            del hooks[key]
    for name in attributes:
        vars(module).pop(name, None)
        buffers_of(module).pop(name, None)
    if _can_become(type(module), plain):
        module.__class__ = plain
        return
    twin = plain.__new__(plain)
    vars(twin).update(vars(module))
    for parent in exchange.modules:
        children = tables_of(parent).modules
        for name in [name for name, child in children.items() if child is module]:
            exchange.on_rollback(partial(children.__setitem__, name, module))
            children[name] = twin


def _can_become(kind: type[nn.Module], plain: type[nn.Module]) -> bool:
    """Return whether Python allows to set ``__class__`` of a ``kind`` object to ``plain``."""
    probe = kind.__new__(kind)
    try:
        probe.__class__ = plain
    except TypeError:
        return False
    return True


def _is_of(function: Any, library: str) -> bool:
    """Return whether ``function``, bound or partial, is defined in ``library``."""
    function = getattr(function, "__func__", function)
    return str(getattr(getattr(function, "func", function), "__module__", "")).startswith(library)


def _restorer(module: nn.Module) -> Any:
    """Return a function that restores class, attributes and tables of ``module`` as they are now."""
    kind, own = type(module), dict(vars(module))
    tables = {name: dict(table) for name, table in own.items() if isinstance(table, dict)}

    def restore() -> None:
        module.__class__ = kind
        vars(module).clear()
        vars(module).update(own)
        for name, table in tables.items():
            vars(module)[name].clear()
            vars(module)[name].update(table)

    return restore


def _forget_quantizer(module: Any) -> None:
    """Remove the marks of quantization of transformers and diffusers from ``module``, and torchao's ``extra_repr``."""
    shown = vars(module).get("extra_repr")
    if shown is not None and _is_of(shown, "torchao"):
        del module.extra_repr
    quantizer = vars(module).get("hf_quantizer")
    library = type(quantizer).__module__.partition(".")[0]
    if library == "diffusers":
        del module.hf_quantizer
        module.is_quantized = False
        vars(module).pop("quantization_method", None)
        config = module.config  # a frozen dict
        module._internal_dict = type(config)({key: config[key] for key in config if key != "quantization_config"})
    elif library == "transformers":
        quantizer.remove_quantization_config(module)
        for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
            vars(module).pop(flag, None)
