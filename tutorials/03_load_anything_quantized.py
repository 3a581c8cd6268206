"""Load weights that other tools quantized into plain modules, without requantizing: fp8, GPTQ, bitsandbytes and others.

You will see what a plain load does with such a file, read it correctly, change its compute dtype without changing a
code, and write it in another format without losing a bit. Needs: torch, safetensors. Takes: seconds.
"""

# %% A checkpoint in the format of DeepSeek and Qwen: float8 codes, and one scale per block of 128 by 128.
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import torchtether as tt

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())
weight = torch.randn(256, 192) * 0.02
blocks = nn.functional.pad(weight, (0, 64)).view(2, 128, 2, 128)
scales = blocks.abs().amax((1, 3)) / 448
codes = (weight / scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :192]).to(torch.float8_e4m3fn)
save_file({"proj.weight": codes, "proj.weight_scale_inv": scales}, folder / "model.safetensors")
config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
(folder / "config.json").write_text(json.dumps({"quantization_config": config}))


def model(device="cpu"):
    with torch.device(device):
        return nn.ModuleDict({"proj": nn.Linear(192, 256, bias=False)})


# %% What goes wrong without us, silently: the codes are loaded as values.
stock = model()
state = {"proj.weight": codes, "proj.weight_scale_inv": scales}
stock.load_state_dict(state, strict=False)  # no error: the scale is "unexpected", and ignored
wrong = stock.proj.weight.detach()
assert wrong.abs().max() == 448  # weights of 0.07 have become 448
assert wrong.norm() / weight.norm() > 3000

# %% The same with us: a Weight with the same codes, in a plain nn.Linear.
right = model("meta")
report = tt.load(right, folder)
print(report)
print(right.proj.weight)
assert isinstance(right.proj, nn.Linear)
assert torch.equal(right.proj.weight.parts["qdata"].view(torch.uint8), codes.view(torch.uint8))
assert (right.proj.weight.dequantize().float() - weight).norm() / weight.norm() < 0.04

# %% The headers show what a file holds, without reading tensors; some rows can be read without the rest.
with tt.open(folder) as checkpoint:
    assert checkpoint.format == "fp8"
    print(checkpoint.spec("proj.weight"))
    rows = checkpoint.get_slice("proj.weight")[128:256]
assert torch.equal(rows.dequantize(), right.proj.weight.dequantize()[128:256])

# %% Another compute dtype changes the decoded values, and no code or scale: converting back is exact.
tt.convert(right, dtype=torch.float32)
assert torch.equal(right.proj.weight.parts["scale"], scales)
assert torch.equal(right.proj.weight.dequantize().to(torch.bfloat16), right.proj.weight.to(torch.bfloat16).dequantize())

# %% A GPTQ file, packed by hand: eight 4-bit codes to a word, down the columns; zero points are stored minus one.
gptq = Path(tempfile.mkdtemp())
code = torch.randint(0, 16, (192, 256))
zero = torch.randint(1, 16, (2, 256))
scale = torch.rand(2, 256).half() * 0.01
shifts = torch.arange(8) * 4


def words(values):  # (rows, 8 * columns) -> (rows, columns) int32
    packed = (values.view(values.shape[0], -1, 8) << shifts).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


tensors = {
    "proj.qweight": words(code.t()).t().contiguous(),
    "proj.qzeros": words(zero - 1),
    "proj.scales": scale,
    "proj.g_idx": (torch.arange(192) // 96).int(),
}
save_file(tensors, gptq / "model.safetensors")
config = {"quant_method": "gptq", "bits": 4, "group_size": 96, "desc_act": False, "sym": False}
(gptq / "config.json").write_text(json.dumps({"quantization_config": config}))
loaded = model("meta")
tt.load(loaded, gptq)
group = torch.arange(192) // 96
expected = ((code - zero[group]).float() * scale[group].float()).t()
assert torch.equal(loaded.proj.weight.to(torch.float32).dequantize(), expected)

# %% The same codes written in a format for serving engines; nothing is rounded again.
served = Path(tempfile.mkdtemp())
tt.save(loaded, served, format="compressed-tensors")
print(json.loads((served / "config.json").read_text())["quantization_config"]["format"])
again = model("meta")
tt.load(again, served)
assert torch.equal(again.proj.weight.dequantize(), loaded.proj.weight.dequantize())

# %% The faults of a file are reported by name, before anything changes.
del tensors["proj.scales"]
save_file(tensors, gptq / "model.safetensors")
untouched = model("meta")
plan = tt.plan_load(untouched, gptq)
print(plan.faults[0])
assert untouched.proj.weight.is_meta

# %% Now break it: store `zero` instead of `zero - 1` above, run again, and see which assertion notices.
