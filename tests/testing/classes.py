"""A wrapper subclass on ``tt.WrapperTensor``, and a broken copy of it for each law."""

import sys
import weakref
from typing import ClassVar

import torch
from torch import Tensor

import torchtether as tt

aten = torch.ops.aten


class Sixteenths(tt.WrapperTensor):
    """int8 codes in steps of 1/16: a minimal subclass of ``tt.WrapperTensor``."""

    inner_names, metadata_names = ("codes",), ("step",)

    def decode(self):
        return self.codes.to(self.dtype) * self.step

    def encode(self, values):
        return {"codes": (values / self.step).round().clamp(-128, 127).to(torch.int8)}

    @classmethod
    def random(cls):
        return cls(codes=torch.randint(-100, 100, (8, 16), dtype=torch.int8), step=1 / 16, dtype=torch.float32)


class _Broken(Sixteenths):
    """Computes some ops wrongly, by the functions in ``wrong``."""

    wrong: ClassVar = {}

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in cls.wrong:
            return cls.wrong[func](*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class DetachCopies(_Broken):
    wrong: ClassVar = {aten.detach.default: lambda x: x.map(torch.clone)}


class CloneShares(_Broken):
    wrong: ClassVar = {aten.clone.default: lambda x, **kwargs: x.map(torch.detach)}


class EmptyForgets(_Broken):
    """``empty_like`` changes its step."""

    wrong: ClassVar = {
        aten.empty_like.default: lambda x, dtype=None, device=None, **kwargs: type(x)(
            codes=torch.zeros_like(x.codes, device=device), step=1.0, dtype=dtype or x.dtype
        )
    }


class DtypeIgnored(_Broken):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten._to_copy.default:
            kwargs = {k: v for k, v in (kwargs or {}).items() if k != "dtype"}
        return super().__torch_dispatch__(func, types, args, kwargs)


class DeviceIgnored(_Broken):
    """``.to(device)`` leaves the codes behind, on every device but its own."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten._to_copy.default and (kwargs or {}).get("device") is not None:
            x, dtype = args[0], kwargs.get("dtype") or args[0].dtype
            if kwargs["device"] == x.device:
                return x.map(torch.detach, dtype=dtype)
        return super().__torch_dispatch__(func, types, args, kwargs)


class FlattenForgets(_Broken):
    """``__tensor_unflatten__`` loses an attribute."""

    metadata_names = ("step", "origin")

    @classmethod
    def random(cls):
        return cls(
            codes=torch.randint(-100, 100, (8, 16), dtype=torch.int8), step=1 / 16, origin="a", dtype=torch.float32
        )

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        context = context[0], (*context[1][:1], ("origin", ""))
        return super().__tensor_unflatten__(inner, context, outer_size, outer_stride)


class DeepcopyShares(_Broken):
    def __deepcopy__(self, memo):
        made = self.map(torch.detach)
        made._is_param = isinstance(self, torch.nn.Parameter)
        memo[id(self)] = made
        return made


class PickleForgets(_Broken):
    """Plain pickle loses the class; torch's own way keeps it."""

    def __reduce_ex__(self, protocol):
        if _in_torch_save():
            return super().__reduce_ex__(protocol)
        return torch.nn.Parameter, (self.dequantize(), self.requires_grad)


class SaveNeedsTrust(_Broken):
    """It cannot be read with ``weights_only``: its pickle names a function that is not allowed."""

    def __reduce_ex__(self, protocol):
        rebuild, args = super().__reduce_ex__(protocol)
        return _rebuild, (rebuild, args)


def _rebuild(function, args):
    return function(*args)


def _in_torch_save():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_save" and "torch" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Slotted(_Broken):
    """``torch.utils.swap_tensors`` refuses tensors whose slots differ."""

    __slots__ = ("extra",)


class LoadsNothing(_Broken):
    """Copying a tensor of its own class into it does nothing."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.copy_.default and all(isinstance(x, cls) for x in args[:2]):
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class AssignUnquantizes(_Broken):
    """A float state dict makes it a float, as torch's default does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is Tensor.module_load and kwargs.get("assign") and isinstance(args[0], cls):
            return args[1].detach()
        return super().__torch_function__(func, types, args, kwargs)


class CannotFill(_Broken):
    """Copying it into a plain tensor does nothing."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.copy_.default and not isinstance(args[0], cls):
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class ToHolds(_Broken):
    """A dtype conversion keeps a weak reference to the converted tensor, which torch then refuses to swap."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, cls) and _from_module() and made.dtype != args[0].dtype and not _in_swapping():
            args[0]._watch = weakref.ref(args[0])
        return made


def _from_module():
    frame = sys._getframe(2)
    for _ in range(4):
        if frame is not None and frame.f_code.co_name == "_apply":
            return True
        frame = frame and frame.f_back
    return False


class EmptiesPlain(_Broken):
    """``Module.to_empty`` makes it a plain tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.empty_like and _from_module():
            return torch.empty(args[0].shape, dtype=args[0].dtype)
        return super().__torch_function__(func, types, args, kwargs)


class LoadReturnsPlain(_Broken):
    """``load_state_dict`` under the swap flag, not ``module_load`` on its own, gives a plain tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if (
            func is Tensor.module_load
            and torch.__future__.get_swap_module_params_on_conversion()
            and not _in_swapping()
        ):
            return args[1].dequantize()
        return super().__torch_function__(func, types, args, kwargs)


def _in_swapping():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(("stock_call.py", "scope.py")):
            return True
        frame = frame.f_back
    return False


class NoHooks(_Broken):
    """It ignores attributes that users set."""

    def __setattr__(self, name, value):
        if name != "note":
            super().__setattr__(name, value)


class WrongProduct(_Broken):
    """Frozen, it computes something else in the forward pass."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        wrong = func is aten.mm.default and not any(x.requires_grad for x in args) and not torch.is_grad_enabled()
        return made * 2 if wrong else made


class NeverTrains(_Broken):
    """Steps of optimizers do not change it."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func._schema.name.startswith(("aten::_foreach_add_", "aten::add_")):
            return None if "foreach" in func._schema.name else args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class Uncompilable(_Broken):
    """Its products cannot be traced."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.mm.default:
            inner = [x.codes if isinstance(x, cls) else x for x in args]
            if any(type(x).__name__ in ("FakeTensor", "FunctionalTensor") for x in inner):
                raise RuntimeError("this class cannot be traced")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Crashes(_Broken):
    share_memory_ = Tensor.share_memory_


BROKEN = {
    "detach": DetachCopies,
    "clone": CloneShares,
    "empty-like": EmptyForgets,
    "dtype": DtypeIgnored,
    "device": DeviceIgnored,
    "flatten": FlattenForgets,
    "deepcopy": DeepcopyShares,
    "pickle": PickleForgets,
    "torch-save": SaveNeedsTrust,
    "swap": Slotted,
    "load-same": LoadsNothing,
    "load-plain": AssignUnquantizes,
    "load-into-plain": CannotFill,
    "module-to": ToHolds,
    "module-to-empty": EmptiesPlain,
    "module-load": LoadReturnsPlain,
    "hooks": NoHooks,
    "frozen-step": WrongProduct,
    "training-step": NeverTrains,
    "compile": Uncompilable,
    "share-memory": Crashes,
}
"""By the one law that each breaks."""
