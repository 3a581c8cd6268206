"""``tt.distributed.save`` writes the bytes that one process writes, on any number of ranks, and they load exactly."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

import torchtether as tt
import torchtether.distributed
from tests.distributed.nets import Tied, build, loaded, same_rows, step, tokens
from tests.distributed.spawn import spawn
from tests.distributed.training import whole
from tests.testing.classes import Sixteenths
from torchtether.distributed import transfers

SCHEMES = {
    "float": None,
    "int8 and int4": {"emb.weight": "int8", "body.0.0.weight": tt.int4(group_size=16)},
    "plain": {"emb.weight": tt.Plain(), "body.0.1.bias": tt.Plain()},
    "one scale": {"body.*.0.weight": tt.fp8("tensor")},
    "blocks of several rows": {"body.1.0.weight": "nf4"},
}
OPTIONS = ({}, {"max_shard_size": 2500}, {"aliases": "copy", "max_shard_size": 4000})


def equal_folders(one, two):
    """Return the names of files that differ between both folders."""
    files = {file.relative_to(folder) for folder in (one, two) for file in Path(folder).rglob("*") if file.is_file()}
    return [str(f) for f in files if not all((Path(d) / f).exists() for d in (one, two)) or
            (Path(one) / f).read_bytes() != (Path(two) / f).read_bytes()]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    model = Tied(101)
    model.extra.uniform_()
    tt.save(model, folder)
    return folder


# -- the bytes --------------------------------------------------------------------------------------------------------


def saves(source, folder, mesh_shape=None):
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape, mesh_dim_names=("copies", "rows"))
    for what, rules in SCHEMES.items():
        if what.startswith("blocks") and dist.get_world_size() == 3:
            continue
        model = build(mesh=mesh)
        tt.distributed.load(model, source, quantize=rules)
        for i, options in enumerate(OPTIONS):
            tt.distributed.save(model, folder / f"{what} {i}", **options)
        tt.distributed.save(model, folder / f"{what}.safetensors")
        tt.distributed.save(model.state_dict(), folder / f"{what} mapping")  # one DTensor for each tied name
        if rules is None:
            tt.distributed.save(model.state_dict(keep_vars=True), folder / "mapping")
            with torch.no_grad():
                model.eval()(tokens())  # leaves the root gathered
            tt.distributed.save(model, folder / "float 0")  # over the one that is there
            fresh = build(mesh=mesh)
            try:
                tt.distributed.save(fresh, folder / "nothing")
            except tt.CheckpointError as error:
                assert "on meta and has no values" in str(error)
        elif what != "plain":  # which no file records
            again = build(mesh=mesh)
            tt.distributed.load(again, folder / f"{what} 1")
            for name, held in again.named_parameters():
                assert same_rows(held, loaded(source, quantize=rules).get_parameter(name)), name


@pytest.mark.parametrize(
    ("world", "mesh"),
    [
        (2, None),
        pytest.param(3, None, marks=pytest.mark.slow),
        pytest.param(4, None, marks=pytest.mark.slow),
        pytest.param(4, (2, 2), marks=pytest.mark.slow),
    ],
)
def test_the_files_are_those_of_one_process(source, tmp_path, world, mesh):
    spawn(saves, world, source, tmp_path, mesh)
    for what, rules in SCHEMES.items():
        if what.startswith("blocks") and world == 3:
            continue
        model = loaded(source, quantize=rules)
        for i, options in enumerate(OPTIONS):
            tt.save(model, tmp_path / "wanted" / f"{what} {i}", **options)
            assert equal_folders(tmp_path / f"{what} {i}", tmp_path / "wanted" / f"{what} {i}") == []
        tt.save(model, tmp_path / "wanted.safetensors")
        assert (tmp_path / f"{what}.safetensors").read_bytes() == (tmp_path / "wanted.safetensors").read_bytes()
        assert equal_folders(tmp_path / f"{what} mapping", tmp_path / f"{what} 0") == []
    assert equal_folders(tmp_path / "mapping", tmp_path / "float 0") == []
    assert not (tmp_path / "nothing").exists()


def saves_masters(source, folder):
    model = build(on_meta=False, quantize={"emb.weight": tt.Mastered(tt.int8())})
    tt.distributed.load(model, source)
    for masters in ("keep", "drop"):
        tt.distributed.save(model, folder / masters, masters=masters)
        tt.distributed.save(model, folder / f"{masters} dcp", masters=masters, format="dcp")


def test_masters_are_left_out_on_request(source, tmp_path):
    spawn(saves_masters, 2, source, tmp_path / "ranks")
    model = tt.quantize(Tied(101), {"emb.weight": tt.Mastered(tt.int8())})
    tt.load(model, source)
    for masters in ("keep", "drop"):
        tt.save(model, tmp_path / masters, masters=masters)
        assert not equal_folders(tmp_path / masters, tmp_path / "ranks" / masters)
        with tt.open(tmp_path / masters) as wanted, tt.open(tmp_path / "ranks" / f"{masters} dcp") as found:
            assert found["emb.weight"].parts.keys() == wanted["emb.weight"].parts.keys()
            assert all(torch.equal(p, wanted["emb.weight"].parts[n]) for n, p in found["emb.weight"].parts.items())
            assert ("master" in found["emb.weight"].parts) == (masters == "keep")


def saves_few_rows(folder):
    for scheme in (None, "int8"):
        model = nn.Sequential(nn.Embedding(2, 8), nn.Linear(8, 2, bias=False))
        model[1].weight = model[0].weight
        if scheme:
            tt.quantize(model, {"0.weight": scheme}).requires_grad_(False)
        tt.distributed.save(fully_shard(model).state_dict(), folder / str(scheme))
    return True


def test_a_rank_without_rows_sees_the_ties_of_a_state_dict(tmp_path):
    spawn(saves_few_rows, 3, tmp_path)
    for scheme in ("None", "int8"):
        assert [tie.names for tie in tt.open(tmp_path / scheme).ties] == [("0.weight", "1.weight")]


def test_without_a_process_group_it_is_tt_save(source, tmp_path):
    model = loaded(source, quantize={"emb.weight": "int8"})
    tt.distributed.save(model, tmp_path / "one", max_shard_size=2500)
    tt.save(model, tmp_path / "two", max_shard_size=2500)
    assert equal_folders(tmp_path / "one", tmp_path / "two") == []


# -- resuming ---------------------------------------------------------------------------------------------------------


def begin(source, folder):
    """Train two steps and save in both formats; train two more and return the losses that a resumed run must have."""
    model = build()
    tt.distributed.load(model, source)
    optimizer = torch.optim.AdamW(
        [{"params": list(model.body.parameters()), "lr": 1e-2}, {"params": [model.emb.weight]}], lr=3e-2
    )
    for _ in range(2):
        step(model, optimizer)
    tt.distributed.save(model, folder / "files", optimizer=optimizer, max_shard_size=3000)
    tt.distributed.save(model, folder / "dcp", format="dcp", optimizer=optimizer)
    return [step(model, optimizer) for _ in range(2)]


def resume(folder):
    found = []
    for format in ("files", "dcp"):
        model = build()
        optimizer = torch.optim.AdamW(
            [{"params": list(model.body.parameters()), "lr": 0.5}, {"params": [model.emb.weight]}], lr=0.5
        )
        tt.distributed.load(model, folder / format, optimizer=optimizer)
        assert len(optimizer.state) == len(list(model.parameters()))
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-2]
        found.append([step(model, optimizer) for _ in range(2)])
    other = torch.optim.SGD(model.emb.parameters(), lr=0.1)
    try:
        tt.distributed.load(model, folder / "dcp", optimizer=other)
    except tt.LoadError as error:
        return found, str(error)


@pytest.mark.slow
def test_training_resumes_on_another_number_of_ranks(source, tmp_path):
    wanted = spawn(begin, 2, source, tmp_path)[0]
    for found, refusal in spawn(resume, 2, tmp_path):
        assert found == [wanted, wanted]
        assert "has 2 groups of 9 parameters, the optimizer has 1 of 1" in refusal
    for world in (3, 1):
        for found, _ in spawn(resume, world, tmp_path):
            torch.testing.assert_close(found, [wanted, wanted], rtol=1e-4, atol=0)  # other sums


class Factored(torch.optim.Optimizer):
    """Adafactor's shape: a second moment for each row, sharded like the rows, and one for each column, on all ranks."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            new = {"row": param.grad.square().mean(-1, keepdim=True), "column": param.grad.square().mean(0)}
            new["column"] = new["column"].redistribute(placements=[Replicate()])
            state = self.state[param]
            state.update({key: state[key].lerp(value, 0.5) if key in state else value for key, value in new.items()})
            step = param.grad / (state["row"] * state["column"]).sqrt().add(1e-3)
            param.sub_(step.redistribute(placements=param.placements), alpha=0.1)


def _factored():
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 7, bias=False), nn.Linear(7, 2, bias=False)))
    return model, Factored(model.parameters())


def _factored_step(model, optimizer):
    model(torch.arange(12.0).view(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [whole(param).flatten().tolist() for param in model.parameters()]


def begin_factored(folder):
    model, optimizer = _factored()
    for _ in range(2):
        _factored_step(model, optimizer)
    for format in ("safetensors", "dcp"):
        tt.distributed.save(model, folder / format, format=format, optimizer=optimizer)
    return _factored_step(model, optimizer)


def resume_factored(folder):
    found = []
    for format in ("safetensors", "dcp"):
        model, optimizer = _factored()
        tt.distributed.load(model, folder / format, optimizer=optimizer)
        found.append(_factored_step(model, optimizer))
    return found


def test_state_of_another_shape_than_its_parameter_resumes(tmp_path):
    wanted = spawn(begin_factored, 2, tmp_path)[0]
    for world in (2, 3, 1):
        for found in spawn(resume_factored, world, tmp_path):
            torch.testing.assert_close(found, [wanted, wanted], rtol=1e-5, atol=1e-6)


def _two(lr):
    model = Tied(5)
    rest = [param for param in model.parameters() if param is not model.emb.weight]
    return model, [torch.optim.AdamW([model.emb.weight], lr=lr), torch.optim.SGD(rest, lr=lr, momentum=0.9)]


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_several_optimizers_are_stored_one_after_the_other(tmp_path, format):
    model, optimizers = _two(0.1)
    model(torch.arange(5)).sum().backward()
    for one in optimizers:
        one.step()
    tt.distributed.save(model, tmp_path / "x", format=format, optimizer=optimizers)
    again, others = _two(0.5)
    tt.distributed.load(again, tmp_path / "x", optimizer=others)
    for one, other in zip(optimizers, others, strict=True):
        assert other.param_groups[0]["lr"] == 0.1
        assert len(other.state) == len(one.state) > 0
        torch.testing.assert_close([*other.state.values()], [*one.state.values()], rtol=0, atol=0)
    with pytest.raises(tt.LoadError, match="has 2 groups of 9 parameters, the optimizer has 1 of 1"):
        tt.distributed.load(again, tmp_path / "x", optimizer=others[:1])
    both = [*others, torch.optim.SGD([again.emb.weight])]
    with pytest.raises(tt.OptimizerError, match=r"^emb\.weight: is in two optimizers"):
        tt.distributed.save(again, tmp_path / "y", format=format, optimizer=both)
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_names_of_parameters_stay_in_the_order_of_the_optimizer(tmp_path, format):
    model, again = Tied(5), Tied(5)
    one = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    model(torch.arange(5)).sum().backward()
    one.step()
    tt.distributed.save(model, tmp_path / "x", format=format, optimizer=one)
    for params in (reversed(list(again.named_parameters())), reversed(list(again.parameters()))):
        other = torch.optim.AdamW(params, lr=0.5)
        names = other.param_groups[0].get("param_names")
        tt.distributed.load(again, tmp_path / "x", optimizer=other)
        assert other.param_groups[0].get("param_names") == names
        for name, param in again.named_parameters():
            torch.testing.assert_close(other.state[param], one.state[model.get_parameter(name)], rtol=0, atol=0)


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def to_dcp(source, folder):
    for what, rules in SCHEMES.items():
        if what.startswith("blocks") and dist.get_world_size() == 3:
            continue
        model = build()
        tt.distributed.load(model, source, quantize=rules)
        tt.distributed.save(model, folder / what, format="dcp")
        dcp.async_save(tt.distributed.state_dict(model), checkpoint_id=folder / f"{what} later").result()
        try:
            tt.distributed.save(model, folder / what, format="dcp")
        except tt.CheckpointError as error:
            assert "it is there already" in str(error)
        else:
            raise AssertionError("an older checkpoint was overwritten")
    theirs = build()
    tt.distributed.load(theirs, source)
    dcp.save(get_model_state_dict(theirs), checkpoint_id=folder / "theirs")
    dcp.save({"model": get_model_state_dict(theirs), "epoch": 3}, checkpoint_id=folder / "nested")


def in_the_background(source, folder):
    """Save quantized weights by ``async_save``, as the refusal of a stock state dict says; return that refusal."""
    model = build()
    tt.distributed.load(model, source, quantize={"emb.weight": "int8"})
    with pytest.raises(tt.UnsupportedOpError) as caught:
        dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / "stock").result()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], momentum=0.9)
    step(model, optimizer)
    wanted = [parameter.to_local().clone() for parameter in model.parameters()]
    saved = dcp.async_save(tt.distributed.state_dict(model, optimizer), checkpoint_id=folder / "ours")
    saved.result()
    again = build()
    other = torch.optim.SGD([p for p in again.parameters() if p.requires_grad], momentum=0.9)
    assert dict(tt.distributed.load(again, folder / "ours", optimizer=other).quantized) == {"emb.weight": "int8"}
    for one, two, local in zip(model.parameters(), again.parameters(), wanted, strict=True):
        assert torch.equal(two.to_local(), local)
        if one in optimizer.state:
            both = (held.state[key]["momentum_buffer"] for held, key in ((optimizer, one), (other, two)))
            assert torch.equal(*(momentum.to_local() for momentum in both))
    return str(caught.value)


def test_saving_in_the_background(tmp_path):
    source = tmp_path / "source"
    tt.save(Tied(101), source)
    for said in spawn(in_the_background, 2, source, tmp_path):
        assert "Give torch's async_save tt.distributed.state_dict(model)" in said
        assert "share_memory_" not in said
        assert "\n" not in said
    assert tt.open(tmp_path / "ours")["emb.weight"].scheme == tt.int8()


def from_dcp(source, folder, written_by):
    for what, rules in SCHEMES.items():
        if what.startswith("blocks") and 3 in (dist.get_world_size(), written_by):
            continue
        rules = None if what == "plain" else rules  # which no file records
        wanted = loaded(source, quantize=rules)
        for name in (what, f"{what} later"):
            model = build()
            tt.distributed.load(model, folder / name)
            assert all(same_rows(held, wanted.get_parameter(n)) for n, held in model.named_parameters())
            assert all(same_rows(held, wanted.get_buffer(n)) for n, held in model.named_buffers())
        place = build()
        tt.distributed.load(place, source, quantize=rules)
        for tensor in tt.distributed.state_dict(place).values():
            tensor.zero_() if tensor.dtype.itemsize > 1 else None
        dcp.load(tt.distributed.state_dict(place), checkpoint_id=folder / what)  # in place, by torch alone
        assert all(same_rows(held, wanted.get_parameter(n)) for n, held in place.named_parameters())
    wanted = loaded(source)
    model = build()
    tt.distributed.load(model, folder / "theirs")
    assert all(same_rows(held, wanted.get_parameter(n)) for n, held in model.named_parameters())
    quantized = build()
    rename = [lambda key: key.removeprefix("model.") if key.startswith("model.") else None]
    tt.distributed.load(quantized, folder / "nested", rename=rename, quantize={"emb.weight": "int8"})
    assert same_rows(quantized.emb.weight, loaded(source, quantize={"emb.weight": "int8"}).emb.weight)


@pytest.mark.slow
def test_dcp_in_and_out_on_other_numbers_of_ranks(source, tmp_path):
    for written_by, read_by in ((2, 3), (3, 2)):
        folder = tmp_path / str(written_by)
        folder.mkdir()
        spawn(to_dcp, written_by, source, folder)
        spawn(from_dcp, read_by, source, folder, written_by)
    wanted = loaded(source, quantize=SCHEMES["int8 and int4"])
    here = loaded(tmp_path / "2" / "int8 and int4")  # one process, without a group
    assert all(same_rows(held, wanted.get_parameter(n)) for n, held in here.named_parameters())
    assert here.head.weight is here.emb.weight


@pytest.mark.slow
@pytest.mark.parametrize(("written_by", "read_by"), [(1, 4), (4, 1)])
def test_dcp_on_many_more(source, tmp_path, written_by, read_by):
    spawn(to_dcp, written_by, source, tmp_path)
    spawn(from_dcp, read_by, source, tmp_path, written_by)


def through_hugging_face(source, folder):
    from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

    model = build()
    tt.distributed.load(model, source)
    tt.distributed.save(model, folder / "ours", max_shard_size=2500)
    state = {key: held for key, held in tt.distributed.state_dict(build_like(model)).items() if key != "torchtether"}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder / "ours")))
    wanted = loaded(source)
    assert all(same_rows(held, dict(wanted.state_dict(keep_vars=True))[name]) for name, held in state.items())
    index = dict.fromkeys(state, 1)
    writer = HuggingFaceStorageWriter(str(folder / "theirs"), fqn_to_index_mapping=index, save_distributed=False)
    whole = {key: held.full_tensor() if hasattr(held, "full_tensor") else held for key, held in state.items()}
    if dist.get_rank() == 0:
        dcp.save(whole, storage_writer=writer, no_dist=True)
    dist.barrier()
    again = build()
    tt.distributed.load(again, folder / "theirs")
    assert all(same_rows(held, wanted.get_parameter(n)) for n, held in again.named_parameters())


def build_like(model):
    made = build()
    made.to_empty(device="cpu")
    return made


def test_hugging_faces_readers_and_writers_of_dcp(source, tmp_path):
    spawn(through_hugging_face, 2, source, tmp_path)


# -- when it fails ----------------------------------------------------------------------------------------------------


def is_killed(source, folder, rank, when, format):
    """Kill one rank while it writes; the old checkpoint must stay whole."""
    model = build()
    tt.distributed.load(model, source)
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().add_(1)
    if dist.get_rank() == rank:
        kill_at(when)
    try:
        tt.distributed.save(model, folder, max_shard_size=2500) if format == "files" else tt.distributed.save(
            model, folder, format="dcp"
        )
    except BaseException as error:
        return type(error).__name__
    return ""


def kill_at(when):
    import torchtether.distributed.flat as flat
    import torchtether.distributed.saving as saving
    from torchtether.distributed.transfers import Transfers

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "before":
        saving.write_shard = die
        flat.save = die
    elif when == "between":
        stock, count = Transfers._turn, [0]

        def turn(self, jobs):
            count[0] += 1
            return die() if count[0] == 3 else stock(self, jobs)

        Transfers._turn = turn
    else:
        stock, left = os.replace, [0 if when == "at the end" else 2]  # the first rename is that of the mark

        def replace(*arguments):
            left[0] -= 1
            return die() if left[0] < 0 else stock(*arguments)

        os.replace = replace


@pytest.mark.parametrize(("rank", "when"), [(0, "before"), (1, "between"), (0, "at the end")])
def test_a_rank_killed_in_a_save_leaves_the_old_checkpoint_whole(source, tmp_path, rank, when):
    folder = tmp_path / "there"
    tt.save(loaded(source), folder, max_shard_size=2500)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    said = spawn(is_killed, 2, source, folder, rank, when, "files", dies=[rank])
    assert said[1 - rank] == "CheckpointError"
    tt.distributed.load(Tied(101), folder)
    after = {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}
    assert after == before
    tt.save(loaded(source), folder, max_shard_size=2500)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before  # and what was left over is gone


def test_a_rank_killed_between_renames_leaves_the_new_checkpoint(source, tmp_path):
    """The other rank leaves its files, which the killed one has not renamed, to the next reader."""
    folder, whole = tmp_path / "there", tmp_path / "whole"
    tt.save(loaded(source), folder, max_shard_size=2500)
    assert spawn(is_killed, 2, source, whole, None, "", "files") == ["", ""]
    said = spawn(is_killed, 2, source, folder, 0, "between renames", "files", dies=[0])
    assert said[1] == "CheckpointError"
    assert list(folder.glob("*.torn"))
    with tt.open(folder) as checkpoint:
        assert {*checkpoint}
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        file.name: file.read_bytes() for file in whole.iterdir()
    }


def test_a_rank_killed_while_dcp_writes_leaves_nothing_that_looks_like_a_checkpoint(source, tmp_path):
    said = spawn(is_killed, 2, source, tmp_path / "new", 1, "before", "dcp", dies=[1])
    assert said[0] == "CheckpointError"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_dcp_fails_in_one_line_and_leaves_nothing(tmp_path, monkeypatch, failure):
    def refuse(*args):
        try:
            raise failure
        finally:
            if isinstance(failure, OSError):
                raise RuntimeError("[enforce fail at inline_container.cc:672]")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", refuse)
    expected = tt.CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        tt.distributed.save(nn.Linear(3, 3), tmp_path / "new", format="dcp")
    if isinstance(failure, OSError):
        assert str(caught.value) == f"{tmp_path / 'new'}: rank 0 cannot write it: No space left on device"
    assert not list(tmp_path.iterdir())


def disk_is_full(source, folder, rank):
    import torchtether.files.writer as writer

    model = build()
    tt.distributed.load(model, source)
    if dist.get_rank() == rank:
        stock, count = writer.write_tensor, [0]

        def refuse(*args):
            count[0] += 1
            if count[0] == 1:
                raise OSError(28, "No space left on device")
            return stock(*args)

        writer.write_tensor = refuse
    try:
        tt.distributed.save(model, folder, max_shard_size=2500)
    except tt.TetherError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_stops_all(source, tmp_path, rank):
    folder = tmp_path / "there"
    tt.save(Tied(101), folder, max_shard_size=2500)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    said = spawn(disk_is_full, 2, source, folder, rank)
    assert all("No space left on device" in text for text in said), said
    assert f"rank {rank} failed" in said[1 - rank]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def differs(folder):
    model = nn.Linear(4, 4 + dist.get_rank())
    try:
        tt.distributed.save(model, folder)
    except tt.CheckpointError as error:
        return str(error)


def test_ranks_that_hold_different_tensors_are_told(tmp_path):
    for said in spawn(differs, 2, tmp_path):
        assert "rank 1 holds other tensors than rank 0" in said
    assert list(tmp_path.iterdir()) == []


def argues(folder):
    """Give rank 1 one other argument after the other; return what each rank is told."""
    model, is_second = nn.Linear(4, 4), dist.get_rank() == 1
    optimizer, others = torch.optim.AdamW(model.parameters()), {"format": "dcp", "masters": "drop", "max_shard_size": 9}
    tries = [(folder, {key: value} if is_second else {}) for key, value in others.items()]
    for kind in ("safetensors", "dcp"):
        tries.append((folder, {"format": kind} | ({"optimizer": optimizer} if is_second else {})))
    tries.append((folder / str(is_second), {}))
    told = []
    for path, options in tries:
        try:
            tt.distributed.save(model, path, **options)
            told.append("")
        except tt.CheckpointError as error:
            told.append(str(error))
    return told


def test_arguments_that_ranks_do_not_share_are_told(tmp_path):
    one, two = spawn(argues, 2, tmp_path)
    assert one == two
    fix = "Give all ranks the same arguments."
    assert one[0] == f"format: is 'safetensors' on rank 0 and 'dcp' on rank 1. {fix}"
    assert one[1] == f"masters: is 'keep' on rank 0 and 'drop' on rank 1. {fix}"
    assert one[2] == f"max_shard_size: is None on rank 0 and 9 on rank 1. {fix}"
    assert one[3] == one[4] == f"optimizer: is not given on rank 0 and given on rank 1. {fix}"
    assert one[5] == f"path: is {tmp_path / 'False'} on rank 0 and {tmp_path / 'True'} on rank 1. {fix}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_class_of_others_is_refused_and_never_pickled(tmp_path, format):
    model, moments = nn.Linear(16, 8), {"a": torch.ones(3)}
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.bias]["exp_avg"] = Sixteenths.random()
    with pytest.raises(tt.CheckpointError, match="bias.exp_avg: it is a Sixteenths of tests"):
        tt.distributed.save(model, tmp_path / "x", format=format, optimizer=optimizer)
    model.weight = nn.Parameter(Sixteenths.random(), requires_grad=False)
    moments["a"].untyped_storage().resize_(0)
    for given, what in ((model, "weight: it is a Sixteenths of tests"), (moments, "a: its memory is freed")):
        with pytest.raises(tt.CheckpointError, match=what):
            tt.distributed.save(given, tmp_path / "x", format=format)
    assert list(tmp_path.iterdir()) == []


def saves_what_has_no_memory(folder):
    model = fully_shard(nn.Linear(4, 4))
    said = []
    for save, options in ((tt.save, {}), (tt.distributed.save, {}), (tt.distributed.save, {"format": "dcp"})):
        try:
            save(model, folder / "x", **options)
        except tt.CheckpointError as error:
            said.append(str(error))
        model.weight.to_local().untyped_storage().resize_(0)
    return said


def test_a_shard_without_memory_is_refused(tmp_path):
    for said in spawn(saves_what_has_no_memory, 2, tmp_path):
        assert said[0] == "weight: it is a DTensor. Use tt.distributed.save."
        assert len(said) == 3
        assert all("weight: its memory is freed or fake" in text for text in said[1:]), said
    assert list(tmp_path.iterdir()) == []


def cannot_read(folder, rank, options):
    """Save while the third shard that ``rank`` reads cannot be read; return what this rank says."""
    model, stock, count = build(on_meta=False), transfers._bytes, [0]

    def read(tensor):
        count[0] += 1
        if dist.get_rank() == rank and count[0] == 3:
            raise MemoryError("no memory for a copy")
        return stock(tensor)

    transfers._bytes = read
    try:
        tt.distributed.save(model, folder / "x", **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("options", OPTIONS[:2], ids=["one file", "shards"])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_waits_for_a_shard_that_cannot_be_read(tmp_path, rank, options):
    said = spawn(cannot_read, 2, tmp_path, rank, options, timeout=20.0)
    assert said[rank] == "MemoryError: no memory for a copy"
    assert f"CheckpointError: rank {rank} failed: MemoryError: no memory for a copy" in said[1 - rank]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found | {"v": 2},
        lambda found: found | {"state": {"other": {}}},
        lambda found: found | {"state": {"weight": []}},
        lambda found: found | {"groups": [found["groups"][0] | {"params": [1, "bias"]}], "state": {}},
    ],
    ids=["version", "state of no parameter", "state of no kind", "number for a name"],
)
def test_damaged_groups_are_refused_before_a_change(tmp_path, damage):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tt.distributed.save(model, tmp_path / "x", optimizer=optimizer)
    (file,) = (tmp_path / "x" / "optimizer").iterdir()
    tensors = load_file(file)
    text = json.dumps(damage(json.loads(bytes(tensors["groups"].tolist())))).encode()
    save_file({**tensors, "groups": torch.tensor(list(text), dtype=torch.uint8)}, file)
    held = nn.init.zeros_(model.weight)
    with pytest.raises(tt.CheckpointError, match="optimizer: its parameter groups cannot be read: ValueError"):
        tt.distributed.load(model, tmp_path / "x", optimizer=optimizer)
    assert not held.any()
