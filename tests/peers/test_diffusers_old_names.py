"""diffusers reads quantized folders whose files have the old names of attention, as the VAE of Stable Diffusion 1."""

import importlib
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchtether as tt

diffusers = pytest.importorskip("diffusers")
importlib.import_module("torchtether.integrations.diffusers")
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
