"""Load a checkpoint into a model that was built on `meta`, under an optimizer that exists already.

You will be able to load any float checkpoint without ever holding the model twice, quantize it at load, and be sure
that tied weights, non-persistent buffers and the optimizer stay correct. Needs: torch. Takes: seconds.
"""

# %% A typical model: a tied head, and a buffer that no checkpoint stores.
import tempfile
from pathlib import Path

import torch
from torch import nn

import torchtether as tt


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(100, 32)
        self.mid = nn.Linear(32, 32)
        self.head = nn.Linear(32, 100, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("waves", torch.arange(32) / 32, persistent=False)

    def forward(self, tokens):
        return self.head(self.mid(self.emb(tokens) + self.waves.sin()))


folder = Path(tempfile.mkdtemp())
source = Model()
tt.save(source, folder / "model.safetensors")
tokens = torch.arange(12).view(3, 4)

# %% What goes wrong without us, silently: the tie, the optimizer, the buffer.
with torch.device("meta"):
    stock = Model()
optimizer = torch.optim.AdamW(stock.parameters())
state = dict(tt.open(folder / "model.safetensors"))
stock.load_state_dict(state, assign=True)  # no error, no warning
assert stock.head.weight is not stock.emb.weight  # two Parameters now, which are trained separately
held = {id(p) for group in optimizer.param_groups for p in group["params"]}
assert not held & {id(p) for p in stock.parameters()}  # the optimizer trains nothing
assert stock.waves.is_meta  # and the buffer is still on meta, although all keys matched

# %% The same with us. `on_meta` is like torch.device("meta"), and records how buffers were computed.
with tt.on_meta():
    model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
report = tt.load(model, folder / "model.safetensors")
print(report)
assert model.head.weight is model.emb.weight
tt.check_optimizer(model, optimizer)
assert torch.equal(model.waves, source.waves)
assert torch.equal(model(tokens), source(tokens))

# %% See what a load will do, and all its faults, before anything changes.
with torch.device("meta"):
    other = nn.ModuleDict({"emb": nn.Embedding(90, 32), "mid": nn.Linear(32, 32)})
plan = tt.plan_load(other, folder / "model.safetensors")
print(plan)
assert any("the checkpoint has shape (100, 32), the model has (90, 32)" in fault for fault in plan.faults)
plan.close()

# %% Quantize at load. The Parameters are still the ones that the optimizer holds.
with tt.on_meta():
    small = Model()
optimizer = torch.optim.AdamW(small.parameters(), lr=0.01)
tt.load(small, folder / "model.safetensors", quantize={"mid.weight": "int8", "emb.weight": tt.int4(group_size=32)})
print(small.emb.weight)
assert isinstance(small.emb.weight, tt.Weight)
assert small.head.weight is small.emb.weight  # quantized once, used by both
small(tokens).sum().backward()
optimizer.step()
tt.check_optimizer(small, optimizer)

# %% Names and shapes that differ: `rename=` takes (regex, replacement) pairs, and rules that join, split and transpose.
halves = {
    f"mid_{i}.{kind}": t.clone()
    for kind in ("weight", "bias")
    for i, t in enumerate(getattr(source.mid, kind).chunk(2))
}
tt.save(halves, folder / "halves.safetensors")
joined = nn.ModuleDict({"mid": nn.Linear(32, 32)})
tt.load(joined, folder / "halves.safetensors", rename=tt.Concat(["mid_0", "mid_1"], "mid"))
assert torch.equal(joined["mid"].weight, source.mid.weight)  # one rule for weight and bias, and for all layers

# %% Now break it: build `small` under torch.device("meta") instead of tt.on_meta(), run again, and read the error.
