"""The catalog over which laws run: one row for each scheme and each op. A test fails if a row is missing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

import torchtether as tt
from torchtether.schemes import Biased, SuperBlocks
from torchtether.weights.dispatch import KINDS

F = torch.nn.functional
aten = torch.ops.aten


class SchemeRow(NamedTuple):
    id: str
    scheme: tt.Scheme
    ranks: tuple[int, ...] = (1, 2, 3)


def _codebook(size, **kwargs):
    return tt.Codebook(table=tuple(torch.linspace(-1, 1, size).tolist()), **kwargs)


_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

SCHEMES = [
    SchemeRow("plain", tt.Plain()),
    SchemeRow("int8", tt.int8()),
    SchemeRow("int8-tensor", tt.Affine(block=(None, None))),
    SchemeRow("int8-group16", tt.Affine(block=(1, 16))),
    SchemeRow("int8-block", tt.Affine(block=(4, 16)), ranks=(2, 3)),
    SchemeRow("int8-narrow", tt.Affine(narrow_range=True)),
    SchemeRow("int8-unit", tt.Affine(narrow_range=True, unit=7.874015718698502e-3)),
    SchemeRow("int8-asym", tt.Affine(symmetric=False)),
    SchemeRow("uint8-asym", tt.Affine(signed=False, symmetric=False)),
    SchemeRow("int8-bf16-scale", tt.Affine(scale_dtype=torch.bfloat16)),
    *[SchemeRow(f"int{b}-group8", tt.Affine(bits=b, block=(1, 8), symmetric=b % 2 == 0)) for b in range(1, 8)],
    SchemeRow("int4", tt.int4()),
    SchemeRow("int4-sym-group32", tt.int4(group_size=32, symmetric=True)),
    SchemeRow("uint4-asym", tt.Affine(bits=4, signed=False, symmetric=False, block=(1, 16))),
    SchemeRow("int4-mse", tt.int4(group_size=16, fit="mse")),
    SchemeRow("biased4", Biased(block=(1, 32))),
    SchemeRow("biased4-hqq", Biased(block=(1, 16), fit="hqq")),
    SchemeRow("biased3-bf16", Biased(3, (1, 8), torch.bfloat16, torch.bfloat16)),
    SchemeRow("biased8-bf16", Biased(8, (1, 64), torch.bfloat16, torch.bfloat16)),
    SchemeRow("biased4-bf16-first", Biased(4, (1, 16), torch.bfloat16, torch.bfloat16, bias_first=True)),
    SchemeRow("q4_k", SuperBlocks(4, 32, minimum=True)),
    SchemeRow("q2_k", SuperBlocks(2, 16, scale_bits=4, minimum=True)),
    SchemeRow("q3_k", SuperBlocks(3, 16, offset=4)),
    SchemeRow("q6_k", SuperBlocks(6, 16, scale_bits=8, offset=32)),
    SchemeRow("super-blocks-small", SuperBlocks(5, 8, 16, minimum=True)),
    SchemeRow("super-blocks-table", SuperBlocks(4, 8, 32, table=_UNEVEN)),
    SchemeRow("super-blocks-alone", SuperBlocks(4, 8, 8, 0, table=_UNEVEN)),
    SchemeRow("biased5-fp16-scale", Biased(5, (1, 32), torch.float16)),
    SchemeRow("fp8", tt.fp8()),
    SchemeRow("fp8-tensor", tt.fp8("tensor")),
    SchemeRow("fp8-block", tt.ScaledFloat(element="e4m3", block=(4, 16)), ranks=(2, 3)),
    SchemeRow("fp8-e5m2", tt.ScaledFloat(element="e5m2")),
    SchemeRow("fp8-bf16-scale", tt.ScaledFloat(element="e4m3", scale_dtype=torch.bfloat16)),
    SchemeRow("fp8-e4m3-scale", tt.ScaledFloat(element="e4m3", block=(1, 16), scale_dtype=torch.float8_e4m3fn)),
    SchemeRow("nvfp4-divides", tt.ScaledFloat(**{**vars(tt.nvfp4()), "global_divides": True})),
    SchemeRow("mxfp4-rceil", tt.ScaledFloat(**{**vars(tt.mxfp4()), "scale_rounding": "rceil"})),
    SchemeRow("mxfp8", tt.ScaledFloat(element="e4m3", block=(1, 32), scale_dtype=torch.float8_e8m0fnu)),
    SchemeRow("mxfp6", tt.ScaledFloat(element="e2m3", block=(1, 32), scale_dtype=torch.float8_e8m0fnu)),
    SchemeRow("mxfp4", tt.mxfp4()),
    SchemeRow("nvfp4", tt.nvfp4()),
    SchemeRow("nf4", tt.nf4()),
    SchemeRow("nf4-double", tt.nf4(double_quant=True)),
    SchemeRow("nf4-rows", tt.Codebook(table=tt.nf4().table, block_size=16, flat=False)),
    SchemeRow("codebook-uneven", tt.Codebook(table=(-0.9, -0.2, 0.0, 0.3, 0.7), block_size=8)),
    SchemeRow("codebook-5", _codebook(5, block_size=8)),
    SchemeRow("sinq", tt.sinq(), ranks=(2, 3)),
    SchemeRow("int8-mastered", tt.Mastered(tt.int8())),
    SchemeRow("nf4-mastered", tt.Mastered(tt.nf4(), torch.bfloat16)),
    SchemeRow("codebook-256", _codebook(256, block_size=16, flat=False)),
]

each_scheme = pytest.mark.parametrize("row", SCHEMES, ids=[row.id for row in SCHEMES])
each_quantized = pytest.mark.parametrize("row", SCHEMES[1:], ids=[row.id for row in SCHEMES[1:]])


def slow_but(rows, keep):
    """Return a parameter for each of ``rows``, marked slow unless its id is in ``keep``: those run the same code."""
    return [pytest.param(row, id=row.id, marks=() if row.id in keep else pytest.mark.slow) for row in rows]


EACH_KIND = {"plain", "int8", "int4", "uint4-asym", "biased4", "q4_k", "fp8", "fp8-block", "nvfp4", "nf4", "codebook-5"}
"""The ids of one row of each kind of scheme."""

# One of each family, for products that are too large to run over every row.
FEW = [
    row
    for row in SCHEMES
    if row.id in {"plain", "int8", "int4-sym-group32", "fp8", "mxfp4", "nvfp4", "nf4", "nf4-double"}
]
few_schemes = pytest.mark.parametrize("row", FEW, ids=[row.id for row in FEW])


# -- ops ----------------------------------------------------------------------------------------------------------

Sample = Callable[[torch.Tensor], tuple[tuple, dict[str, Any]]]

ROWS, COLUMNS = 16, 64
"""The shape of the Weight in op samples."""


def _call(*args, **kwargs) -> Sample:
    """Return a sample with these arguments; ``W`` stands for the Weight, and a function is called with it."""
    fill = lambda value, w: w if value is W else value(w) if callable(value) else value  # noqa: E731
    nested = lambda value, w: [fill(v, w) for v in value] if isinstance(value, list) else fill(value, w)  # noqa: E731
    return lambda w: (tuple(nested(a, w) for a in args), {k: nested(v, w) for k, v in kwargs.items()})


class W:
    """Placeholder of the Weight in a sample."""


def rand(*shape, seed=7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.25


def _cube(w):
    """Return the Weight viewed with 3 dimensions, for batched products."""
    return w.view(4, ROWS // 4, COLUMNS)


def _square(w):
    """Return a square matrix (COLUMNS, COLUMNS) computed from the first row of the Weight."""
    return w.index_select(0, torch.arange(1)).t() @ w.index_select(0, torch.arange(1)) + torch.eye(COLUMNS)


def _row(w):
    """Return the first row of the Weight."""
    return w[0]


def _image(w):
    """Return the Weight with the shape of a batch of images."""
    return w.view(1, 4, ROWS // 4, COLUMNS)


_flat_index = torch.tensor([3, 0, 3])
_one = torch.tensor(1)
_zeros = torch.zeros(ROWS, dtype=torch.int32)
_grid = torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
_mask = torch.eye(ROWS, COLUMNS) > 0

SAMPLES: dict[str, Sample] = {
    "record_stream": _call(W, torch.Stream(device="cpu")),
    "_cudnn_rnn_flatten_weight": _call([W, rand(16, 4)], 2, COLUMNS, 2, 4, 0, 1, True, False),
    # products
    "mm": _call(rand(3, ROWS), W),
    "addmm": _call(rand(COLUMNS), rand(3, ROWS), W),
    "addmm_": _call(W, rand(ROWS, 4), rand(4, COLUMNS)),
    "mv": _call(W, rand(COLUMNS)),
    "addmv": _call(rand(ROWS), W, rand(COLUMNS)),
    "addr": _call(W, rand(ROWS), rand(COLUMNS)),
    "addr_": _call(W, rand(ROWS), rand(COLUMNS)),
    "dot": _call(rand(COLUMNS), _row),
    "vdot": _call(rand(COLUMNS), _row),
    "addmv_": _call(_row, rand(COLUMNS, 5), rand(5)),
    "bmm": _call(rand(4, 2, ROWS // 4), _cube),
    "baddbmm": _call(rand(4, 2, COLUMNS), rand(4, 2, ROWS // 4), _cube),
    "addbmm": _call(rand(2, COLUMNS), rand(4, 2, ROWS // 4), _cube),
    "baddbmm_": _call(_cube, rand(4, ROWS // 4, 3), rand(4, 3, COLUMNS)),
    "addbmm_": _call(W, rand(4, ROWS, 3), rand(4, 3, COLUMNS)),
    "linear": _call(rand(3, COLUMNS), W),
    "matmul": _call(rand(3, ROWS), W),
    "convolution": _call(rand(1, ROWS // 4, 70), _cube, None, [1], [0], [1], False, [0], 1),
    "_convolution": _call(
        rand(1, ROWS // 4, 70), _cube, None, [1], [0], [1], False, [0], 1, False, False, False, False
    ),
    "_convolution.deprecated": _call(
        rand(1, ROWS // 4, 70), _cube, None, [1], [0], [1], False, [0], 1, False, False, False
    ),
    "conv1d": _call(rand(1, ROWS // 4, 70), _cube),
    "conv2d": _call(rand(1, 4, 6, 70), _image),
    "conv3d": _call(rand(1, 4, 1, 6, 70), lambda w: _image(w).unsqueeze(2)),
    "conv_transpose1d": _call(rand(1, 4, 5), _cube),
    "conv_transpose2d": _call(rand(1, 1, 3, 3), _image),
    "conv_transpose3d": _call(rand(1, 1, 1, 3, 3), lambda w: _image(w).unsqueeze(2)),
    "mkldnn_rnn_layer": _call(
        rand(3, 2, COLUMNS),
        W,
        rand(ROWS, ROWS // 4),
        rand(ROWS),
        rand(ROWS),
        rand(2, ROWS // 4),
        rand(2, ROWS // 4),
        False,
        [],
        2,
        ROWS // 4,
        1,
        True,
        False,
        False,
        False,
    ),
    "_trilinear": _call(W, W, W, [], [], [], []),
    # moves and creation
    "_to_copy": _call(W, dtype=torch.bfloat16),
    "new_empty": _call(W, [ROWS + 4, COLUMNS]),
    "new_zeros": _call(W, [ROWS + 4, COLUMNS]),
    "new_ones": _call(W, [2, 3]),
    "new_full": _call(W, [2, 3], 1.5),
    "new_empty_strided": _call(W, [2, 3], [3, 1]),
    "full_like": _call(W, 1.5),
    "randint_like": _call(W, 5),
    "randint_like.low_dtype": _call(W, 1, 5),
    # views
    "t": _call(W),
    "transpose": _call(W, 0, 1),
    "permute": _call(W, [1, 0]),
    "view": _call(W, [4, 4, COLUMNS]),
    "_unsafe_view": _call(W, [4, 4, COLUMNS]),
    "_reshape_alias": _call(W, [4, 4, COLUMNS], [4 * COLUMNS, COLUMNS, 1]),
    "unsqueeze": _call(W, 0),
    "squeeze": _call(lambda w: w.unsqueeze(0)),
    "squeeze.dim": _call(lambda w: w.unsqueeze(0), 0),
    "squeeze.dims": _call(lambda w: w.unsqueeze(0), [0]),
    "expand": _call(W, [-1, COLUMNS]),
    "as_strided": _call(W, [ROWS, COLUMNS], [COLUMNS, 1], 0),
    "slice": _call(W, 0, 4, 12),
    "select": _call(W, 0, 3),
    "split": _call(W, 8),
    "split_with_sizes": _call(W, [4, 12]),
    "unbind": _call(W),
    "index_select": _call(W, 0, _flat_index),
    "cat": _call([W, W]),
    "stack": _call([W, W]),
    "embedding": _call(W, torch.tensor([[0, 3], [ROWS - 1, 0]])),
    # reads whose arguments cannot be derived from the schema
    "index": _call(W, [_flat_index]),
    "gather": _call(W, 0, _grid),
    "take": _call(W, _flat_index),
    "scatter": _call(W, 0, _grid, 2.0),
    "scatter.src": _call(W, 0, _grid, rand(ROWS, COLUMNS)),
    "scatter.reduce": _call(W, 0, _grid, rand(ROWS, COLUMNS), reduce="add"),
    "scatter.value_reduce": _call(W, 0, _grid, 2.0, reduce="add"),
    "scatter_add": _call(W, 0, _grid, rand(ROWS, COLUMNS)),
    "index_add": _call(W, 0, _flat_index, rand(3, COLUMNS)),
    "index_fill": _call(W, 0, _flat_index, 2.0),
    "index_fill.int_Tensor": _call(W, 0, _flat_index, torch.tensor(2.0)),
    "index_copy": _call(W, 0, torch.tensor([0, 2]), rand(2, COLUMNS)),
    "index_put": _call(W, [_flat_index], rand(3, COLUMNS)),
    "masked_scatter": _call(W, _mask, rand(ROWS, COLUMNS)),
    "masked_fill.Tensor": _call(W, _mask, torch.tensor(2.0)),
    "where": _call(_mask, W, rand(ROWS, COLUMNS)),
    "where.ScalarSelf": _call(_mask, 1.0, W),
    "where.ScalarOther": _call(_mask, W, 1.0),
    "where.Scalar": _call(lambda w: w > 0, 1.0, 2.0),
    "clamp": _call(W, 0.0, 1.0),
    "clamp.Tensor": _call(W, torch.tensor(0.0), torch.tensor(1.0)),
    "norm.ScalarOpt_dim": _call(W, 2, [1]),
    "norm.ScalarOpt_dim_dtype": _call(W, 2, [1], True, dtype=torch.float32),
    "norm.ScalarOpt_dtype": _call(W, 2, dtype=torch.float32),
    "std.correction": _call(W, None, correction=1),
    "kthvalue": _call(W, 2),
    "topk": _call(W, 3),
    "histc": _call(lambda w: w.to(torch.float32), 5),
    "unique_dim": _call(W, 0),
    "renorm": _call(W, 2, 0, 1.0),
    "renorm_": _call(W, 2, 0, 1.0),
    "roll": _call(W, [1], [0]),
    "flip": _call(W, [0]),
    "repeat": _call(W, [2, 1]),
    "constant_pad_nd": _call(W, [0, 0, 0, 3]),
    "_local_scalar_dense": _call(lambda w: w.sum()),
    "cdist": _call(rand(30, COLUMNS), W),  # more than 25 rows are another op
    "_cdist_forward": _call(W, W, 2.0, None),
    "_euclidean_dist": _call(rand(30, COLUMNS), W),
    "histogram": _call(lambda w: w.to(torch.float32), 5),
    "histogram.bins_tensor": _call(lambda w: w.to(torch.float32), torch.linspace(-2, 2, 6)),
    "bucketize": _call(W, torch.linspace(-1, 1, 6)),
    "bucketize.Scalar": _call(2.0, _row),
    "linalg_lstsq": _call(lambda w: w.t(), rand(COLUMNS, 2)),
    "_linalg_solve_ex": _call(rand(ROWS, ROWS) + 9 * torch.eye(ROWS), W),
    "linalg_solve_triangular": _call(rand(ROWS, ROWS) + 9 * torch.eye(ROWS), W, upper=True),
    "linalg_cholesky_ex": _call(_square),
    "upsample_bilinear2d": _call(_image, [8, 8], False),
    "upsample_bilinear2d.vec": _call(_image, [8, 8], False, None),
    "upsample_bicubic2d": _call(_image, [8, 8], False),
    "upsample_bicubic2d.vec": _call(_image, [8, 8], False, None),
    "_upsample_bilinear2d_aa": _call(_image, [8, 8], False),
    "_upsample_bilinear2d_aa.vec": _call(_image, [8, 8], False, None),
    "_upsample_bicubic2d_aa": _call(_image, [8, 8], False),
    "_upsample_bicubic2d_aa.vec": _call(_image, [8, 8], False, None),
    "quantize_per_tensor": _call(W, 0.02, 3, torch.qint8),
    "quantize_per_tensor.tensor_qparams": _call(W, torch.tensor(0.02), torch.tensor(3), torch.qint8),
    "quantize_per_tensor.tensors": _call([W], torch.tensor([0.02]), torch.tensor([3]), torch.qint8),
    "quantize_per_channel": _call(W, rand(ROWS).abs() + 0.1, torch.zeros(ROWS), 0, torch.qint8),
    "fake_quantize_per_tensor_affine_cachemask": _call(W, 0.02, 3, -128, 127),
    "fake_quantize_per_channel_affine_cachemask": _call(W, rand(ROWS).abs() + 0.1, _zeros, 0, -128, 127),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _call(
        *(W, torch.tensor(0.02), torch.tensor(3, dtype=torch.int32), torch.tensor(1), -128, 127)
    ),
    "_fused_moving_avg_obs_fq_helper": lambda w: (
        (w, _one, _one, torch.zeros(ROWS), torch.zeros(ROWS), torch.ones(ROWS), _zeros, 0.01, -128, 127, 0, True),
        {},
    ),
    "_linalg_det": _call(_square),
    "_linalg_eigh": _call(_square),
    "linalg_inv_ex": _call(_square),
    "binary_cross_entropy": _call(rand(ROWS, COLUMNS) / 2, lambda w: (w > 0).to(torch.float32)),
    "masked_fill": _call(W, _mask, 2.0),
    "masked_select": _call(W, _mask),
    "bernoulli.p": _call(W, 0.5),
    "bernoulli.Tensor": _call(W, rand(ROWS, COLUMNS) / 2),
    "bernoulli_.Tensor": _call(W, rand(ROWS, COLUMNS) / 2),
    "where.default": _call(lambda w: w > 0),
    "linalg_cross": _call(lambda w: w.view(4, 4, COLUMNS)[:3].permute(1, 2, 0), rand(4, COLUMNS, 3)),
    "native_layer_norm": _call(rand(2, COLUMNS), [COLUMNS], _row, _row, 1e-5),
    "native_group_norm": _call(rand(2, COLUMNS, 3), _row, _row, 2, COLUMNS, 3, 4, 1e-5),
    "native_batch_norm": _call(rand(4, COLUMNS), _row, _row, None, None, True, 0.1, 1e-5),
    "_fused_rms_norm": _call(rand(2, COLUMNS), [COLUMNS], _row, 1e-5),
    "_weight_norm_interface": _call(W, rand(ROWS, 1), 0),
    "native_dropout": _call(W, 0.0, True),
    "bernoulli": _call(lambda w: w.zero_()),
    "multinomial": _call(lambda w: w.abs_(), 1),
    "_embedding_bag": _call(
        *(W, _flat_index, torch.tensor([0]), False, 0, False, lambda w: rand(3).requires_grad_(w.requires_grad))
    ),
    "_embedding_bag_forward_only": _call(W, _flat_index, torch.tensor([0])),
    "polygamma": _call(W, 1),
    # writes
    "_foreach_add.Tensor": _call([W], torch.tensor(2.0)),
    "_foreach_mul.Tensor": _call([W], torch.tensor(2.0)),
    "_foreach_div.Tensor": _call([W], torch.tensor(2.0)),
    "_foreach_addcmul.Tensor": _call([W], [rand(ROWS, COLUMNS)], [rand(ROWS, COLUMNS)], torch.tensor([2.0])),
    "_foreach_addcdiv.Tensor": _call([W], [rand(ROWS, COLUMNS)], [rand(ROWS, COLUMNS)], torch.tensor([2.0])),
    "_foreach_add_.Tensor": _call([W], torch.tensor(2.0)),
    "_foreach_mul_.Tensor": _call([W], torch.tensor(2.0)),
    "_foreach_div_.Tensor": _call([W], torch.tensor(2.0)),
    "_foreach_addcmul_.Tensor": _call([W], [rand(ROWS, COLUMNS)], [rand(ROWS, COLUMNS)], torch.tensor([2.0])),
    "_foreach_addcdiv_.Tensor": _call([W], [rand(ROWS, COLUMNS)], [rand(ROWS, COLUMNS)], torch.tensor([2.0])),
    "copy_": _call(W, rand(ROWS, COLUMNS)),
    "fill_.Tensor": _call(W, torch.tensor(2.0)),
    "masked_fill_": _call(W, _mask, 2.0),
    "masked_fill_.Tensor": _call(W, _mask, torch.tensor(2.0)),
    "masked_scatter_": _call(W, _mask, rand(ROWS, COLUMNS)),
    "index_fill_": _call(W, 0, _flat_index, 2.0),
    "index_fill_.int_Tensor": _call(W, 0, _flat_index, torch.tensor(2.0)),
    "index_add_": _call(W, 0, _flat_index, rand(3, COLUMNS)),
    "index_copy_": _call(W, 0, torch.tensor([0, 2]), rand(2, COLUMNS)),
    "index_put_": _call(W, [_flat_index], rand(3, COLUMNS)),
    "scatter_": _call(W, 0, _grid, 2.0),
    "scatter_.src": _call(W, 0, _grid, rand(ROWS, COLUMNS)),
    "scatter_.reduce": _call(W, 0, _grid, rand(ROWS, COLUMNS), reduce="add"),
    "scatter_.value_reduce": _call(W, 0, _grid, 2.0, reduce="add"),
    "scatter_add_": _call(W, 0, _grid, rand(ROWS, COLUMNS)),
    "clamp_": _call(W, 0.0, 1.0),
    "clamp_.Tensor": _call(W, torch.tensor(0.0), torch.tensor(1.0)),
    "geometric_": _call(W, 0.5),
    "random_.from": _call(W, 0, 5),
    "normal_": _call(W),
    "embedding_renorm_": _call(W, _flat_index, 1.0, 2.0),
    "_grouped_mm": _call(rand(3, COLUMNS), lambda w: w.unsqueeze(0).transpose(1, 2), torch.tensor([3]).int()),
}


def _fused(op, w):
    state = lambda: [torch.zeros(ROWS, COLUMNS)]  # noqa: E731
    lr = torch.tensor(0.1) if op._overloadname == "tensor_lr" else 0.1
    grads = [rand(ROWS, COLUMNS)]
    common = {"weight_decay": 0.0, "maximize": False}
    if "sgd" in op._schema.name:
        args = ([w], grads, state())
        return args, {"momentum": 0.9, "lr": lr, "dampening": 0.0, "nesterov": False, "is_first_step": True, **common}
    if "adagrad" in op._schema.name:
        return ([w], grads, state(), [torch.tensor(1.0)]), {"lr": lr, "lr_decay": 0.0, "eps": 1e-8, **common}
    args = ([w], grads, state(), state(), [], [torch.tensor(1.0)])
    return args, {"lr": lr, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False, **common}


def _variant(op, args, kwargs):
    """Return the arguments of an overload that is told the dtype of its result, or where to write it."""
    args = (*args, torch.float32) if "dtype" in op._overloadname else args
    return args, kwargs | ({"out": torch.empty(0)} if "out" in op._overloadname else {})


_BY_TYPE = {
    "number": 2.0, "float": 0.5, "int": 1, "SymInt": 1, "bool": False, "List[int]": [0], "List[SymInt]": [0],
    "List[number]": [0.5, 0.5], "List[float]": [0.5, 0.5], "Optional[number]": 2.0, "Optional[int]": 0,
    "Optional[List[int]]": [1], "Optional[float]": None, "Optional[bool]": None, "str": "none",
    "Optional[str]": "floor",
}  # fmt: skip


def sample(op) -> Sample:
    """Return the sample of ``op``: a row of SAMPLES, else arguments derived from its schema."""
    if not isinstance(op, torch._ops.OpOverload):
        return FUNCTIONS[op]
    name = op._schema.name.removeprefix("aten::")
    key = f"{name}.{op._overloadname}"
    if name.startswith("_fused_") and name not in SAMPLES:
        return lambda w: _fused(op, w)
    if op._overloadname in ("out", "dtype", "dtype_out"):
        return lambda w: _variant(op, *SAMPLES[name](w))
    if key in SAMPLES or name in SAMPLES:
        return SAMPLES.get(key) or SAMPLES[name]

    def build(w):
        args, kwargs, seen = [], {}, 0
        for argument in op._schema.arguments:
            if argument.has_default_value():
                continue
            kind = str(argument.type)
            if "Dimname" in kind:
                pytest.skip("named tensors")
            if kind == "Tensor":
                value = w if seen == 0 else rand(ROWS, COLUMNS, seed=seen)
                seen += 1
            elif kind == "List[Tensor]":
                value = (
                    [w, w.clone()]
                    if seen == 0
                    else [rand(ROWS, COLUMNS, seed=seen), rand(ROWS, COLUMNS, seed=seen + 1)]
                )
                seen += 1
            elif kind == "Optional[Generator]":
                value = None
            else:
                value = _BY_TYPE[kind]
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    return build


_TOKENS = rand(2, 3, COLUMNS)
_RECURRENT = (False, 1, 0.0, False, False, True)
"""No biases, one layer, no dropout, not in training, not in both directions, a batch first."""

FUNCTIONS: dict[Any, Sample] = {
    F.linear: _call(rand(3, COLUMNS), W),
    F.embedding: _call(torch.tensor([[0, 3], [ROWS - 1, 0]]), W),
    torch.matmul: _call(rand(3, ROWS), W),
    torch.Tensor.matmul: _call(rand(2, 3, ROWS), W),
    torch.Tensor.__matmul__: _call(rand(2, 3, ROWS), W),
    torch.Tensor.__rmatmul__: _call(W, rand(3, ROWS)),
    torch.einsum: _call("bi,oi->bo", rand(3, COLUMNS), W),
    **dict.fromkeys((torch.matrix_power, torch.linalg.matrix_power, torch.Tensor.matrix_power), _call(_square, 2)),
    torch.linalg.matrix_rank: _call(W),
    **dict.fromkeys((torch.hinge_embedding_loss, F.hinge_embedding_loss), _call(W, torch.ones(COLUMNS))),
    **dict.fromkeys((torch.lerp, torch.Tensor.lerp), _call(rand(ROWS, COLUMNS), rand(COLUMNS), W)),
    **dict.fromkeys((torch.addcdiv, torch.Tensor.addcdiv), _call(W, rand(ROWS, COLUMNS), rand(COLUMNS) + 3)),
    torch.Tensor.lerp_: _call(W, rand(ROWS, COLUMNS), 0.5),
    torch.Tensor.addcdiv_: _call(W, rand(ROWS, COLUMNS), rand(COLUMNS) + 3),
    **dict.fromkeys((F.dropout, F.alpha_dropout, torch.dropout, torch.alpha_dropout), _call(W, 0.5, True)),
    F.gumbel_softmax: _call(W),
    F.linear_cross_entropy: _call(
        *(rand(3, COLUMNS), W, torch.tensor([0, ROWS - 1, 3])), options=LinearCrossEntropyOptions()
    ),
    torch._grouped_mm: _call(rand(3, COLUMNS), lambda w: w.unsqueeze(0).transpose(1, 2), offs=torch.tensor([3]).int()),
    F.multi_head_attention_forward: _call(  # small queries: the gradient of a saturated softmax is rounding alone
        *(rand(2, 1, ROWS) / 64, rand(3, 1, COLUMNS), rand(3, 1, COLUMNS), ROWS, 1, None, None, None, None, False, 0.0),
        *(rand(ROWS, ROWS), rand(ROWS)),
        **{"use_separate_proj_weight": True, "q_proj_weight": rand(ROWS, ROWS), "k_proj_weight": W, "v_proj_weight": W},
    ),
    **{getattr(torch, name): call for name, call in SAMPLES.items() if name.startswith("conv") and name[-1] in "nd"},
    torch.lstm: _call(_TOKENS, [rand(1, 2, 4)] * 2, [W, rand(16, 4)], *_RECURRENT),
    torch.gru: _call(_TOKENS, rand(1, 2, 5), [lambda w: w[:15], rand(15, 5)], *_RECURRENT),
    **dict.fromkeys((torch.rnn_tanh, torch.rnn_relu), _call(_TOKENS, rand(1, 2, 16), [W, rand(16, 16)], *_RECURRENT)),
    torch.Tensor.module_load: _call(W, rand(ROWS, COLUMNS)),
    torch.Tensor.data.__set__: _call(lambda w: w.clone(), W),
    torch.Tensor.data_ptr: _call(lambda w: w.to("meta")),  # elsewhere it differs from the plain tensor's
    torch.Tensor.untyped_storage: _call(W),
    torch.Tensor.storage: _call(W),
    torch.Tensor._typed_storage: _call(W),
    torch.Tensor.share_memory_: _call(W),
    torch.Tensor.is_shared: _call(W),
    torch.Tensor.requires_grad.__get__: _call(W),
}

COLLECTIVES = sorted((op for op in KINDS if str(op).startswith(("c10d.", "_c10d_functional"))), key=str)
"""Ops between processes, which tests/distributed covers."""
OF_LIBRARIES = sorted((op for op in KINDS if str(op).startswith("transformers::")), key=str)
"""Ops that other libraries define, which tests/peers covers."""
_ELSEWHERE = {*COLLECTIVES, *OF_LIBRARIES}
OPS = sorted((op for op in KINDS if "_backward" not in str(op) and op not in _ELSEWHERE), key=str)
BACKWARDS = sorted(set(KINDS) - set(OPS) - _ELSEWHERE, key=str)
"""Ops that only autograd calls: they have no sample, and are covered by gradients of other ops."""
each_op = pytest.mark.parametrize("op", OPS, ids=[getattr(op, "__name__", str(op)) for op in OPS])
