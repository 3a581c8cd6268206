"""Stand on storages: what a tensor is made of, which tensors share memory, and how wrapper subclasses differ.

You will read offsets and strides as bytes, distinguish a view from a copy, see why an address of 0 means "unknown", and
look into a quantized Weight. Needs: torch, safetensors. Takes: seconds.
"""

# %% A tensor is a shape, strides and an offset over a storage; the storage is bytes and nothing else.
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor  # PyTorch's own wrapper subclass, made for its tests

import torchtether as tt

torch.manual_seed(0)
matrix = torch.arange(12.0).view(3, 4)
assert matrix.untyped_storage().nbytes() == 48
column = matrix[:, 1]
assert (column.shape, column.stride(), column.storage_offset()) == ((3,), (4,), 1)
assert column.data_ptr() == matrix.data_ptr() + 4  # one float further
assert torch.equal(column, torch.as_strided(matrix, (3,), (4,), 1))

# %% Element (i, j) lies at byte (offset + i * stride[0] + j * stride[1]) * itemsize. Transposing moves no byte.
turned = matrix.t()
assert turned.stride() == (1, 4)
assert turned.untyped_storage()._cdata == matrix.untyped_storage()._cdata  # the very same memory
assert turned.contiguous().data_ptr() != matrix.data_ptr()  # that is a copy

# %% `tt.storage_map` draws it: one bar for each storage, and on it what lies there. (`.to_html(path)` makes a page.)
made = tt.storage_map({"matrix": matrix, "column": column, "turned": turned, "copy": turned.contiguous()})
print(made)
assert len(made.groups) == 2  # the copy stands alone
shared = made.groups[0].storages[0]
assert [(lane.start, lane.stop) for lane in shared.lanes] == [(0, 48), (4, 40), (0, 48)]
assert [lane.layout for lane in shared.lanes] == ["contiguous", "strided", "transposed"]

# %% With strides of 0, one element serves as many; a small view keeps all of a large storage alive.
wide = torch.zeros(1, 4).expand(1000, 4)
assert wide.untyped_storage().nbytes() == 16
small = torch.zeros(1_000_000)[:2]
assert small.untyped_storage().nbytes() == 4_000_000
print(tt.storage_map({"wide": wide, "small": small}))
assert "4 MB that no tensor reaches" in tt.storage_map({"small": small}).summary

# %% On `meta` storages have no memory: sharing is known, addresses are not.
with torch.device("meta"):
    fused = torch.empty(12, 4)
    part = fused[4:8]
assert (fused.data_ptr(), part.data_ptr()) == (0, 64)  # distances from address 0
assert tt.storage_map({"fused": fused, "part": part}).ties[0].names == ("fused", "part")

# %% What goes wrong without us, silently: address 0 taken for an address. Two weights on meta look tied, and are not.
with torch.device("meta"):
    model = nn.ModuleDict({"one": nn.Linear(4, 4, bias=False), "other": nn.Linear(4, 4, bias=False)})


def tied_by_address(model):  # as in many scripts that save models
    names = {}
    for name, tensor in model.named_parameters():
        names.setdefault(tensor.data_ptr(), []).append(name)
    return [group for group in names.values() if len(group) > 1]


assert tied_by_address(model) == [["one.weight", "other.weight"]]  # one of them would not be saved
assert tt.find_ties(model) == ()

# %% A wrapper subclass has a storage without memory; its data are in inner tensors.
two = TwoTensor(torch.zeros(3, 4), torch.ones(3, 4))
assert two.data_ptr() == 0
names, _ = two.__tensor_flatten__()
assert names == ["a", "b"]
print(tt.storage_map({"two": two}))
assert tt.storage_map({"two": two}).nbytes == 2 * 48

# %% So by address all wrappers look tied too. `data_ptr()` of a Weight is a number that differs for different memory.
pair = nn.ParameterDict({name: TwoTensor(torch.zeros(3, 4), torch.ones(3, 4)) for name in ("one", "other")})
assert tied_by_address(pair) == [["one", "other"]]
wrapped = nn.ModuleDict({"one": nn.Linear(64, 4, bias=False), "other": nn.Linear(64, 4, bias=False)})
tt.quantize(wrapped, "int8")
assert tied_by_address(wrapped) == []
assert tt.find_ties(wrapped) == ()
weight = wrapped.one.weight
assert weight.untyped_storage().nbytes() == 4 * 64 * 4  # the size of a storage that has no memory
assert weight.nbytes == 4 * 64 + 4 * 4  # actual memory: a byte for each value, a scale for each row

# %% A Weight is its parts and one frozen spec. Its strides are real; views of it share the parts, or raise.
print(weight)
print(tt.storage_map(wrapped))
assert {name: tuple(part.shape) for name, part in weight.parts.items()} == {"qdata": (4, 64), "scale": (4, 1)}
across = weight.detach().t()
assert across.stride() == (1, 64)
assert across.parts["qdata"].data_ptr() == weight.parts["qdata"].data_ptr()
rows = weight.detach()[1:3]
shown = tt.storage_map({"weight": weight, "across": across, "rows": rows})
print(shown)
assert rows.parts["qdata"].data_ptr() == weight.parts["qdata"].data_ptr() + 64
assert torch.equal(rows.dequantize(), weight.dequantize()[1:3])
assert shown.nbytes == weight.nbytes  # three tensors, one memory

# %% A view that is impossible raises an error; it is never a silent copy.
try:
    weight.detach().view(16, 16)
except tt.UnsupportedOpError as error:
    print(error)
else:
    raise AssertionError("a row with one scale was cut in four")

# %% Ties between Weights are found by their parts, and survive conversions that break ties of plain tensors.
wrapped.other.weight = wrapped.one.weight
(tie,) = tt.find_ties(wrapped)
print(tie)
before = tt.storage_map(wrapped)
tt.convert(wrapped, dtype=torch.bfloat16)
assert tt.find_ties(wrapped) == (tie,)
print(tt.storage_map(wrapped).diff(before))
assert wrapped.one.weight.parts["scale"].dtype == torch.float32  # only the compute dtype changed

# %% Now break it: make `rows` a `.clone()` of the rows, run again, and see what the map says of it.
