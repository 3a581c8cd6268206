"""State dicts by ``torch.save``: opened without running anything, read by position, tied where storage was shared."""

import io
import os
import zipfile

import pytest
import torch

import torchtether as tt
from tests.load.models import Fused, Odd, Slices, Tied, Turned, build
from tests.load.test_round_trip import assert_same
from torchtether.ties import named_tensors

MODELS = (Tied, Turned, Fused, Slices, Odd)  # torch.save refuses memory that is shared under two dtypes


def state_of(model):
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name != "wide"}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_state_dict_opens_with_its_ties(tmp_path, kind, keep, suffix):
    state = state_of(build(kind))
    state = state if keep else {name: tensor.detach() for name, tensor in state.items()}
    torch.save(state, tmp_path / f"x{suffix}")
    with tt.open(tmp_path / f"x{suffix}") as checkpoint:
        found = {name: checkpoint[name] for name in checkpoint}
        for name, tensor in state.items():
            lazy = checkpoint.get_slice(name)
            assert torch.equal(lazy[...], tensor)
            if tensor.dim():
                assert torch.equal(lazy[:1], tensor[:1])
    assert_same(dict(sorted(state.items())), dict(sorted(found.items())))
    for tie in tt.find_ties(build(kind)):
        places = {found[name].untyped_storage().data_ptr() for name in tie.names if name in found}
        assert len(places) <= 1


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind is not Odd])
@pytest.mark.parametrize("meta", [True, False])
def test_a_state_dict_loads(tmp_path, kind, meta):
    source = build(kind)
    torch.save(source.state_dict(), tmp_path / "x.pt")
    model = build(kind, meta=meta, seed=4)
    tt.load(model, tmp_path / "x.pt")
    assert_same(named_tensors(source), named_tensors(model))
    assert tt.find_ties(model) == tt.find_ties(source)


def test_a_state_dict_is_quantized_while_it_loads(tmp_path):
    source = build(Tied)
    torch.save(source.state_dict(), tmp_path / "x.pt")
    model = build(Tied, meta=True)
    report = tt.load(model, tmp_path / "x.pt", quantize="int8", dtype={"*": torch.bfloat16})
    tt.quantize(source, "int8")
    assert torch.equal(model.head.weight.parts["qdata"], source.head.weight.parts["qdata"])
    assert "emb.weight" in report.quantized


def test_opening_reads_no_values_and_a_slice_only_its_own(tmp_path, monkeypatch):
    whole = torch.randn(1000, 256)
    torch.save({"w": whole, "cut": whole[:, 3]}, tmp_path / "x.pt")
    total, honest = [0], os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda d, b, at: (total.__setitem__(0, total[0] + len(b[0])), honest(d, b, at))[1]
    )
    with tt.open(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.spec("cut").shape == (1000,)
        assert total[0] == 0
        assert torch.equal(checkpoint.get_slice("w")[5:7], whole[5:7])
        assert total[0] == 2 * 256 * 4


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def archive_of(found, **options):
    made = io.BytesIO()
    torch.save(found, made, **options)
    return made.getvalue()


def compressed():
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive_of({"w": torch.ones(99)}))) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
    return made.getvalue()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (archive_of({"w": Evil()}), "torch.load cannot read it"),
        (archive_of({"w": torch.ones(3), "epoch": 3}), "epoch: it is a int, not a tensor"),
        (archive_of({"model": {"w": torch.ones(3)}}), "model: it is a dict, not a tensor"),
        (archive_of([torch.ones(3)]), "it holds a list, not a state dict"),
        (archive_of({"w": torch.ones(3).to_sparse()}), "w: a Tensor of layout torch.sparse_coo"),
        (archive_of({"w": torch.ones(3).expand(2, 3)}), "w: the alias of size"),
        (archive_of({"w": torch.ones(3, dtype=torch.complex64).conj()}), "w: it is a lazy conjugate"),
        (archive_of({"torchtether.storage.w": torch.ones(3)}), "names that begin with"),
        (archive_of({"w": torch.ones(3)}, _use_new_zipfile_serialization=False), "not in the zip format"),
        (archive_of({"w": torch.ones(3)})[:-40], "x.pt: "),
        (b"", "not in the zip format"),
        (compressed(), "its entries are compressed"),
    ],
    ids="evil number nested list sparse expanded conjugate hidden legacy short empty compressed".split(),
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path, monkeypatch, data, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(tt.CheckpointError, match=what) as caught:
        tt.open(tmp_path / "x.pt")
    assert "\n" not in str(caught.value)
    assert "x.pt" in str(caught.value)
    assert not (tmp_path / "evil").exists()


def test_a_file_that_shrinks_is_an_error_not_a_crash(tmp_path):
    torch.save(build(Fused).state_dict(), tmp_path / "x.pt")
    with tt.open(tmp_path / "x.pt") as checkpoint:
        os.truncate(tmp_path / "x.pt", 100)
        with pytest.raises(tt.CheckpointError, match="the file ended"):
            checkpoint["q"]


def test_mutated_bytes_are_one_error_or_a_checkpoint(tmp_path):
    """A changed byte of a value cannot be noticed; anything else is a CheckpointError, at opening or at reading."""
    honest = archive_of(build(Fused).state_dict())
    generator = torch.Generator().manual_seed(0)
    opened = 0
    for _ in range(300):
        data = bytearray(honest)
        at, value = (int(torch.randint(n, (), generator=generator)) for n in (len(data), 256))
        data[at] = value
        (tmp_path / "x.pt").write_bytes(data)
        try:
            with tt.open(tmp_path / "x.pt") as checkpoint:
                for name in checkpoint:
                    assert checkpoint[name].numel() <= len(data)
                opened += 1
        except tt.CheckpointError as error:
            assert "\n" not in str(error)
    assert 0 < opened < 300
