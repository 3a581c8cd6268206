"""Checkpoints of published formats as tests write them: a folder with one file, and a config beside it."""

import json

import torch
from safetensors.torch import save_file

import torchtether as tt


def write(folder, tensors, quantization=None, *, config=None):
    """``folder`` holds ``tensors`` and a config.json with ``quantization_config``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: t.contiguous() for k, t in tensors.items()}, str(folder / "model.safetensors"), {"format": "pt"})
    config = dict(config or {}) | ({"quantization_config": quantization} if quantization is not None else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def faults(folder):
    """The faults by name; reading one of them raises them too, and nothing else of the file is lost."""
    with tt.open(folder) as checkpoint:
        for name in checkpoint.faults:
            try:
                checkpoint[name]
            except tt.CheckpointError as error:
                assert "\n" not in str(error)
            else:
                raise AssertionError(f"{name} has a fault and can be read")
        return dict(checkpoint.faults)


def decoded(folder, name, dtype=None):
    """The values of the Weight ``name``."""
    with tt.open(folder) as checkpoint:
        weight = checkpoint[name]
        assert isinstance(weight, tt.Weight)
        assert checkpoint.spec(name) == weight.spec.replace(tie=None)
    return (weight if dtype is None else weight.to(dtype)).dequantize()


def packed(format, weights, plain=None):
    """What ``format`` stores for ``weights``, as its ``layout`` promised, with its announcement."""
    tensors = dict(plain or {})
    for name, weight in weights.items():
        made, promised = format.pack(name, weight), format.layout(name, weight.spec)
        assert {k: (t.dtype, tuple(t.shape)) for k, t in made.items()} == promised
        tensors |= made
    said = format.announce({name: weight.spec for name, weight in weights.items()}, list(plain or {}))
    return tensors, said


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(0.02).to(dtype)
