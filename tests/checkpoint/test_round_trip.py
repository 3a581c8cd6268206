"""Saving and opening restores values, ties with their geometry, strides, dtypes, schemes and bytes."""

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import torchtether as tt
import torchtether.distributed
from tests.loading.models import MODELS, Fused, Odd, Slices, Storage, Tied, Turned, build
from tests.testing.classes import Sixteenths
from torchtether.files import DTYPES, KEY, TensorFile
from torchtether.ties.names import named_tensors


def bits(tensor):
    if isinstance(tensor, tt.Weight) and not tensor.scheme.transparent:
        return torch.cat([bits(part) for part in tensor.parts.values()])
    flat = tensor.detach().resolve_conj().resolve_neg().flatten()
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # an empty view may have any stride


def assert_same(one, other, *, strides=True):
    """The same names, kinds, dtypes, shapes, strides and bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        given = other[name]
        assert (tensor.dtype, tensor.shape) == (given.dtype, given.shape), name
        assert isinstance(tensor, tt.Weight) == isinstance(given, tt.Weight), name
        if strides and tensor.numel() and 0 not in tensor.stride():
            assert tensor.stride() == given.stride(), name
        assert torch.equal(bits(tensor), bits(given)), name


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shard", [None, 64])
@pytest.mark.parametrize("aliases", ["drop", "copy"])
@pytest.mark.parametrize("meta", [True, False])
def test_a_model_comes_back_the_same(tmp_path, kind, shard, aliases, meta):
    model = build(kind)
    tt.save(model, tmp_path / "x", max_shard_size=shard, aliases=aliases)
    again = build(kind, meta=meta, seed=2)
    before = named_tensors(again)
    parameters = {name: p for name, p in before.items() if isinstance(p, nn.Parameter)}
    report = tt.load(again, tmp_path / "x")
    assert (report.missing_keys, report.unexpected_keys, report.on_meta) == ((), (), ())
    assert_same(named_tensors(model), named_tensors(again))
    assert tt.find_ties(again) == tt.find_ties(model)
    assert all(named_tensors(again)[name] is p for name, p in parameters.items())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shard", [None, 64])
def test_an_opened_checkpoint_has_every_name_with_its_memory(tmp_path, kind, shard):
    model = build(kind)
    tt.save(model, tmp_path / "x", max_shard_size=shard)
    with tt.open(tmp_path / "x") as checkpoint:
        found = dict(reversed([(name, checkpoint[name]) for name in reversed(list(checkpoint))]))
        for name in checkpoint:
            assert checkpoint.spec(name).shape == tuple(found[name].shape)
            assert checkpoint.spec(name).dtype == found[name].dtype
    assert_same(dict(sorted(model.state_dict().items())), dict(sorted(found.items())))
    live = {frozenset(tie.names) for tie in tt.find_ties(model)}
    for names in live:
        places = {found[name].untyped_storage().data_ptr() for name in names if found[name].numel()}
        assert len(places) <= 1


def test_aliases_cost_nothing_and_copies_let_everybody_read_every_key(tmp_path):
    model = build(Turned)
    tt.save(model, tmp_path / "drop.safetensors")
    tt.save(model, tmp_path / "copy.safetensors", aliases="copy")
    few = safetensors.torch.load_file(tmp_path / "drop.safetensors")
    every = safetensors.torch.load_file(tmp_path / "copy.safetensors")
    assert few.keys() == {"emb.weight", "mid.weight", "mid.bias", "norm.weight", "norm.bias", "steps"}
    assert every.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(every[name], tensor)
    with safetensors.safe_open(tmp_path / "drop.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["head.weight"] == "emb.weight"


def test_gaps_between_slices_are_not_written(tmp_path):
    whole = torch.full((64,), 7.0)
    named = {"a": whole[0:16], "b": whole[8:24], "c": whole[20:40:2]}
    tt.save(named, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as file:
        (key,) = file.header.tensors
        stored = file.read(key)
    assert stored.shape == (39,)
    assert stored[25].item() == 0
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert list(checkpoint) == ["a", "b", "c"]
        assert checkpoint["c"].tolist() == [7.0] * 10
        assert checkpoint["b"].data_ptr() == checkpoint["a"].data_ptr() + 8 * 4


def test_the_whole_storage_of_a_slice_is_not_written(tmp_path):
    tt.save({"row": torch.zeros(1000, 10)[3], "column": torch.ones(1000, 10)[:, 3]}, tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size < 6000
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint["column"].tolist() == [1.0] * 1000


@pytest.mark.parametrize("kind", MODELS)
def test_equal_models_give_equal_bytes(tmp_path, kind):
    for name in ("a", "b"):
        tt.save(build(kind), tmp_path / name, max_shard_size=100)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


# -- random ties ------------------------------------------------------------------------------------------------------


@st.composite
def state_dicts(draw):
    """Tensors of any dtype, and views of them: turned, sliced, strided, of another dtype, the same object."""
    named = {}
    for i in range(draw(st.integers(1, 4))):
        code = draw(st.sampled_from(["F32", "BF16", "F16", "I64", "U8", "BOOL", "C64", "F8_E4M3"]))
        shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
        dtype, count = DTYPES[code], torch.Size(shape).numel()
        raw = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)
        named[f"t{i}"] = raw
        for j in range(draw(st.integers(0, 3))):
            how = draw(st.sampled_from(["same", "detach", "turn", "rows", "steps", "column", "bytes", "conj"]))
            view = raw
            if how == "detach":
                view = raw.detach()
            elif how == "turn":
                view = raw.transpose(0, -1)
            elif how == "rows" and len(raw) > 1:
                view = raw[1:]
            elif how == "steps" and len(raw) > 2:
                view = raw[::2]
            elif how == "column" and raw.dim() > 1 and raw.shape[-1] > 1:
                view = raw[..., 1]
            elif how == "bytes" and dtype not in (torch.bool, torch.complex64):
                view = raw.view(torch.uint8)
            named[f"v{i}{j}"] = view
        if draw(st.booleans()):
            del named[f"t{i}"]
    return {name: named[name] for name in draw(st.permutations(sorted(named)))}


@given(state_dicts(), st.sampled_from([None, 20]), st.sampled_from(["drop", "copy"]))
def test_random_ties_come_back(tmp_path_factory, named, shard, aliases):
    folder = tmp_path_factory.mktemp("ties")
    tt.save(named, folder / "x", max_shard_size=shard, aliases=aliases)
    with tt.open(folder / "x") as checkpoint:
        found = {name: checkpoint[name] for name in named}
        assert set(checkpoint) == set(named)
    assert_same(named, found, strides=False)
    for one in named:  # writing to one shows in all that shared its memory
        if named[one].numel() and named[one].dtype == torch.float32:
            before = {name: bits(tensor).clone() for name, tensor in named.items()}
            named[one].reshape(-1)[:1].fill_(0)
            named[one].fill_(9)
            found[one].fill_(9)
            assert_same(named, found, strides=False)
            assert before


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme", [tt.int8(), tt.int4(4), tt.fp8(), tt.nf4(), tt.mxfp4(), tt.nvfp4(), tt.nf4(True)], ids=str
)
@pytest.mark.parametrize("aliases", ["drop", "copy"])
def test_quantized_weights_come_back_with_scheme_tie_and_bits(tmp_path, scheme, aliases):
    model = build(Turned)
    tt.quantize(model, scheme)
    tt.save(model, tmp_path / "x", aliases=aliases, max_shard_size=150)
    for meta in (True, False):
        again = build(Turned, meta=meta, seed=5)
        report = tt.load(again, tmp_path / "x")
        assert_same(named_tensors(model), named_tensors(again))
        assert tt.find_ties(again) == tt.find_ties(model)
        tt.check_ties(again)
        assert set(report.quantized) == {"emb.weight", "mid.weight"}
    plain = {}
    for file in (tmp_path / "x").glob("*.safetensors"):
        plain |= safetensors.torch.load_file(file)
    for part, tensor in model.emb.weight.parts.items():
        assert torch.equal(bits(plain[f"emb.weight.{part}"]), bits(tensor))
    with tt.open(tmp_path / "x") as checkpoint:
        assert checkpoint.format == "native"
        assert checkpoint.spec("turned").stride == (1, 8)
        assert checkpoint["turned"].parts["qdata"].data_ptr() == checkpoint["emb.weight"].parts["qdata"].data_ptr()


def test_rows_of_a_weight_are_its_rows_again(tmp_path):
    weight = tt.Weight.encode(torch.randn(6, 4), tt.int8())
    tt.save({"w": weight, "rows": weight[2:4]}, tmp_path / "x.safetensors")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert torch.equal(checkpoint["rows"].dequantize(), weight[2:4].dequantize())
        assert str(checkpoint.ties[0]) == "w = rows (view [2, 4] of it)"


def test_a_state_dict_that_was_moved_tensor_by_tensor_is_saved_once(tmp_path):
    model = build(Turned)
    tt.quantize(model, {"emb.weight": tt.Plain(), "mid.weight": "int8"})
    moved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tt.save(moved, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert "head.weight" not in file.header.tensors
        assert "turned" not in file.header.tensors
    again = build(Turned, meta=True)
    tt.load(again, tmp_path / "x.safetensors")
    assert again.head.weight is again.emb.weight
    assert torch.equal(again.turned, model.emb.weight.dequantize().t())
    moved["head.weight"].add_(1)
    with pytest.raises(
        tt.TieError, match="head.weight: its record says that it is tied to emb.weight, but their values differ"
    ):
        tt.save(moved, tmp_path / "y.safetensors")


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_new_save_leaves_no_shard_of_the_old_one(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    tt.save(build(Tied), tmp_path, max_shard_size=100)
    assert (tmp_path / "model.safetensors.index.json").exists()
    tt.save(build(Tied), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
    tt.save(build(Tied), tmp_path, max_shard_size="0.3kB")
    assert not (tmp_path / "model.safetensors").exists()
    tt.load(build(Tied), tmp_path)


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path):
    model = build(Tied)
    tt.save(model, tmp_path, max_shard_size=100)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tt.save(build(Tied, seed=9), tmp_path, max_shard_size=100, progress=interrupt)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["folder", "x.safetensors", "x.gguf"])
@pytest.mark.parametrize(("before", "after"), [(None, "int8"), ("nf4", "fp4"), ("nf4", None)])
def test_a_model_that_is_converted_during_a_save_is_one_error(tmp_path, name, before, after):
    """Values in another scheme than recorded would be read as other values, and a Weight has no address to read at."""
    if name == "x.gguf" and before is not None:
        pytest.skip("GGUF has no type for nf4")
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    if before is not None:
        tt.quantize(model, before)

    def convert(done, total):
        tt.dequantize(model)
        if after is not None:
            tt.quantize(model, after)

    format = "gguf" if name == "x.gguf" else "native"
    with pytest.raises(tt.CheckpointError, match=r"1\.weight: it (became|was converted).*while it was saved"):
        tt.save(model, tmp_path / name, format=format, progress=convert)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_is_one_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(tt.CheckpointError, match="cannot be written"):
        tt.save(build(Tied), tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["x.safetensors", "x.gguf"])
def test_a_read_only_file_system_is_one_error(tmp_path, monkeypatch, name):
    """It refuses also to remove a file that is not there."""

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(arguments[0]))

    for module, call in ((os, "open"), (os, "unlink"), (Path, "unlink")):
        monkeypatch.setattr(module, call, refuse)
    with pytest.raises(tt.CheckpointError, match=rf"/{name}: cannot be written: Read-only file system"):
        tt.save(nn.Linear(32, 32), tmp_path / name, format="gguf" if name == "x.gguf" else "native")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.safetensors", tt.save),
        ("x.gguf", partial(tt.save, format="gguf")),
        ("x.svg", lambda model, path: tt.storage_map(model).to_svg(path)),
    ],
)
def test_what_is_no_regular_file_is_not_replaced(tmp_path, name, write):
    """Root's rename would put a file in the place of a device, such as /dev/null."""
    os.mkfifo(tmp_path / name)
    model = build(Tied)
    with pytest.raises(tt.CheckpointError, match=r"x\.\w+: it is a FIFO, not a regular file"):
        write(model, tmp_path / name)
    assert (tmp_path / name).is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_that_would_be_a_folder_is_named(tmp_path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(tt.CheckpointError, match=r"model: it is a file, .* Give a name that ends in \.safetensors"):
        tt.save(build(Tied), tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"


def test_shards_are_named_as_others_name_them(tmp_path):
    tt.save(build(Tied), tmp_path / "tiny.safetensors", max_shard_size=400)
    index = json.loads((tmp_path / "tiny.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f"tiny-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert KEY in index["metadata"]
    tt.load(build(Tied, meta=True), tmp_path / "tiny.safetensors.index.json")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"max_shard_size": "lots"}, "max_shard_size: 'lots' is not a size"),
        ({"max_shard_size": 0}, "max_shard_size: 0 is not a size"),
        ({"format": "x"}, "format: unknown format 'x'"),
        ({"aliases": "keep"}, "aliases: 'keep' is neither"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(tmp_path, change, what):
    with pytest.raises(tt.CheckpointError, match=what):
        tt.save(build(Tied), tmp_path / "x.safetensors", **change)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=[False, True], ids=["", "python-3.14"])
def hides(request, monkeypatch):
    """From Python 3.14 on ``pathlib`` hides errors of the system."""
    for name, hiding in {"exists": "exists", "is_file": "isfile", "is_dir": "isdir"}.items():
        if request.param:
            monkeypatch.setattr(Path, name, lambda self, hiding=hiding, **_: getattr(os.path, hiding)(self))


@pytest.mark.usefixtures("hides")
@pytest.mark.parametrize(
    "call", [tt.save, tt.load, lambda _, path: tt.open(path), partial(tt.distributed.save, format="dcp")]
)
def test_a_path_that_the_system_refuses_to_look_up_is_an_error_of_ours(tmp_path, call):
    with pytest.raises(tt.CheckpointError, match=r"x: cannot be (read|written): File name too long"):
        call(build(Tied), tmp_path / ("x" * 300))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("hides")
def test_a_path_that_the_system_hides_is_no_name_of_the_hub(tmp_path, monkeypatch):
    def refuse(path, *, ours=os.lstat, **more):
        if str(path).startswith("shut/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return ours(path, **more)

    monkeypatch.chdir(tmp_path)
    for call in ("lstat", "stat"):  # root may look up all paths
        monkeypatch.setattr(os, call, partial(refuse, ours=getattr(os, call)))
    with pytest.raises(tt.CheckpointError, match="^shut/m: cannot be read: Permission denied"):
        tt.open("shut/m")


def test_a_folder_that_may_not_be_entered_is_an_error_of_ours(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path / ".metadata"))

    tt.save(build(Tied), tmp_path)
    monkeypatch.setattr("torchtether.files.store.is_dcp", refuse)  # root may enter all folders
    with pytest.raises(tt.CheckpointError, match=f"{tmp_path.name}: cannot be read: Permission denied"):
        tt.open(tmp_path)


@pytest.mark.parametrize(
    ("named", "what"),
    [
        ({"a": 5}, "a: is an int, not a tensor"),
        ({"": torch.ones(1)}, "must be text, and not empty"),
        ({"a\ud800": torch.ones(1)}, r"a\\ud800: the name is not Unicode text: surrogates not allowed"),
        ({"a": torch.ones(1, device="meta")}, "a: it is on meta"),
        ({"torchtether.storage.a": torch.ones(1)}, "names that begin with"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, "a: safetensors has no dtype"),
        ({"w": tt.Weight.encode(torch.ones(2, 2), tt.int8()), "w.scale": torch.ones(1)}, "w.scale: two tensors"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, named, what):
    with pytest.raises(tt.CheckpointError, match=what):
        tt.save(named, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "what"),
    [("", "path: is empty"), ("x\0", "'x.x00': has a character"), ("x\ud800", "'x.ud800': has a char")],
)
@pytest.mark.parametrize(
    "call", [tt.save, tt.load, tt.open, tt.plan_load, tt.refit, tt.distributed.save, tt.distributed.load]
)
def test_a_path_that_cannot_be_is_one_error(tmp_path, monkeypatch, path, what, call):
    """The empty path would be the current folder, which nobody has named."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tt.CheckpointError, match=what):
        call(*([] if call is tt.open else [nn.Linear(2, 2)]), path)
    assert list(tmp_path.iterdir()) == []


def _freed(tensor):
    parts = tensor.parts.values() if isinstance(tensor, tt.Weight) else (tensor,)
    for part in parts:
        part.untyped_storage().resize_(0)
    return tensor


def _fake():
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Sixteenths.random, "a: it is a Sixteenths of tests, which keeps its values in other tensors"),
        (lambda: TwoTensor(torch.ones(2), torch.ones(2)), "a: it is a TwoTensor of torch, which keeps"),
        (lambda: _freed(torch.ones(3)), "a: its memory is freed or fake"),
        (lambda: _freed(tt.Weight.encode(torch.ones(2, 2), tt.int8())), "a: its memory is freed or fake"),
        (lambda: _freed(tt.Weight.encode(torch.ones(2, 2), tt.Plain())), "a: its memory is freed or fake"),
        (_fake, "a: its memory is freed or fake"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"aliases": "copy"}, {"format": "gguf"}, {"format": "comfy"}])
def test_a_tensor_without_memory_of_its_own_is_named(tmp_path, make, what, options):
    tensor = make()
    path = tmp_path / ("x.gguf" if options.get("format") == "gguf" else "x.safetensors")
    with pytest.raises(tt.CheckpointError, match=what):
        tt.save({"a": tensor, "b": tensor}, path, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", [tt.int8(), tt.nf4()], ids=["int8", "nf4"])
@pytest.mark.parametrize(
    ("tied", "alias"),
    [
        (lambda w: w[1:3].transpose(1, 2), "b"),
        (lambda w: w[2], "b"),
        (lambda w: w.unsqueeze(0), "a"),  # the owner is the one with more dimensions
        (lambda w: w.view(-1, 64), "b"),
    ],
    ids=["transposed rows", "one matrix", "a dimension more", "reshaped"],
)
def test_a_view_of_a_weight_that_no_reader_accepts_is_refused_before_a_file_is_written(tmp_path, tied, alias, scheme):
    model = nn.Module()
    model.a = nn.Parameter(tt.Weight.encode(torch.randn(4, 4, 64), scheme), requires_grad=False)
    model.b = nn.Parameter(tied(model.a.detach()), requires_grad=False)
    path = tmp_path / "x.safetensors"
    with pytest.raises(tt.TieError, match=rf"^{alias}: is a view of .*which is quantized: .*untie\(model, '{alias}'\)"):
        tt.save(model, path)
    assert not path.exists()
    tt.untie(model, alias)
    tt.save(model, path)
    assert_same(dict(tt.open(path)), dict(model.named_parameters()), strides=False)


def test_models_used_here_have_the_ties_they_claim():
    assert [len(tt.find_ties(build(kind))) for kind in (Tied, Turned, Fused, Slices, Storage, Odd)] == [
        1,
        1,
        1,
        1,
        2,
        0,
    ]


def test_what_has_gaps_and_becomes_contiguous_needs_no_record_of_strides(tmp_path):
    tt.save({"wide": torch.arange(3.0).expand(2, 3)}, tmp_path / "x.safetensors")
    with tt.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.store.record.strides == {}
        assert checkpoint["wide"].tolist() == [[0, 1, 2], [0, 1, 2]]
