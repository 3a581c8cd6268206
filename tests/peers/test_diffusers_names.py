"""Names in folders of diffusers: the old ones of attention, as in the VAE of Stable Diffusion 1, and variants."""

import importlib
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchtether as tt

diffusers = pytest.importorskip("diffusers")
doors = importlib.import_module("torchtether.integrations.diffusers")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what diffusers warns about

OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def test_old_names_are_read_after_the_command_line_has_quantized(tmp_path):
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=4)
    vae.save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "diffusion_pytorch_model.safetensors"
    tensors = {re.sub("|".join(OLD), lambda m: OLD[m[0]], name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    command = ["-m", "torchtether", "quantize", tmp_path / "plain", tmp_path / "made", "--scheme", "int8"]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    read, said = diffusers.AutoencoderKL.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not any(said.values()), said
    expected = tt.quantize(vae, "int8").state_dict()
    assert any(isinstance(tensor, tt.Weight) for tensor in expected.values())
    for name, tensor in read.state_dict().items():
        assert type(tensor) is type(expected[name]), name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "5KB"}], ids=["one file", "shards"])
def test_variants_that_are_quantized_otherwise_stay_apart(tmp_path, shards):
    """They share one ``config.json``, and nf4 and fp4 have parts of the same shapes."""
    made = {}
    for variant, scheme in {None: "nf4", "other": "fp4", "small": "int8"}.items():
        torch.manual_seed(0)
        vae = tt.quantize(diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=4), scheme)
        vae.save_pretrained(tmp_path, variant=variant, **shards)
        made[variant] = vae.state_dict()
    for variant, expected in made.items():
        read = diffusers.AutoencoderKL.from_pretrained(tmp_path, variant=variant).state_dict()
        assert any(isinstance(tensor, tt.Weight) for tensor in read.values())
        for name, tensor in read.items():
            assert type(tensor) is type(expected[name]), name
            assert getattr(tensor, "spec", None) == getattr(expected[name], "spec", None), name
            assert torch.equal(tensor.dequantize(), expected[name].dequantize()), name


def test_a_config_without_sense_is_one_line():
    with pytest.raises(tt.ArgumentError, match="weights: is an int, not a mapping"):
        doors.TetherConfig(weights=5)


def test_parts_of_weights_that_no_config_announces_are_refused(tmp_path):
    """Saving a plain variant drops the announcement, which both share; ``tt.save`` may have that name, too."""
    vae = tt.quantize(diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=4), "int8")
    vae.save_pretrained(tmp_path)
    tt.dequantize(vae).save_pretrained(tmp_path, variant="plain")
    assert not any(
        isinstance(tensor, tt.Weight)
        for tensor in diffusers.AutoencoderKL.from_pretrained(tmp_path, variant="plain").state_dict().values()
    )
    with pytest.raises(tt.CheckpointError, match=r"\.qdata: is a part of a Weight, and no config.json beside it"):
        diffusers.AutoencoderKL.from_pretrained(tmp_path)
