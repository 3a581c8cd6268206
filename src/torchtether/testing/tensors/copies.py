"""Laws of copies: a copy of a tensor has its class, metadata and values."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..._dtypes import dtype_name
from ...torch_private.dispatching import is_traceable_wrapper_subclass, tree_leaves
from ..law import Law, NotApplicable, law, require
from .facts import facts_of, is_wrapper, leaves, memories, same
from .subject import Subject

LAWS: list[Law] = []

_DTYPES = (torch.bfloat16, torch.float16, torch.float64, torch.float32)


@law(
    LAWS,
    "detach",
    "detach() keeps class, metadata and values, and shares memory",
    "nn.Parameter(x), state_dict() and every optimizer detach: what is lost there is lost everywhere",
)
def _detach(subject: Subject) -> None:
    given = subject.make_tensor()
    made = given.detach()
    same(made, given, "detach()")
    require(memories(made) == memories(given), "detach() copies the memory")


@law(
    LAWS,
    "clone",
    "clone() keeps class, metadata and values, in memory of its own",
    "copies of a model (EMA, snapshots) decode to other values, or change with the original",
)
def _clone(subject: Subject) -> None:
    given = subject.make_tensor()
    made = given.clone()
    same(made, given, "clone()")
    require(not memories(made) & memories(given), "clone() shares memory with the original")


@law(
    LAWS,
    "empty-like",
    "empty_like() keeps class, metadata and shape, on the requested device",
    "model.to_empty(), the way from meta to real memory, fails or leaves a plain tensor",
)
def _empty_like(subject: Subject) -> None:
    given = subject.make_tensor()
    made = torch.empty_like(given)
    same(made, given, "empty_like()", but={"values"})
    require(not memories(made) & memories(given), "empty_like() shares memory with the original")
    ghost = torch.empty_like(given, device="meta")
    same(ghost, given, 'empty_like(device="meta")', but={"values", "device"})
    require(_devices(ghost) == {"meta"}, f'empty_like(device="meta") is on {_devices(ghost)}')


@law(
    LAWS,
    "dtype",
    ".to(dtype), .bfloat16() and similar methods return that dtype, with the values",
    "model.bfloat16() leaves this weight in its old dtype: the next product fails, or computes in another precision",
)
def _dtype(subject: Subject) -> None:
    given = subject.make_tensor()
    if not given.is_floating_point():
        raise NotApplicable(f"its dtype is {given.dtype}, which modules do not convert")
    values = subject.values(given)
    for dtype in _DTYPES:
        for how, made in (
            (f".to({dtype_name(dtype)})", given.to(dtype)),
            (f".{_METHODS[dtype]}()", getattr(given, _METHODS[dtype])()),
        ):
            require(made.dtype == dtype, f"has dtype {dtype_name(made.dtype)} after {how}")
            require(type(made) is type(given), f"is a {type(made).__name__} after {how}")
            _close(subject.values(made), values, dtype, how)
            back = made.to(given.dtype)
            require(back.dtype == given.dtype, f"has dtype {dtype_name(back.dtype)} after {how} and back")
            _close(subject.values(back), values, dtype, f"{how} and back")


@law(
    LAWS,
    "device",
    ".to(device) moves every inner tensor, and keeps class, metadata and values",
    "a part of the weight is not moved, so the first forward fails; or a requested copy is the original",
)
def _device(subject: Subject) -> None:
    given = subject.make_tensor()
    ghost = given.to("meta")
    same(ghost, given, '.to("meta")', but={"values", "device"})
    require(_devices(ghost) == {"meta"}, f'.to("meta") leaves inner tensors on {_devices(ghost) - {"meta"}}')
    copied = given.to(given.device, copy=True)
    same(copied, given, ".to(device, copy=True)")
    require(not memories(copied) & memories(given), ".to(device, copy=True) shares memory with the original")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and given.device.type == "cpu":
        there = given.to(accelerator)
        require(_devices(there) == {accelerator.type}, f".to({accelerator}) leaves inner tensors on {_devices(there)}")
        same(there.to("cpu"), given, f".to({accelerator}) and back")


@law(
    LAWS,
    "flatten",
    "__tensor_flatten__ and __tensor_unflatten__ are inverse",
    "torch.compile, torch.export, distributed checkpoints and Module.to() cannot find its inner tensors",
)
def _flatten(subject: Subject) -> None:
    given = subject.make_tensor()
    if not is_traceable_wrapper_subclass(given):
        if not is_wrapper(given):
            raise NotApplicable("it holds its values itself: there are no inner tensors")
        require(False, "has no __tensor_flatten__ and __tensor_unflatten__")
    names, context = given.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        require(
            isinstance(getattr(given, name, None), Tensor), f"__tensor_flatten__ names {name!r}, which is no tensor"
        )
    is_hidden = any(isinstance(leaf, Tensor) for leaf in tree_leaves(context))
    require(not is_hidden, "__tensor_flatten__ returns a tensor in its metadata")
    inner = {name: getattr(given, name) for name in names}
    made = type(given).__tensor_unflatten__(  # type: ignore[attr-defined]
        inner, context, given.shape, given.stride()
    )
    same(made, given, "flatten and unflatten")


@law(
    LAWS,
    "deepcopy",
    "copy.deepcopy keeps class, metadata, values and ties, in memory of its own",
    "copies of a model lose the class or the ties of the weight: they need more memory, or train wrongly",
)
def _deepcopy(subject: Subject) -> None:
    given = subject.parameter()
    made = copy.deepcopy(given)
    _same_parameter(made, given, "deepcopy")
    require(not memories(made) & memories(given), "deepcopy shares memory with the original")
    module = copy.deepcopy(subject.tied())
    require(module.emb.weight is module.head.weight, "deepcopy of a module unties it")


@law(
    LAWS,
    "pickle",
    "pickle keeps class, metadata and values",
    "it cannot be sent to another process (DataLoader, multiprocessing, ray)",
)
def _pickle(subject: Subject) -> None:
    given = subject.parameter()
    _same_parameter(pickle.loads(pickle.dumps(given)), given, "pickle")


@law(
    LAWS,
    "torch-save",
    "torch.save and torch.load(weights_only=True) keep class, metadata, values and ties",
    "state dicts with it cannot be loaded without running code that the file names, or lose ties",
)
def _torch_save(subject: Subject) -> None:
    given = subject.parameter()
    buffer = io.BytesIO()
    torch.save({"emb.weight": given, "head.weight": given}, buffer)
    buffer.seek(0)
    made = torch.load(buffer, weights_only=True)
    _same_parameter(made["emb.weight"], given, "torch.save and torch.load")
    require(made["emb.weight"] is made["head.weight"], "torch.save and torch.load untie it")


@law(
    LAWS,
    "swap",
    "torch.utils.swap_tensors exchanges it with a plain Parameter",
    "it cannot replace a parameter that an optimizer holds, so that quantizing loses the optimizer",
)
def _swap(subject: Subject) -> None:
    swapped = subject.parameter()
    kind = type(swapped)
    require(not weakref.getweakrefs(swapped), "its class keeps a weak reference to each tensor")
    before = facts_of(subject.make_tensor())
    plain = nn.Parameter(torch.zeros(3))
    torch.utils.swap_tensors(plain, swapped)
    require(type(plain) is kind, f"the Parameter is a {type(plain).__name__} after the swap")
    require(type(swapped) is nn.Parameter, f"it is a {type(swapped).__name__} after the swap, not a Parameter")
    require(facts_of(plain).keys() >= before.keys(), "the swap loses attributes of it")
    torch.utils.swap_tensors(plain, swapped)
    require(type(swapped) is kind, f"it is a {type(swapped).__name__} after it was swapped back")


_METHODS = {torch.bfloat16: "bfloat16", torch.float16: "half", torch.float64: "double", torch.float32: "float"}


def _same_parameter(made: Any, given: nn.Parameter, how: str) -> None:
    require(isinstance(made, Tensor), f"{how} returns a {type(made).__name__}")
    same(made, given, how)
    require(isinstance(made, nn.Parameter), f"{how} returns a tensor that is not a Parameter")
    require(made.requires_grad == given.requires_grad, f"{how} changes requires_grad to {made.requires_grad}")


def _devices(tensor: Tensor) -> set[str]:
    return {tensor.device.type, *(leaf.device.type for leaf in leaves(tensor))}


def _close(made: Tensor, values: Tensor, dtype: torch.dtype, how: str) -> None:
    wanted = values.double()
    tolerance = 8 * max(torch.finfo(dtype).eps, torch.finfo(values.dtype).eps) * wanted.abs().max().item()
    off = (made.double() - wanted).abs().max().item()
    require(off <= tolerance, f"values are off by {off:.2g} after {how}")
