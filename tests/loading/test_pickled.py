"""State dicts by ``torch.save``: opened without running anything, read by position, tied where storage was shared."""

import io
import json
import os
import zipfile

import pytest
import torch

import torchtether as tt
from tests.checkpoint.test_round_trip import assert_same
from tests.loading.models import Fused, Odd, Slices, Tied, Turned, build
from torchtether.files.pickled import NESTED
from torchtether.schemes import NAMED, same_bits
from torchtether.ties.components import find_components
from torchtether.ties.names import named_tensors

MODELS = (Tied, Turned, Fused, Slices, Odd)  # torch.save refuses memory that is shared under two dtypes


def state_of(model):
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name != "wide"}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ""])
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


def test_expanded_tensors_of_no_or_one_row_are_none_that_share_memory(tmp_path):
    source = {"row": torch.arange(5).expand(1, -1), "none": torch.empty(0).expand(3, 0)}
    torch.save(source, tmp_path / "x.pt")
    with tt.open(tmp_path / "x.pt") as checkpoint:
        assert all(torch.equal(checkpoint[name], tensor) for name, tensor in source.items())


def test_a_file_that_was_saved_without_checksums_opens(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(6.0)}, tmp_path / "x.pt")
        torch.save({"w": Evil()}, tmp_path / "y.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with tt.open(tmp_path / "x.pt") as checkpoint:
        assert checkpoint["w"].tolist() == torch.load(tmp_path / "x.pt")["w"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(tt.CheckpointError, match="its pickle calls posix.system"):
        tt.open(tmp_path / "y.pt")
    (tmp_path / "z.pt").write_bytes(archive_of({"name": torch.ones(1)}).replace(b"name", b"nome"))
    with pytest.raises(tt.CheckpointError, match="Bad CRC-32"):
        tt.open(tmp_path / "z.pt")


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


def test_a_plain_weight_is_read_with_its_strides(tmp_path):
    w, columns = torch.randn(8, 6), torch.randn(4, 6)[:, ::2]
    tensors = {"w": w, "turned": w.t(), "columns": columns}
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(values) for name, values in tensors.items()})
    tt.quantize(model, {"*": tt.Plain()})
    torch.save(model.state_dict(), tmp_path / "x.pt")
    with tt.open(tmp_path / "x.pt") as checkpoint:
        assert ("w", "turned") in [tie.names for tie in checkpoint.ties]
        for name, values in tensors.items():
            assert torch.equal(checkpoint[name], values)
    torch.save({"w": tt.Weight.encode(torch.ones(3).expand(2, 3), tt.Plain())}, tmp_path / "y.pt")
    with pytest.raises(tt.CheckpointError, match="w: the alias of size .* is larger than its owner"):
        tt.open(tmp_path / "y.pt")


class Evil:
    def __init__(self, *call):
        self.call = call or (os.system, ("touch evil",))

    def __reduce__(self):
        return self.call


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
        (archive_of({"w": Evil()}), "its pickle calls posix.system, which no state dict needs"),
        (archive_of({"w": torch.ones(3), "epoch": 3}), "epoch: it is a int, not a tensor"),
        (archive_of({"net": {"w": torch.ones(3)}}), "net: it is a dict, not a tensor"),
        (archive_of([torch.ones(3)]), "it holds a list, not a state dict"),
        (archive_of({"w": torch.ones(3).to_sparse()}), "it holds a sparse tensor"),
        (archive_of({"w": torch.ones(3).expand(2, 3)}), "w: its elements share memory.* Save .contiguous"),
        (archive_of({"w": torch.ones(3, dtype=torch.complex64).conj()}), "w: it is a conjugated or negated view"),
        (archive_of({"torchtether.storage.w": torch.ones(3)}), "names that begin with"),
        (archive_of({"w": torch.ones(3)}, _use_new_zipfile_serialization=False), "not in the zip format"),
        (archive_of({"w": torch.ones(3)}, pickle_protocol=4), "with pickle_protocol=2, its default. Load it with"),
        (archive_of({"w": torch.ones(3)})[:-40], "x.pt: "),
        (b"", "not in the zip format"),
        (compressed(), "its entries are compressed"),
    ],
    ids="evil number nested list sparse expanded conjugate hidden legacy protocol short empty compressed".split(),
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path, monkeypatch, data, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(tt.CheckpointError, match=what) as caught:
        tt.open(tmp_path / "x.pt")
    assert "\n" not in str(caught.value)
    assert "x.pt" in str(caught.value)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("scheme", sorted(NAMED))
def test_weights_open_and_load_as_they_are(tmp_path, scheme):
    """Codes and scales come from the file, bit for bit; what was tied is tied, in any orientation."""
    source = build(Turned)
    tt.quantize(source, {"emb.weight": scheme, "mid.weight": tt.Plain()})
    torch.save(source.state_dict(), tmp_path / "x.pt")
    with tt.open(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.format == "native"
        assert checkpoint.spec("head.weight").scheme == NAMED[scheme]()
        for name, tensor in source.state_dict().items():
            found = checkpoint[name]
            if isinstance(found, tt.Weight):
                assert found.spec.replace(tie=None) == tensor.spec.replace(tie=None)
                assert all(same_bits(part, tensor.parts[n]) for n, part in found.parts.items())
            else:
                assert torch.equal(found, tensor.dequantize() if isinstance(tensor, tt.Weight) else tensor)
        assert checkpoint["emb.weight"].parts["qdata"].data_ptr() == checkpoint["turned"].parts["qdata"].data_ptr()
    model = build(Turned, meta=True)
    tt.load(model, tmp_path / "x.pt")
    assert isinstance(model.emb.weight, tt.Weight)
    assert model.head.weight is model.emb.weight
    assert torch.equal(model.turned.dequantize(), source.turned.dequantize())


def test_parts_of_a_weight_may_not_be_what_the_file_likes(tmp_path):
    """The pickle sets the attributes of a Weight, the private ones too."""
    weight = tt.Weight.encode(torch.randn(4, 8), tt.int8())
    for lie, what in {
        "_spec": (5, "w: it is not a valid Weight: AttributeError"),
        "_names": ((), "w: its parts are {}"),
        "_names ": (("qdata", "dtype"), "w: it is not a valid Weight"),
        "_part_qdata": (torch.zeros(4, 9, dtype=torch.int8), "w: its parts are"),
        "_part_scale": (torch.ones(1, 1).expand(4, 1), "w: a part of this Weight is not contiguous"),
    }.items():
        call, arguments = weight.__reduce_ex__(2)
        torch.save({"w": Evil(call, (*arguments[:-1], {lie.strip(): what[0]}))}, tmp_path / "x.pt")
        with pytest.raises(tt.CheckpointError, match=what[1]):
            tt.open(tmp_path / "x.pt")


@pytest.mark.parametrize("key", NESTED)
def test_the_state_dict_in_the_checkpoint_of_a_training(tmp_path, key):
    source = build(Tied)
    optimizer = torch.optim.AdamW(source.parameters())
    source(torch.arange(3)).sum().backward()
    optimizer.step()
    made = {key: source.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "note": b"x", "seen": {1, 2}}
    torch.save(made, tmp_path / "x.ckpt.pt")
    model = build(Tied, meta=True)
    tt.load(model, tmp_path / "x.ckpt.pt")
    assert_same(named_tensors(source), named_tensors(model))
    torch.save({**made, "model" if key != "model" else "module": source.state_dict()}, tmp_path / "x.pt")
    with pytest.raises(tt.CheckpointError, match="it holds several state dicts: .* Save one of them"):
        tt.open(tmp_path / "x.pt")


def shards_of(folder, states):
    """As transformers wrote them before safetensors: ``pytorch_model-0000n-of-0000m.bin`` and an index."""
    names = {f"pytorch_model-{i:05d}-of-{len(states):05d}.bin": state for i, state in enumerate(states, 1)}
    for name, state in names.items():
        torch.save(state, folder / name)
    index = {"metadata": {"total_size": 1}, "weight_map": {key: name for name, state in names.items() for key in state}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save({"lr": 1}, folder / "training_args.bin")


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind is not Odd])
def test_folders_of_pickled_files_load(tmp_path, kind):
    source = build(kind)
    state = source.state_dict()
    rest = [name for component in find_components(source)[1:] for name in component.names if name in state]
    shards_of(tmp_path, [{n: t for n, t in state.items() if n not in rest}, {n: state[n] for n in rest}])
    for path in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        model = build(kind, meta=True)
        tt.load(model, path)
        assert_same(named_tensors(source), named_tensors(model))
    for file in tmp_path.glob("pytorch_model*"):
        file.unlink()
    with pytest.raises(tt.CheckpointError, match="holds no safetensors file, and no pytorch_model.bin"):
        tt.open(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    tt.load(build(kind, meta=True), tmp_path)
    shards_of(tmp_path, [state])
    with pytest.raises(tt.CheckpointError, match="several checkpoints: pytorch_model.bin, pytorch_model.bin.index"):
        tt.open(tmp_path)
    tt.save(source, tmp_path)
    with tt.open(tmp_path) as checkpoint:
        assert checkpoint.store.files[0].path.name == "model.safetensors"


def test_an_index_of_pickled_files_that_lies(tmp_path):
    states = [{"a": torch.ones(2)}, {"b": torch.ones(3), "c": torch.ones(1)}]
    path = tmp_path / "pytorch_model.bin.index.json"
    for change, what in (
        (lambda m: m.pop("c"), "c: the index does not list it"),
        (lambda m: m.update(d=m["a"]), "d: the index assigns it to .* it is in no shard"),
        (lambda m: m.update(a=m["b"], c=m["a"]), "a: the index assigns it to .*00002.* it is in .*00001"),
        (lambda m: m.update(a="../x.bin"), "a: the index assigns it to '../x.bin'"),
        (lambda m: m.update(a="evil.py"), "a: the index assigns it to 'evil.py'"),
    ):
        shards_of(tmp_path, states)
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))
        with pytest.raises(tt.CheckpointError, match=what):
            tt.open(tmp_path)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ((bytearray, (2**40,)), "its pickle calls builtins.bytearray"),
        ((torch.Tensor, (2**40,)), "its pickle calls torch.Tensor"),
        ((torch.FloatTensor, (2**40,)), "its pickle calls torch.FloatTensor"),
        ((torch.UntypedStorage, (2**40,)), "its pickle calls torch.storage.UntypedStorage"),
        (
            (torch._tensor._rebuild_from_type_v2, (bytearray, bytearray, (2**40,), {})),
            "its pickle calls torch._tensor._rebuild",
        ),
        ((eval, ("1",)), "its pickle calls builtins.eval"),
    ],
)
def test_a_file_may_not_ask_for_memory(tmp_path, call, what):
    """``weights_only`` allows all but the last of these, also with a terabyte."""
    torch.save({"w": torch.ones(1), "x": Evil(*call)}, tmp_path / "x.pt")
    with pytest.raises(tt.CheckpointError, match=what):
        tt.open(tmp_path / "x.pt")


def test_a_file_that_shrinks_is_an_error_not_a_crash(tmp_path):
    torch.save(build(Fused).state_dict(), tmp_path / "x.pt")
    with tt.open(tmp_path / "x.pt") as checkpoint:
        os.truncate(tmp_path / "x.pt", 100)
        with pytest.raises(tt.CheckpointError, match="the file is cut short"):
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


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    "cut", [lambda t: t[:, :4], lambda t: t[:, ::2], lambda t: t.t()[:4].t()], ids=["half", "odd", "turned"]
)
def test_tensors_with_gaps_are_loaded(tmp_path, device, cut):
    weight = cut(torch.randn(8, 8))
    torch.save({"weight": weight, "bias": torch.ones(8)}, tmp_path / "x.pt")
    model = torch.nn.Linear(4, 8, device=device)
    tt.load(model, tmp_path / "x.pt")
    assert torch.equal(model.weight, weight)
    assert model.weight.untyped_storage().nbytes() == 4 * 32
