"""Keep tied weights tied through files, conversions and quantization, and find out when a tie is lost.

You will be able to list the ties of a model (also transposed and sliced views), to save it with its ties, and to fail
early when a tie breaks. Needs: torch. Takes: seconds.
"""

# %% Three kinds of ties: one object under two names, two Parameters over one storage, and a view.
import tempfile
import textwrap
from pathlib import Path

import torch
from torch import nn

import torchtether as tt


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.emb.weight  # one object
        self.table = nn.Parameter(self.emb.weight.data)  # another Parameter over the same storage
        self.qkv = nn.Parameter(torch.randn(48, 16))
        self.q = nn.Parameter(self.qkv.data[:16])  # a slice
        self.back = nn.Parameter(self.qkv.data.t())  # a transpose


model = Model()
for tie in tt.find_ties(model):
    print(tie)
ties = tt.find_ties(model)
assert len(ties) == 2

# %% What goes wrong without us, silently: `.to()` splits every tie that is not one object.
stock = Model().to(torch.float64)
assert stock.head.weight is stock.emb.weight
assert stock.q.data_ptr() != stock.qkv.data_ptr()  # the slice is a copy now, and is trained separately
try:
    tt.check_ties(stock, ties)
except tt.TieError as error:
    print(textwrap.fill(str(error), 120))
else:
    raise AssertionError("the ties were kept")

# %% With us they are converted once and stay views; the optimizer's state follows.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
tt.convert(model, dtype=torch.float64, optimizer=optimizer)
assert [tie.names for tie in tt.find_ties(model)] == [tie.names for tie in ties]
assert model.q.data_ptr() == model.qkv.data_ptr()

# %% The same for stock calls that you cannot change.
with tt.swapping(model, optimizer=optimizer):
    model.float()
assert model.q.data_ptr() == model.qkv.data_ptr()
tt.check_ties(model, ties)

# %% Files keep ties: shared memory is stored once, and the record has the names and the geometry of all views.
folder = Path(tempfile.mkdtemp())
tt.save(model, folder / "tied.safetensors")
with tt.open(folder / "tied.safetensors") as checkpoint:
    print(*checkpoint.ties, sep="\n")
    assert checkpoint["q"].data_ptr() == checkpoint["qkv"].data_ptr()  # the same memory, whichever is read first
with tt.on_meta():
    again = Model()
tt.load(again, folder / "tied.safetensors")
tt.check_ties(again, ties)
assert torch.equal(again.back, model.qkv.t())

# %% Quantizing a tied pair makes one Weight under both names. If a tie cannot be kept, an error says why.
tt.untie(again, "table")
tt.quantize(again, {"emb.weight": "int8"})
assert again.head.weight is again.emb.weight
assert isinstance(again.emb.weight, tt.Weight)
try:
    tt.quantize(again, {"qkv": "int8"})  # a slice has no parts of its own
except tt.RuleError as error:
    print(textwrap.fill(str(error), 120))
else:
    raise AssertionError("a slice was quantized")

# %% Now break it: set `again.head.weight = nn.Parameter(...)` and call tt.check_ties(again).
