"""Tensor subclasses of other libraries, each with its arguments of ``check_tensor_subclass``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROWS, COLUMNS = 16, 32


class Peer(NamedTuple):
    name: str
    package: str
    make: Callable[[], Tensor]
    values: Callable[[Tensor], Tensor] | None = None
    linear: Callable[[Tensor, Tensor], Tensor] | None = None
    dtype: str = "float32"

    def options(self) -> dict[str, Any]:
        return {"values": self.values, "linear": self.linear, "name": self.name}


def _int8():
    from torchao.quantization import Int8Tensor, PerRow

    return Int8Tensor.from_hp(torch.randn(ROWS, COLUMNS), PerRow())


def _float8():
    from torchao.quantization import Float8Tensor, PerRow

    return Float8Tensor.from_hp(torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16), granularity=PerRow())


def _quanto():
    from optimum.quanto import AbsmaxOptimizer, qint8, quantize_weight

    values = torch.randn(ROWS, COLUMNS)
    return quantize_weight(values, qtype=qint8, axis=0, scale=AbsmaxOptimizer()(values, qtype=qint8, axis=0))


def _params4bit():
    from bitsandbytes.nn import Params4bit

    return Params4bit(torch.randn(ROWS, COLUMNS), requires_grad=False, quant_type="nf4", blocksize=64).to("cpu")


def _params4bit_values(weight):
    import bitsandbytes.functional as F

    return F.dequantize_4bit(weight.data, weight.quant_state)


def _params4bit_linear(x, weight):
    import bitsandbytes

    return bitsandbytes.matmul_4bit(x, weight.t(), quant_state=weight.quant_state)


def _two():
    from torch.testing._internal.two_tensor import TwoTensor

    values = torch.randn(ROWS, COLUMNS)
    return TwoTensor(values, values.clone())


class ScaledTensor(Tensor):
    """A wrapper in the style of torch's recipes: inner tensors, flatten and unflatten, everything else dequantizes.

    After "Extending PyTorch" (pytorch.org/docs/stable/notes/extending.html), the part on ``__torch_dispatch__``.
    """

    @staticmethod
    def __new__(cls, codes, scale, requires_grad=False):
        return Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device, requires_grad=requires_grad
        )

    def __init__(self, codes, scale, requires_grad=False):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return ScaledTensor(inner["codes"], inner["scale"])

    def dequantize(self):
        return self.codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        from torch.utils._pytree import tree_map_only

        if func is torch.ops.aten.detach.default:
            return ScaledTensor(args[0].codes.detach(), args[0].scale.detach())
        args, kwargs = tree_map_only(ScaledTensor, ScaledTensor.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


def _scaled():
    values = torch.randn(ROWS, COLUMNS)
    scale = values.abs().amax(1, keepdim=True) / 127
    return ScaledTensor((values / scale).round().to(torch.int8), scale)


PEERS = [
    Peer("Int8Tensor", "torchao", _int8),
    Peer("Float8Tensor", "torchao", _float8, dtype="bfloat16"),
    Peer("WeightQBytesTensor", "optimum-quanto", _quanto),
    Peer("Params4bit", "bitsandbytes", _params4bit, _params4bit_values, _params4bit_linear),
    Peer("TwoTensor", "torch", _two),
    Peer("the recipe's class", "torch", _scaled),
]
