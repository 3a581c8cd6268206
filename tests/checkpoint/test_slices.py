"""Slices of stored tensors have the values of the whole tensor's slice, and read only the bytes that it needs."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchtether as tt
from tests.checkpoint.test_round_trip import bits
from tests.loading.models import MODELS, Turned, build
from torchtether.files import memory, reader

INDICES = [
    (),
    (0,),
    (-1,),
    (slice(1, 3),),
    (slice(-2, None), slice(1, 2)),
    (Ellipsis, 0),
    (slice(None), slice(2, None)),
    (slice(0, 0),),
    (slice(5, 2), Ellipsis),
    (slice(None, None, 2), 1),
    (np.int64(1), slice(None)),
]


@pytest.fixture
def count(monkeypatch):
    """How many bytes have been read from files, in ``count[0]``."""
    total, honest = [0], os.preadv

    def preadv(descriptor, buffers, at):
        got = honest(descriptor, buffers, at)
        total[0] += got
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    return total


@pytest.mark.parametrize("piece", [1 << 24, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_a_part_is_the_part_of_the_whole(tmp_path, kind, piece, monkeypatch):
    tt.save(build(kind), tmp_path / "x", max_shard_size=200)
    monkeypatch.setattr(reader, "PIECE", piece)
    with tt.open(tmp_path / "x") as checkpoint:
        for name in checkpoint:
            whole, lazy = checkpoint[name], checkpoint.get_slice(name)
            assert (lazy.shape, lazy.dtype) == (tuple(whole.shape), whole.dtype)
            for index in INDICES:
                try:
                    expected = whole[index]
                except IndexError:
                    with pytest.raises(IndexError):
                        lazy[index]
                    continue
                part = lazy[index]
                assert (part.dtype, part.shape) == (expected.dtype, expected.shape)
                assert part.is_contiguous()
                assert torch.equal(bits(part), bits(expected.clone(memory_format=torch.contiguous_format))), (
                    name,
                    index,
                )
                assert part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr() or not part.numel()
                assert part.untyped_storage().nbytes() == part.nbytes


@given(st.data())
def test_random_parts_of_random_tensors(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    whole = torch.randint(0, 99, shape).permute(data.draw(st.permutations(range(len(shape)))))
    index = []
    for size in data.draw(st.sampled_from([whole.shape, whole.shape[:1]])):
        index.append(
            data.draw(st.slices(size).filter(lambda s: (s.step or 1) > 0) | st.integers(-size, max(size - 1, 0)))
        )
    path = tmp_path_factory.mktemp("random") / "x.safetensors"
    tt.save({"w": whole, "t": whole.t()} if whole.dim() == 2 else {"w": whole}, path)
    with tt.open(path) as checkpoint:
        for name in checkpoint:
            try:
                expected = checkpoint[name][tuple(index)]
            except IndexError:
                with pytest.raises(IndexError):
                    checkpoint.get_slice(name)[tuple(index)]
            else:
                assert torch.equal(checkpoint.get_slice(name)[tuple(index)], expected)


def test_only_the_bytes_of_the_rows_are_read(tmp_path, count):
    whole = torch.randn(100, 30)
    tt.save({"w": whole, "cut": whole[40:60]}, tmp_path / "x.safetensors")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        for name, index, nbytes in (
            ("w", slice(10, 20), 10 * 30 * 4),
            ("w", (slice(10, 20), slice(5, 7)), (9 * 30 + 2) * 4),
            ("w", (3, 4), 4),
            ("w", slice(4, 4), 0),
            ("cut", slice(1, 3), 2 * 30 * 4),
            ("cut", -1, 30 * 4),
        ):
            count[0] = 0
            part = checkpoint.get_slice(name)[index]
            assert count[0] == nbytes, (name, index)
            assert torch.equal(part, {"w": whole, "cut": whole[40:60]}[name][index])


def test_columns_of_long_rows_go_through_bounded_pieces(tmp_path, count, monkeypatch):
    whole = torch.randn(6, 1000)
    tt.save({"w": whole, "t": whole.t()}, tmp_path / "x.safetensors")
    monkeypatch.setattr(reader, "PIECE", 512)
    largest, honest = [0], memory.scratch

    def scratch(shape, dtype):
        made = honest(shape, dtype)
        largest[0] = max(largest[0], made.nbytes)
        return made

    monkeypatch.setattr(reader, "scratch", scratch)
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        count[0] = 0
        assert torch.equal(checkpoint.get_slice("w")[:, 10:20], whole[:, 10:20])
        assert torch.equal(checkpoint.get_slice("t")[10:20], whole.t()[10:20])
        assert count[0] == 2 * 6 * 10 * 4  # rows longer than a piece are not read through
        assert torch.equal(checkpoint.get_slice("w")[:, ::7], whole[:, ::7])
    assert 0 < largest[0] <= 512


SCHEMES = {
    "int8": (tt.int8(), 1),
    "int4": (tt.int4(8), 1),
    "nf4": (tt.nf4(), 4),
    "fp8": (tt.fp8("block"), 128),
    "tensor": (tt.fp8("tensor"), 1),
    "mxfp4": (tt.mxfp4(), 1),
    "nvfp4": (tt.nvfp4(), 1),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_a_weight_are_a_weight(tmp_path, scheme, count):
    scheme, step = SCHEMES[scheme]
    shape = (384, 128) if step == 128 else (12, 16) if step == 4 else (12, 32)
    weight = tt.Weight.encode(torch.randn(shape), scheme).to(torch.bfloat16)
    tt.save({"w": weight, "t": weight.t()}, tmp_path / "x.safetensors")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        lazy = checkpoint.get_slice("w")
        for start, stop in ((0, step), (step, 3 * step), (step, None), (None, None), (2, 2), (-step, None)):
            count[0] = 0
            part = lazy[start:stop]
            assert count[0] == part.nbytes
            assert isinstance(part, tt.Weight)
            whole = weight.dequantize()[start:stop]
            assert part.spec == tt.WeightSpec.of(tuple(whole.shape), torch.bfloat16, scheme)
            assert torch.equal(part.dequantize(), weight.dequantize()[start:stop])
            turned = checkpoint.get_slice("t")[:, start:stop]
            assert torch.equal(turned.dequantize(), weight.dequantize().t()[:, start:stop])
            if part.numel():
                with torch.no_grad():
                    part.copy_(torch.ones_like(part.dequantize()))  # it owns its memory, shared parts included
        if step > 1:
            with pytest.raises(
                tt.UnsupportedOpError, match=rf"x.safetensors: w: .*Cut at multiples of {step} rows"
            ) as e:
                lazy[1:]
            assert "\n" not in str(e.value)
        else:
            assert torch.equal(lazy[3].dequantize(), weight.dequantize()[3])
        for index in ((slice(None), slice(0, 2)), (slice(None, None, 2),), (Ellipsis, 0)):
            with pytest.raises(tt.UnsupportedOpError, match=r"x.safetensors: w: .*only a range of whole rows"):
                lazy[index]
        with pytest.raises(tt.UnsupportedOpError, match=r"x.safetensors: t: .*only a range of whole rows"):
            checkpoint.get_slice("t")[:2]


def test_rows_of_an_alias_that_is_rows_of_a_weight(tmp_path, count):
    weight = tt.Weight.encode(torch.randn(12, 16), tt.int8())
    tt.save({"w": weight, "q": weight[4:9]}, tmp_path / "x.safetensors")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert [tie.names for tie in checkpoint.ties] == [("w", "q")]
        count[0] = 0
        part = checkpoint.get_slice("q")[1:3]
        assert count[0] == part.nbytes == 2 * 16 + 2 * 4
        assert torch.equal(part.dequantize(), weight.dequantize()[5:7])
        assert torch.equal(checkpoint.get_slice("q")[-1].dequantize(), weight.dequantize()[8])


def test_one_expert_of_many(tmp_path, count):
    experts = tt.Weight.encode(torch.randn(6, 4, 16), tt.int4(8))
    tt.save({"experts": experts}, tmp_path / "x.safetensors")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        count[0] = 0
        part = checkpoint.get_slice("experts")[2]
        assert isinstance(part, tt.Weight)
        assert count[0] == part.nbytes < experts.nbytes // 5
        assert torch.equal(part.dequantize(), experts.dequantize()[2])


@pytest.mark.parametrize("index", [[0, 1], torch.tensor([0]), None, True, 1.0, (..., ...)], ids=str)
def test_what_is_no_part_is_said_in_one_line(tmp_path, index):
    tt.save(build(Turned), tmp_path / "x.safetensors")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        lazy = checkpoint.get_slice("emb.weight")
        with pytest.raises(tt.CheckpointError, match=r"x.safetensors: emb.weight: a .* is not an index") as caught:
            lazy[index]
        assert "\n" not in str(caught.value)
        with pytest.raises(IndexError):
            lazy[99]
        with pytest.raises(IndexError):
            lazy[0, 0, 0]
        with pytest.raises(KeyError):
            checkpoint.get_slice("nope")
        assert len(lazy) == 12
        assert len(list(lazy)) == 12
        assert repr(lazy).endswith("emb.weight', shape=(12, 8), dtype=torch.float32)")


def test_a_closed_checkpoint_says_so(tmp_path):
    tt.save(nn.Linear(2, 3), tmp_path)
    with tt.open(tmp_path) as checkpoint:
        again = checkpoint
        assert checkpoint == again != tt.open(tmp_path)  # without a look at the tensors
    for read in (lambda: checkpoint["weight"], lambda: checkpoint.get_slice("weight")[:1]):
        with pytest.raises(tt.CheckpointError, match=r"weight: the file cannot be read: the checkpoint is closed"):
            read()
    with pytest.raises(tt.CheckpointError, match=r"safetensors: the file cannot be read: the checkpoint is closed"):
        tt.refit(nn.Linear(2, 3), checkpoint)


@pytest.mark.parametrize("mmap", [True, False])
def test_the_plan_of_a_closed_checkpoint_says_so(tmp_path, mmap):
    tt.save(nn.Linear(2, 3), tmp_path)
    model = nn.Linear(2, 3, device="meta")
    plan = tt.plan_load(model, tmp_path, mmap=mmap)
    plan.close()
    with pytest.raises(tt.CheckpointError, match="(weight|bias): .*: the checkpoint is closed, open it again"):
        plan.apply()
    assert model.weight.is_meta


def test_a_slice_of_an_alias_that_another_writer_noted(tmp_path):
    from safetensors.torch import save_model

    model = nn.ModuleDict({"a": nn.Linear(3, 4, bias=False), "b": nn.Linear(3, 4, bias=False)})
    model["b"].weight = model["a"].weight
    save_model(model, str(tmp_path / "x.safetensors"))
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert torch.equal(checkpoint.get_slice("b.weight")[1:3], model["a"].weight[1:3])
