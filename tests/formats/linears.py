"""GPTQ and AWQ written out with numpy, bit by bit, as their packages lay them out, to hold the readers against."""

import json

import numpy as np
import torch
from safetensors.torch import save_file

import torchtether as tt

NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # of AWQ's gemm: the output that nibble i of a word is of


def words(codes, bits):
    """Each row of ``codes`` as one little-endian stream of bits in int32 words, padded with zeros."""
    fields = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    stream = fields.reshape(codes.shape[0], -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=-1, bitorder="little").view("<i4")


def less_one(zeros, bits):
    """The words of zero points as version 1 of GPTQ stores them."""
    if 32 % bits:
        return words((zeros.astype(np.int64) - 1) % (1 << bits), bits)
    one = sum(1 << at for at in range(0, 32, bits))
    return ((words(zeros, bits).astype(np.int64) & 0xFFFFFFFF) - one).astype(np.uint32).view(np.int32)


def drawn(rows, columns, groups, *, bits=4, seed=0, dtype=torch.float16):
    """Codes (rows, columns), zero points and scales (rows, groups)."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, (rows, columns))
    zeros = random.integers(0, 1 << bits, (rows, groups))
    scales = torch.from_numpy(random.normal(size=(rows, groups)).astype(np.float32)).mul(0.01).to(dtype)
    return codes, zeros, scales


def values(codes, zeros, scales, g_idx, dtype=torch.float16):
    """``(q - z) * s`` in float32, rounded once."""
    steps = torch.from_numpy((codes - zeros[:, g_idx]).astype(np.float32))
    return (steps * scales.float()[:, torch.from_numpy(g_idx)]).to(dtype)


def gptq(codes, zeros, scales, *, bits=4, version=1, g_idx=None, name="m"):
    """The tensors of one module as GPTQ stores them."""
    tensors = {
        f"{name}.qweight": torch.from_numpy(words(codes, bits).T.copy()),
        f"{name}.qzeros": torch.from_numpy(less_one(zeros.T, bits) if version == 1 else words(zeros.T, bits)),
        f"{name}.scales": scales.t().contiguous(),
    }
    if g_idx is not None:
        tensors[f"{name}.g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
    return tensors


def gemm(codes, zeros, scales, name="m"):
    """The tensors of one module as AWQ's gemm stores them; rows are a multiple of 8."""

    def packed(matrix):
        return torch.from_numpy(words(matrix.reshape(matrix.shape[0], -1, 8)[..., NIBBLES].reshape(matrix.shape), 4))

    tensors = {f"{name}.qweight": packed(codes.T), f"{name}.scales": scales.t().contiguous()}
    if zeros is not None:
        tensors[f"{name}.qzeros"] = packed(zeros.T)
    return tensors


def gemv(codes, zeros, scales, *, group_size, name="m"):
    """The tensors of one module as AWQ's gemv stores them; columns are a multiple of 8."""
    groups = zeros.shape[1]
    padding = -groups % (8 * {64: 2, 32: 4}.get(group_size, 1))
    return {
        f"{name}.qweight": torch.from_numpy(words(codes, 4)),
        f"{name}.qzeros": torch.from_numpy(words(np.pad(zeros, ((0, 0), (0, padding))), 4)),
        f"{name}.scales": torch.nn.functional.pad(scales, (0, padding)),
    }


def write(folder, tensors, config=None, **beside):
    """A checkpoint folder; ``config`` is its ``quantization_config``, ``beside`` other JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.clone().contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    for stem, content in beside.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def opened(folder, name="m.weight", dtype=torch.float16):
    """The values of one weight of a checkpoint, and what it is."""
    with tt.open(folder) as checkpoint:
        assert not checkpoint.faults, checkpoint.faults
        weight = checkpoint[name]
        assert isinstance(weight, tt.Weight)
        assert checkpoint.spec(name) == weight.spec
        layout = weight.scheme.layout(weight.spec.base)
        held = {part: (tensor.dtype, tuple(tensor.shape)) for part, tensor in weight.parts.items()}
        assert held == {part: (what.dtype, tuple(what.shape)) for part, what in layout.items()}
        return weight.to(dtype).dequantize(), weight.spec


def fault(folder, name="m.weight"):
    """What is wrong with a weight: one line, and nothing else of the checkpoint is."""
    with tt.open(folder) as checkpoint:
        assert list(checkpoint.faults) == [name]
        assert not list(checkpoint)
        text = checkpoint.faults[name]
        assert "\n" not in text
        return text
