"""Folders by torch.distributed.checkpoint, read by position: torch's values, without running any code of a pickle."""

import enum
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtether as tt
from tests.distributed.spawn import spawn
from torchtether.files import DcpFile, Store
from torchtether.files.dcp import MOST_OPEN
from torchtether.geometry.views import View

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.float64, torch.complex64)


def save(state, folder, single_file=True):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is in a single process
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=single_file), no_dist=True)


def values(dtype, *shape):
    made = torch.arange(torch.Size(shape).numel()).reshape(shape) % 120
    return made.to(dtype)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("valid") / "folder"
    state = {f"t{i}": values(dtype, 6, 4) for i, dtype in enumerate(DTYPES)}
    state |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 3), "turned": torch.arange(6.0).reshape(2, 3).t()}
    save({**state, "nested": {"a": torch.ones(3), "epoch": 7, "text": "no tensor"}}, folder)
    return folder, state


def test_every_dtype_and_shape_is_read(valid):
    folder, state = valid
    with tt.open(folder) as checkpoint:
        assert set(checkpoint) == {*state, "nested.a"}
        for name, wanted in state.items():
            assert torch.equal(
                checkpoint[name].view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8)
            )
        assert checkpoint.get_slice("t0")[2:4, 1:3].tolist() == state["t0"][2:4, 1:3].tolist()


def test_members_of_enums_may_be_written_as_by_python_3_11_2(valid, tmp_path):
    class Pickler(pickle.Pickler):
        def reducer_override(self, given):
            is_member = isinstance(given, enum.Enum)
            return (getattr, (type(given), given.name)) if is_member else NotImplemented

    shutil.copytree(valid[0], tmp_path / "copy")
    with (tmp_path / "copy" / ".metadata").open("r+b") as file:
        metadata = pickle.load(file)
        file.seek(0)
        Pickler(file).dump(metadata)
        file.truncate()
    assert b"getattr" in (tmp_path / "copy" / ".metadata").read_bytes()
    with tt.open(tmp_path / "copy") as checkpoint, tt.open(valid[0]) as wanted:
        assert set(checkpoint) == set(wanted)
        assert torch.equal(checkpoint["t0"], wanted["t0"])


def chunks(folder):
    mesh = init_device_mesh("cpu", (2, 2))
    whole = values(torch.float32, 5, 6, 4)
    state = {
        f"{one} {two}": distribute_tensor(whole, mesh, [Shard(one), Shard(two)]) for one in range(3) for two in range(3)
    }
    dcp.save(state, checkpoint_id=folder)
    dist.barrier()


def test_boxes_of_any_dimension_are_put_together(tmp_path):
    spawn(chunks, 4, tmp_path)
    whole = values(torch.float32, 5, 6, 4)
    with Store(tmp_path) as store:
        assert len(store.header.tensors) == 9
        for key in store.header.tensors:
            assert torch.equal(store.read(key), whole), key
            view = View(torch.float32, (2, 3, 2), (24, 4, 1), 24 + 8 + 1)
            assert torch.equal(store.read_view(key, view), whole[1:3, 2:5, 1:3]), key


@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view], ids=["conjugate", "negative"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_lazy_conjugate_or_negative_is_read_resolved(tmp_path, view):
    lazy = view(torch.randn(3, 4, dtype=torch.complex64))
    dcp.save({"value": lazy}, checkpoint_id=tmp_path)
    with Store(tmp_path) as store:
        assert torch.equal(store.read("value"), lazy.resolve_conj().resolve_neg())


# -- what a file may not do -------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    "what",
    [Evil(), {"a": Evil()}, 3, None, Metadata({}), torch.Size([2])],
    ids=["evil", "evil inside", "number", "none", "empty", "size"],
)
def test_a_strange_metadata_is_refused_and_not_run(valid, tmp_path, capsys, what):
    folder = tmp_path / "copy"
    shutil.copytree(valid[0], folder)
    (folder / ".metadata").write_bytes(pickle.dumps(what))
    with pytest.raises(tt.CheckpointError, match="copy"):
        tt.open(folder)
    assert capsys.readouterr().out == ""


def changed(folder, tmp_path, change):
    """A copy of the folder whose metadata ``change`` has lied into."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    change(metadata)
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    return copy


def stored(metadata, key):
    return next(index for index in metadata.storage_data if index.fqn == key)


def lie(attribute, value):
    def change(metadata):
        info = metadata.storage_data[stored(metadata, "t0")]
        object.__setattr__(info, attribute, value)

    return change


def grow(metadata):
    entry = metadata.state_dict_metadata["t0"]
    entry.size = torch.Size((6, 5))


def twice(metadata):
    entry = metadata.state_dict_metadata["t0"]
    entry.size, entry.chunks = torch.Size((12, 4)), entry.chunks * 2


def overlap(metadata):
    """As many elements as the tensor has, some of them twice, and some never."""
    entry, index = metadata.state_dict_metadata["t0"], stored(metadata, "t0")
    kind = type(entry.chunks[0])
    boxes = [((0, 0), (4, 4)), ((2, 0), (2, 4))]  # of (6, 4): the last two rows are in neither
    entry.chunks = [kind(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    for offsets, _ in boxes:
        metadata.storage_data[type(index)(index.fqn, torch.Size(offsets), 0)] = metadata.storage_data[index]


def lose(metadata):
    del metadata.storage_data[stored(metadata, "t0")]


def retype(metadata):
    metadata.state_dict_metadata["t0"].properties.dtype = torch.float64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lie("relative_path", "../folder/__0_0.distcp"), "not in a file of the folder"),
        (lie("relative_path", "gone.distcp"), "does not exist"),
        (lie("offset", 10**9), "is listed as"),
        (lie("offset", -5), "which cannot be sizes"),
        (lie("length", 40), "is listed as 40"),
        (lie("transform_descriptors", ["zip"]), "compressed"),
        (grow, "cover 24 of 30 elements"),
        (twice, "overlap"),
        (overlap, "overlap"),
        (lose, "is in no file"),
        (retype, "differs from .metadata"),
    ],
)
def test_a_metadata_that_lies_is_an_error(valid, tmp_path, change, said):
    with pytest.raises(tt.CheckpointError, match=said), tt.open(changed(valid[0], tmp_path, change)) as checkpoint:
        checkpoint["t0"]


@given(data=st.data())
def test_mutated_bytes_give_tensors_or_one_error(valid, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("mutated") / "copy"
    shutil.copytree(valid[0], folder)
    file = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(file.read_bytes())
    for where, value in data.draw(
        st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)
    ):
        content[where % len(content)] = value
    file.write_bytes(content[: len(content) - data.draw(st.sampled_from([0, 0, 1, 100]))])
    try:
        with tt.open(folder) as checkpoint:
            for name in checkpoint:
                assert tuple(checkpoint[name].shape) == checkpoint.spec(name).shape
    except tt.CheckpointError as error:
        assert "copy" in str(error)
        assert "\n" not in str(error)


def test_there_may_be_more_files_than_a_process_may_open(tmp_path):
    """A checkpoint of a thousand ranks has a thousand files."""
    limits = pytest.importorskip("resource")
    state = {f"t{i}": torch.full((2, 3), float(i)) for i in range(MOST_OPEN + 100)}
    save(state, tmp_path / "folder", single_file=False)
    assert len(list((tmp_path / "folder").glob("*.distcp"))) == len(state)
    soft, hard = limits.getrlimit(limits.RLIMIT_NOFILE)
    with open(tmp_path / "last", "wb") as file:
        last = file.fileno()
    with tt.open(tmp_path / "folder") as checkpoint:
        limits.setrlimit(limits.RLIMIT_NOFILE, (last + MOST_OPEN + 50, hard))
        try:
            assert all(torch.equal(checkpoint[name], wanted) for name, wanted in state.items())
            assert all(torch.equal(checkpoint[name], wanted) for name, wanted in state.items())
        finally:
            limits.setrlimit(limits.RLIMIT_NOFILE, (soft, hard))


def test_the_state_of_an_optimizer_is_apart(tmp_path):
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tt.distributed.save(model, tmp_path / "folder", format="dcp", optimizer=optimizer)
    assert list(tt.open(tmp_path / "folder")) == ["bias", "weight"]
    assert "weight.exp_avg" in DcpFile(tmp_path / "folder", "torchtether.optimizer.").header.tensors
    assert isinstance(Path(tmp_path, "folder", ".metadata").stat().st_size, int)
