"""Decoded ops, which read values and run on the decoded tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._warnings import warn
from ...errors import UnsupportedOpError
from ...torch_private.dispatching import has_kernel, schema_of, tree_map_only
from ...torch_private.observers import is_tracing
from ...torch_private.tensors import as_plain
from ..dispatch import FOLDS, rule
from ..weight import Weight
from .below_autograd import matrix_product
from .product import traced

aten = torch.ops.aten

LARGE = 64 * 2**20
"""Bytes of decoded values above which an op other than a matrix product warns, once, that it decodes."""

MATMULS = """
    mm addmm bmm baddbmm mv addmv dot vdot linear matmul convolution _convolution addr addbmm mkldnn_rnn_layer
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    _trilinear
""".split()
"""Products, the purpose of a weight: they never warn."""

READS = """
    sum mean norm linalg_vector_norm std std_mean var var_mean amax amin max min aminmax argmax argmin prod all
    any logsumexp cumsum cumprod median mode kthvalue sort topk unique_dim _unique2 histc abs neg sign sgn
    square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sigmoid erf erfinv round
    trunc floor ceil frac relu gelu silu softplus elu hardtanh leaky_relu clamp clamp_min clamp_max nan_to_num
    add sub mul div rsub pow fmod remainder maximum minimum fmax fmin atan2 hypot copysign logaddexp lerp
    addcmul addcdiv where equal eq ne lt le gt ge isnan isinf isposinf isneginf signbit logical_not bitwise_not
    _softmax _log_softmax masked_fill masked_select nonzero index gather take scatter scatter_add index_add
    index_fill index_copy index_put tril triu trace flip roll repeat diag_embed
    _local_scalar_dense cdist _cdist_forward _linalg_svd linalg_qr geqrf _linalg_eigh linalg_inv_ex
    linalg_lu_factor_ex _linalg_det linalg_pinv linalg_cross native_layer_norm native_group_norm
    native_batch_norm _fused_rms_norm _weight_norm_interface renorm dist cov bernoulli multinomial
    _prelu_kernel native_dropout _embedding_bag _embedding_bag_forward_only mse_loss smooth_l1_loss huber_loss
    binary_cross_entropy _foreach_norm _foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_neg
    _foreach_abs _foreach_sqrt _foreach_addcmul _foreach_addcdiv _foreach_lerp _foreach_maximum _foreach_minimum
    _foreach_clamp_min _foreach_clamp_max _foreach_pow _foreach_max _foreach_reciprocal _foreach_exp
    _foreach_sign allclose count_nonzero nansum nanmedian floor_divide logical_and logical_or logical_xor isin
    cummax cummin logcumsumexp xlogy atanh _euclidean_dist histogram bucketize hash_tensor
    linalg_lstsq _linalg_solve_ex linalg_solve_triangular linalg_lu linalg_cholesky_ex
    upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    quantize_per_tensor quantize_per_channel
    fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
""".split()

OBSERVES = ["_fused_moving_avg_obs_fq_helper"]
"""Reads that write to buffers beside the weight, as the fake quantization of ``torch.ao`` does in training."""

BACKWARDS = """
    convolution_backward mkldnn_rnn_layer_backward _cdist_backward softplus_backward smooth_l1_loss_backward
    native_layer_norm_backward native_group_norm_backward native_batch_norm_backward mse_loss_backward
    huber_loss_backward leaky_relu_backward hardtanh_backward gelu_backward elu_backward silu_backward
    _weight_norm_interface_backward _prelu_kernel_backward _embedding_bag_per_sample_weights_backward
""".split()
"""Ops that autograd calls on the Weights that the ops above saved."""


def overloads(names: list[str], *, writes: bool, out: bool = False) -> list[Any]:
    """Return the overloads of the named aten ops in this torch that do (or do not) write to an argument.

    With ``out``, those that write to one ``out=``, else those without.  Left out are overloads of named tensors, and
    those without a kernel, which only TorchScript calls.
    """
    found: dict[Any, None] = {}
    for name in names:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            schema = schema_of(op)
            outs = [a.name for a in schema.arguments if a.kwarg_only and a.alias_info is not None]
            if schema.is_mutable is not writes or outs != (["out"] if out else []):
                continue
            if "Dimname" not in str(schema) and has_kernel(op):
                found[op] = None
    return list(found)


@rule(*overloads(MATMULS + BACKWARDS, writes=False), kind="decoded")
def product(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the op on the decoded values, decoded in chunks for a product of two matrices."""
    made = matrix_product(op, *args, **kwargs)
    if made is not None:
        return made
    args, kwargs = tree_map_only(Weight, Weight.values_of, (args, kwargs))
    return op(*args, **kwargs)


@rule(*overloads(MATMULS, writes=True, out=True), kind="decoded")
def product_into(op: Any, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    """Write the product of the decoded values to a plain tensor, as losses do that compute logits in chunks."""
    _refuse_weight(op, out)
    args, kwargs = tree_map_only(Weight, Weight.values_of, (args, kwargs))
    return op(*args, out=out, **kwargs)  # type: ignore[no-any-return]


def _refuse_weight(op: Any, out: object) -> None:
    if isinstance(out, Weight):
        raise UnsupportedOpError(f"{op}: out= is a Weight, which the op cannot resize", fix="Use copy_ instead.")


DECODED = (
    *(torch.einsum, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    *(torch.matrix_power, torch.linalg.matrix_power, Tensor.matrix_power, torch.linalg.matrix_rank),
    *(torch.hinge_embedding_loss, torch.nn.functional.hinge_embedding_loss, torch.nn.functional.gumbel_softmax),
    *(torch.lerp, Tensor.lerp, torch.addcdiv, Tensor.addcdiv),
)
"""Functions that permute a Weight and split it, or repeat it for each matrix of a batch; those that compute in an
``empty_like`` or a clone of it, which would round the result (or the gradient of another argument) to codes; and one
that leaves ``out=`` of any subclass unwritten."""


@rule(*DECODED, kind="decoded")
def decoded(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run it on the decoded values, with gradients; inputs are not rounded."""
    _refuse_weight(getattr(op, "__name__", op), kwargs.get("out"))
    args, kwargs = tree_map_only(Weight, Weight.dequantize, (args, kwargs))
    return op(*args, **kwargs)


INTO_PLAIN = (Tensor.lerp_, Tensor.addcdiv_)


@rule(*INTO_PLAIN, kind="re-encoded")
def decoded_into(op: Any, written: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run it on the decoded values, as ``decoded`` does, unless a Weight is written, as by the step of an optimizer."""
    if not isinstance(written, Weight):
        return decoded(op, written, *args, **kwargs)  # type: ignore[no-any-return]
    with as_plain():
        return op(written, *args, **kwargs)  # type: ignore[no-any-return]


DROPOUTS = (torch.nn.functional.dropout, torch.nn.functional.alpha_dropout, torch.dropout, torch.alpha_dropout)


@rule(*DROPOUTS, kind="decoded")
def dropped(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiply decoded values by noise, which torch computes in an ``empty_like``; without noise, decode nothing."""
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    training = given.get("train", given.get("training", op is torch.nn.functional.dropout))
    if training and not given.get("inplace", False):
        return decoded(op, *args, **kwargs)
    with as_plain():
        return op(*args, **kwargs)


@rule(aten._cudnn_rnn_flatten_weight.default, kind="decoded")
def flatten_weight(op: Any, weights: Sequence[Tensor], *args: Any) -> Tensor:
    """Leave the weights of a recurrent module where they lie: a call decodes them into memory of its own."""
    return torch.empty(0, dtype=weights[0].dtype, device=weights[0].device)


@rule(torch.nn.functional.multi_head_attention_forward, kind="decoded")
def attention(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run it on the decoded values, with gradients: the products inside repeat a Weight for each matrix of a batch."""

    def values(weight: Weight) -> Tensor:
        return weight.dequantize() if weight.spec.activations is None else weight

    args, kwargs = tree_map_only(Weight, values, (args, kwargs))
    with as_plain():
        return op(*args, **kwargs)


@rule(torch.nn.functional.linear_cross_entropy, kind="decoded")
def classified(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the logits as a product; on the decoded values with ``options``, for which torch has ops of its own."""
    if kwargs.get("options") is not None:
        return decoded(op, *args, **kwargs)
    with as_plain():
        return op(*args, **kwargs)


CONVOLUTIONS = (
    *(torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d),
    *(torch.conv_transpose3d, torch.convolution),
)


@rule(*CONVOLUTIONS, kind="decoded")
def convolution(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run it; on constants in a trace, which does not record the op itself, and so would hold its result."""
    if is_tracing():
        args, kwargs = tree_map_only(Weight, traced, (args, kwargs))
    with as_plain():
        return op(*args, **kwargs)


_FUSED = (torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention)
"""What modules in eval mode call instead of their parts; eager they do so for plain tensors only."""

FOLDS.update(dict.fromkeys(DECODED, decoded))
FOLDS.update(dict.fromkeys(INTO_PLAIN, decoded_into))
FOLDS.update(dict.fromkeys(DROPOUTS, dropped))
FOLDS.update(dict.fromkeys((torch.nn.functional.multi_head_attention_forward, *_FUSED), attention))


_warned: set[Any] = set()


@rule(*overloads(READS, writes=False), *overloads(OBSERVES, writes=True), kind="decoded")
def read(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the op on the decoded values; warn once per op when those are large."""

    def values(weight: Weight) -> Tensor:
        nbytes = weight.numel() * weight.dtype.itemsize
        if nbytes >= LARGE and op not in _warned and not weight.scheme.transparent:
            _warned.add(op)
            warn(f"{op} decodes a Weight of {nbytes / 2**20:.0f} MiB (warned once per op)")
        return weight.values_of()

    args, kwargs = tree_map_only(Weight, values, (args, kwargs))
    return op(*args, **kwargs)
