"""A load to a device gives the values of a load to the CPU, however late the device works, and in bounded memory."""

import contextlib
import itertools
import threading

import pytest
import torch
from torch import nn

import torchtether as tt
from tests.catalog import each_scheme
from tests.loading.models import MODELS, build
from tests.simulated import SimulatedLane, SimulatedRing
from torchtether import compiled
from torchtether.files import batch, ring, store
from torchtether.loading import contents, stream
from torchtether.refitting import writing
from torchtether.schemes import encoders, looking, nearest

SLOT, STAGED = 512, 4096


class Lane(SimulatedLane):
    """Has ops run at once that are called outside a batch, as they do on the CPU: so all before them is done."""

    is_late = True

    def end(self):
        self.synchronize()

    def compute(self, use, after):
        if self.is_late:
            return super().compute(use, after)
        after.synchronize()  # as on a device from which a check takes a number
        use()
        return self.work.add(lambda: None)


@pytest.fixture(autouse=True)
def rings(monkeypatch):
    """Every load goes through a simulated device; gives the rings there were."""
    made = []

    class Noted(SimulatedRing):
        lanes_are = Lane

        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    for module, name, value in (
        (ring, "SLOT", SLOT),
        (batch, "SLOT", SLOT),
        (batch, "SLICE", SLOT),
        (ring, "STAGED", STAGED),
        (batch, "STAGED", STAGED),
        (contents, "STAGED", STAGED),
        (batch, "_WORTHWHILE", 2 * SLOT),
        (store, "Ring", Noted),
        (batch, "Ring", Noted),
        (stream, "_CPU", torch.device("meta")),  # else what needs no change is read straight
    ):
        monkeypatch.setattr(module, name, value)
    return made


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(96, 64)
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("steps", torch.arange(700))


def net(seed, **kwargs):
    torch.manual_seed(seed)
    return Net().to(**kwargs)


def meta(kind=Net):
    with torch.device("meta"):
        return kind()


def bits(model):
    found = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        is_encoded = isinstance(tensor, tt.Weight) and not tensor.scheme.transparent
        parts = tensor.parts if is_encoded else {"": tensor.values_of() if isinstance(tensor, tt.Weight) else tensor}
        for role, part in parts.items():
            raw = part.detach().contiguous().reshape(-1).view(torch.uint8)
            found[f"{name}.{role}"] = (tuple(part.shape), part.stride(), part.dtype, raw.tolist())
    return found


def straight(monkeypatch, make, *args, **kwargs):
    """The same load as it is to the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(store, "Ring", ring.Ring)
        patch.setattr(batch, "Ring", ring.Ring)
        model = make()
        tt.load(model, *args, **kwargs)
        return model


def check(rings, monkeypatch, make, folder, **kwargs):
    expected = straight(monkeypatch, make, folder, **kwargs)
    model = make()
    before = dict(model.named_parameters())
    tt.load(model, folder, **kwargs)
    assert bits(model) == bits(expected)
    assert tt.find_ties(model) == tt.find_ties(expected)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert any(one.buffers for one in rings)
    for one in rings:
        assert one.pinned_most <= ring.SLOTS * SLOT
    return model


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("is_meta", [True, False], ids=["meta", "real"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["stored", "bf16"])
def test_ties_views_strides_and_dtypes(rings, monkeypatch, tmp_path, kind, is_meta, dtype):
    if dtype is not None and kind.__name__ in ("Storage", "Odd"):
        pytest.skip("it has memory of two dtypes, or complex values")
    tt.save(build(kind), tmp_path)
    check(rings, monkeypatch, lambda: build(kind, meta=is_meta, seed=2), tmp_path, dtype=dtype)


@each_scheme
def test_every_scheme_is_encoded_there(rings, monkeypatch, tmp_path, row):
    tt.save(net(1), tmp_path)
    model = check(rings, monkeypatch, meta, tmp_path, quantize=row.scheme)
    assert isinstance(model.a.weight, tt.Weight)


@each_scheme
def test_every_scheme_is_loaded_as_stored(rings, monkeypatch, tmp_path, row):
    tt.save(tt.quantize(net(1), row.scheme), tmp_path)
    check(rings, monkeypatch, meta, tmp_path)
    check(rings, monkeypatch, lambda: tt.quantize(net(2), row.scheme), tmp_path)


@pytest.mark.parametrize("scheme", ["int8", "nf4", tt.int4(32)], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_encoded_into_weights_that_are_there(rings, monkeypatch, tmp_path, scheme, stored):
    tt.save(net(1, dtype=stored), tmp_path)
    check(rings, monkeypatch, lambda: tt.quantize(net(2), scheme), tmp_path)
    check(rings, monkeypatch, lambda: net(2), tmp_path, quantize=scheme, dtype=torch.bfloat16)


@pytest.mark.parametrize(("name", "scheme"), [("compressed-tensors", "int8"), ("bitsandbytes", "nf4")])
def test_published_formats(rings, monkeypatch, tmp_path, name, scheme):
    model = tt.quantize(net(1, dtype=torch.float16), {"a.weight": scheme, "b.weight": scheme})
    tt.save(model, tmp_path, format=name)
    check(rings, monkeypatch, meta, tmp_path)


def test_renamed_joined_and_cut(rings, monkeypatch, tmp_path):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(64, 40, bias=False), nn.Linear(64, 24, bias=False)

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.qk = nn.Linear(64, 64, bias=False)

    torch.manual_seed(3)
    rule = tt.Concat(["q.weight", "k.weight"], "qk.weight")
    tt.save(Parts(), tmp_path)
    for rules in (None, "int8"):
        check(rings, monkeypatch, lambda: meta(Joined), tmp_path, rename=rule, quantize=rules)


def test_the_optimizer_follows_and_some_at_a_time(rings, monkeypatch, tmp_path):
    tt.save(net(1), tmp_path)
    expected = bits(straight(monkeypatch, meta, tmp_path, quantize="int8"))
    model = meta()
    plan = tt.plan_load(model, tmp_path, quantize="int8", optimizer=torch.optim.AdamW(model.parameters()))
    plan.apply(only="a.*")
    plan.apply()
    plan.close()
    assert bits(model) == expected
    assert rings[-1].pinned_most <= ring.SLOTS * SLOT


@pytest.mark.parametrize("scheme", ["int8", "mxfp8", "nvfp4", tt.nf4(double_quant=True)], ids=str)
def test_values_that_no_scheme_holds_change_nothing(tmp_path, monkeypatch, scheme):
    """However late the device finds out."""
    monkeypatch.setattr(nearest, "_MANY", 2**62)  # the CPU looks up numbers in a table, devices compare them
    source = net(1)
    with torch.no_grad():
        source.b.weight[3, 5] = torch.nan
    tt.save(source, tmp_path)
    model = meta()
    with pytest.raises(tt.SchemeError, match=r"b\.weight: .*1 of 8192"):
        tt.load(model, tmp_path, quantize=scheme)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("scheme", ["int8", "nvfp4"])  # by rows, and as a whole
@pytest.mark.parametrize("at", range(0, 12, 3))
def test_a_device_without_memory_changes_nothing(tmp_path, monkeypatch, at, scheme):
    """``torch.OutOfMemoryError`` for the scratch, for a copy, and in what is computed."""
    tt.save(net(1), tmp_path)
    for method in ("copy", "allocate", "compute"):
        calls, ours = iter(range(10**6)), getattr(Lane, method)

        def full(self, *args, calls=calls, original=ours):
            if next(calls) == at:
                raise torch.OutOfMemoryError("injected")
            return original(self, *args)

        model = meta()
        with monkeypatch.context() as patch:
            patch.setattr(Lane, method, full)
            try:
                tt.load(model, tmp_path, quantize=scheme)
            except torch.OutOfMemoryError:
                assert all(parameter.is_meta for parameter in model.parameters())
            else:
                assert next(calls) <= at
        if at == 0:
            tt.load(model, tmp_path, quantize=scheme)
            assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_refit(rings, monkeypatch, tmp_path, scheme):
    tt.save(net(1), tmp_path)
    expected = straight(monkeypatch, meta, tmp_path, quantize=scheme)
    model = tt.quantize(net(2), scheme)
    pointers = [part.data_ptr() for part in model.a.weight.parts.values()]
    tt.refit(model, tmp_path)
    assert bits(model) == bits(expected)
    assert pointers == [part.data_ptr() for part in model.a.weight.parts.values()]


def test_threads_may_share_an_open_checkpoint(tmp_path):
    """Each has buffers of its own: else bytes of one would go into the model of another."""
    torch.manual_seed(3)
    sources = {name: torch.randn(40, 64) for name in ("q", "k", "v")}
    tt.save(sources, tmp_path)
    rule, models, errors = tt.Concat(["q", "k", "v"], "weight"), [nn.Linear(64, 120, bias=False) for _ in range(6)], []

    def refit(model):
        try:
            for _ in range(10):
                tt.refit(model, checkpoint, rename=rule)
        except Exception as error:
            errors.append(error)

    with tt.open(tmp_path) as checkpoint:
        threads = [threading.Thread(target=refit, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert all(torch.equal(model.weight, torch.cat(list(sources.values()))) for model in models)


@pytest.mark.parametrize("scheme", [None, "int8", "nf4"])
def test_several_devices_share_the_buffers_of_a_load(rings, monkeypatch, tmp_path, scheme):
    """Each tensor, or piece of one, goes to the next of three devices, of which each works in an order of its own."""
    tt.save(net(1), tmp_path)
    devices = itertools.cycle(torch.device("privateuseone", number) for number in range(3))  # which no machine has
    original = batch.Batch.passage
    monkeypatch.setattr(batch.Batch, "passage", lambda self, device: original(self, next(devices)))
    check(rings, monkeypatch, meta, tmp_path, quantize=scheme)
    assert max(len(one.lanes) for one in rings) == 3


def test_a_plan_names_devices_without_touching_them(tmp_path):
    """Where there is no such device, that is a fault in one line."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    tt.save(net(1), tmp_path)
    plan = tt.plan_load(meta(), tmp_path, device={"a.*": "cuda:0"})
    assert len(plan.faults) == 1
    assert plan.faults[0].startswith("device: a.*: ")
    plan.close()


@contextlib.contextmanager
def gpu_encoder(asked):
    """Has schemes encode rows by what does as ``gpu.encode_rows`` does: where it fails, it has written nonsense."""
    inside = threading.local()

    def encode_rows(recipe, values, parts):
        flags = looking._unchecked.flags
        if getattr(inside, "is_inside", False):
            return False
        asked.append((flags is not None, tuple(values.shape)))
        is_bad = not bool((values.abs() < 2).all())  # False for NaN
        inside.is_inside = True
        made = tt.int8().encode(torch.zeros_like(values) if is_bad else values)
        inside.is_inside = False
        for name in recipe.parts:
            parts[name].copy_(made[name])
        if flags is None:
            return not is_bad
        flags.append(torch.tensor([int(not is_bad)], dtype=torch.int32))
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders, "encode_rows", encode_rows)
        yield


@pytest.mark.skipif(compiled.native() is None, reason="on the CPU schemes ask for rows in one go only then")
@pytest.mark.parametrize("is_refit", [False, True])
def test_rows_that_a_kernel_cannot_encode_are_encoded_again(rings, monkeypatch, tmp_path, is_refit):
    """Whether it can is asked once, at the end: nothing waits for the device in between."""
    source = net(1)
    with torch.no_grad():
        source.b.weight[3:60:40, 5] = 3.0
    tt.save(source, tmp_path)
    expected, asked = bits(straight(monkeypatch, meta, tmp_path, quantize="int8")), []
    monkeypatch.setattr(writing, "Ring", batch.Ring)
    model = tt.quantize(net(2), "int8") if is_refit else meta()
    with gpu_encoder(asked):
        tt.refit(model, tmp_path) if is_refit else tt.load(model, tmp_path, quantize="int8")
    assert bits(model) == expected
    assert sum(is_unchecked for is_unchecked, _ in asked) > 3
    again = [shape for is_unchecked, shape in asked if not is_unchecked]
    assert 0 < sum(shape[0] for shape in again) < 64 + 96


@pytest.mark.parametrize("atomic", ["full", "checked"])
def test_what_no_scheme_holds_is_found_at_the_end(rings, monkeypatch, tmp_path, atomic):
    monkeypatch.setattr(Lane, "is_late", False)
    monkeypatch.setattr(writing, "Ring", batch.Ring)
    source = net(1)
    with torch.no_grad():
        source.b.weight[3, 5] = torch.nan
    tt.save(source, tmp_path)
    model, asked = meta(), []
    with gpu_encoder(asked), pytest.raises(tt.SchemeError, match=r"b\.weight: .*1 of 8192"):
        tt.load(model, tmp_path, quantize="int8")
    assert all(parameter.is_meta for parameter in model.parameters())
    model = tt.quantize(net(2), "int8")
    before = bits(model)
    with gpu_encoder(asked), pytest.raises(tt.TetherError, match=r"b\.weight"):
        tt.refit(model, tmp_path, atomic=atomic)
    assert bits(model) == before
    assert all(lane.work.is_done(lane.work._added) for one in rings for lane in one.lanes)
