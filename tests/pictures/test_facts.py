"""The facts of storage maps, compared with torch and ``find_ties``; laws over models of every kind."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchtether as tt
from tests.catalog import SCHEMES
from tests.ties.models import MODELS as TIED
from torchtether.geometry.views import extent
from torchtether.pictures.facts import layout_of


class Odd(nn.Module):
    """Unusual tensors: empty, scalar, complex, integer, sparse, expanded, shared with gaps."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(12, 4))
        self.k = nn.Parameter(self.qkv.data[4:8])
        self.columns = nn.Parameter(self.qkv.data[:, 1:3])
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        big = torch.zeros(4096)
        self.register_buffer("small", big[100:110])
        self.register_buffer("part", big[200:210])
        self.register_buffer("transient", torch.ones(2), persistent=False)
        self.register_buffer("complex", torch.zeros(5, dtype=torch.complex64))
        self.register_buffer("conj", torch.zeros(5, dtype=torch.complex64).conj())
        self.register_buffer("integer", torch.arange(3))
        self.register_buffer("scalar", torch.tensor(True))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("expanded", torch.zeros(1, 4).expand(100, 4))
        self.register_buffer("sparse", torch.eye(5).to_sparse())
        self.register_buffer("rows", torch.eye(5).to_sparse_csr())
        self.register_buffer("missing", None)


def _models():
    yield "odd", Odd
    yield "empty", nn.Module
    yield "lazy", lambda: nn.LazyLinear(3)
    for make in TIED:
        yield make.__name__, make
    for row in SCHEMES[::7]:

        def make(row=row):
            model = nn.ModuleDict({"a": nn.Linear(512, 32), "b": nn.Linear(512, 32)})
            model["b"].weight = model["a"].weight
            tt.quantize(model, {"a.weight": row.scheme})
            return model

        yield row.id, make


MODELS = dict(_models())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", MODELS)
def test_a_map_knows_every_name_every_byte_and_every_tie(name):
    model = MODELS[name]()
    made = tt.storage_map(model)
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    assert sorted(made.names) == sorted(tensors)
    assert set(made.ties) == set(tt.find_ties(model))
    held = {one_name: one for group in made.groups for one in group.tensors for one_name in one.names}
    for one_name, tensor in tensors.items():
        one = held[one_name]
        assert one.dtype == str(tensor.dtype).removeprefix("torch.")
        if not nn.parameter.is_lazy(tensor):
            assert one.shape == tuple(tensor.shape)
            assert one.nbytes == (tensor.nbytes if tensor.layout == torch.strided else _sparse_bytes(tensor))
        assert one.requires_grad == tensor.requires_grad
    for group in made.groups:
        for storage in group.storages:
            assert 0 <= storage.reached <= storage.nbytes
            for lane in storage.lanes:
                assert 0 <= lane.start <= lane.stop <= storage.nbytes
                assert lane.stop - lane.start == extent(lane.shape, lane.stride) * getattr(torch, lane.dtype).itemsize


def _sparse_bytes(tensor):
    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.crow_indices().nbytes + tensor.col_indices().nbytes + tensor.values().nbytes


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", MODELS)
def test_storages_are_those_that_torch_counts(name):
    """The bytes of a map are the bytes of the distinct storages, however many names and views there are."""
    model = MODELS[name]()
    seen = {}

    def walk(tensor):
        if hasattr(tensor, "__tensor_flatten__"):
            for inner in tensor.__tensor_flatten__()[0]:
                walk(getattr(tensor, inner))
        elif nn.parameter.is_lazy(tensor):
            pass
        elif tensor.layout == torch.sparse_coo:
            walk(tensor._indices())
            walk(tensor._values())
        elif tensor.layout == torch.sparse_csr:
            for inner in (tensor.crow_indices(), tensor.col_indices(), tensor.values()):
                walk(inner)
        else:
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()

    for tensor in (*model.parameters(), *model.buffers()):
        walk(tensor)
    made = tt.storage_map(model)
    assert made.nbytes == sum(seen.values())
    assert sum(len(group.storages) for group in made.groups) == len(seen)


@given(
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    order=st.randoms(use_true_random=False),
    step=st.integers(1, 2),
)
def test_a_layout_is_what_torch_says(shape, order, step):
    dims = list(range(len(shape)))
    order.shuffle(dims)
    tensor = torch.zeros([size * step for size in shape])[tuple(slice(None, None, step) for _ in shape)].permute(dims)
    word = layout_of(tuple(tensor.shape), tensor.stride())
    assert (word == "contiguous") == tensor.is_contiguous()
    dense = tensor.numel() == 0 or extent(tuple(tensor.shape), tensor.stride()) == tensor.numel()
    assert dense == (word in ("contiguous", "transposed", "permuted"))


def test_a_map_keeps_nothing_alive_and_changes_nothing():
    tensor = torch.zeros(1000)
    alive = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    made = tt.storage_map({"a": tensor})
    other = nn.Parameter(torch.ones(2))
    tt.storage_map({"b": other})
    torch.utils.swap_tensors(other, nn.Parameter(torch.zeros(3)))  # refuses what has weak references
    del tensor
    gc.collect()
    assert alive.expired()
    assert "a" in str(made)


def test_two_storages_over_one_memory_are_one():
    array = np.zeros(10, dtype=np.float32)
    made = tt.storage_map({"all": torch.from_numpy(array), "half": torch.from_numpy(array[5:])})
    (group,) = made.groups
    (storage,) = group.storages
    assert storage.nbytes == 40
    assert [(lane.start, lane.stop) for lane in storage.lanes] == [(0, 40), (20, 40)]
    assert made.ties[0].names == ("all", "half")


def test_a_state_dict_is_mapped_like_its_model():
    model = MODELS["odd"]()
    assert {held.names[0] for group in tt.storage_map(model.state_dict()).groups for held in group.tensors} <= set(
        tt.storage_map(model).names
    )


@pytest.mark.parametrize("wrong", [3, None, [torch.zeros(2)], {"a": 1}, {1: torch.zeros(1)}, (x for x in "ab")])
def test_what_is_no_model_is_refused_by_name(wrong):
    with pytest.raises(TypeError, match=r"^model: ") as caught:
        tt.storage_map(wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_meta_has_the_same_map():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(4, 8), "b": nn.Embedding(8, 4)})
        model["b"].weight = model["a"].weight
        model["view"] = nn.Module()
        model["view"].t = nn.Parameter(model["a"].weight.data.t())
    made = tt.storage_map(model)
    assert made.nbytes == 4 * 32 + 4 * 8
    assert len(made.ties) == 1
    assert {held.device for group in made.groups for held in group.tensors} == {"meta"}


def test_a_checkpoint_has_the_map_of_its_model(tmp_path):
    model = nn.ModuleDict({"emb": nn.Embedding(12, 64), "head": nn.Linear(64, 12, bias=False)})
    model["head"].weight = model["emb"].weight
    model["more"] = nn.Module()
    model["more"].t = nn.Parameter(model["emb"].weight.data.t())
    model["quantized"] = nn.Linear(64, 4)
    tt.quantize(model, {"quantized.weight": "int8"})
    tt.save(model, tmp_path, max_shard_size=1000)
    live, stored = tt.storage_map(model), tt.storage_map(tmp_path)
    assert live.nbytes == stored.nbytes
    assert sorted(live.names) == sorted(stored.names)
    assert set(live.ties) == set(stored.ties)
    with tt.open(tmp_path) as checkpoint:
        assert tt.storage_map(checkpoint) == stored
    assert "model-0000" in str(tt.storage_map(tmp_path).to_html())

    def facts(made):
        return {
            held.names: (held.shape, held.stride, held.dtype, held.scheme, held.nbytes, held.decoded)
            for group in made.groups
            for held in group.tensors
        }

    assert facts(live) == facts(stored)
