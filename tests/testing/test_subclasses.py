"""The laws of tensor subclasses: ours keep them all, and a class that breaks one law fails that law alone."""

import logging
import os
import pickle
import threading
from functools import partial

import pytest
import torch
from torch import Tensor

import torchtether as tt
from tests.catalog import SCHEMES, each_scheme
from tests.testing.classes import BROKEN, Sixteenths
from torchtether.testing import check_tensor_subclass
from torchtether.testing.tensors import LAWS, Subject, processes

COMPILED = {"plain", "int8", "int4-sym-group32", "mxfp4", "nvfp4", "nf4-double"}
"""tests/test_laws.py compiles one of each family too; the rest runs with the slow tests."""


def _maker(row):
    return lambda: tt.Weight.encode(torch.randn(12, 64), row.scheme)


@each_scheme
def test_weight_keeps_every_law(row):
    laws = [law.id for law in LAWS if not law.optional and (law.id != "compile" or row.id in COMPILED)]
    check_tensor_subclass(_maker(row), laws=laws).check()


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in SCHEMES if row.id not in COMPILED], ids=lambda row: row.id)
def test_weight_keeps_every_law_compiled(row):
    check_tensor_subclass(_maker(row), laws="compile").check()


def test_a_class_of_ones_own_keeps_every_law():
    report = check_tensor_subclass(Sixteenths.random).check()
    assert not report.skipped
    assert len(report.passed) == len([law for law in LAWS if not law.optional])


def test_plain_tensors_keep_what_applies_to_them():
    """The control: no law asks for more than torch promises of its own Parameters."""
    report = check_tensor_subclass(lambda: torch.randn(8, 16)).check()
    assert {result.law for result in report.skipped} == {"flatten", "load-plain"}


@pytest.mark.parametrize("law", BROKEN)
def test_who_breaks_a_law_is_told_that_one_and_no_other(law):
    report = check_tensor_subclass(BROKEN[law].random)
    assert [result.law for result in report.failed] == [law]
    assert report[law].what
    assert report[law].loses
    with pytest.raises(tt.LawError, match=f"{law} .*lost: ") as caught:
        report.check()
    assert "\n" not in str(caught.value)


def test_every_law_has_someone_who_breaks_it():
    assert list(BROKEN) == [law.id for law in LAWS if not law.optional]


def test_laws_are_chosen_by_id_and_run_in_their_order():
    report = check_tensor_subclass(Sixteenths.random, laws=["swap", "clone"], name="mine")
    assert [result.law for result in report.results] == ["clone", "swap"]
    assert report.subject == "mine"
    with pytest.raises(tt.LawError, match="no law 'detatch', the laws are detach, clone"):
        check_tensor_subclass(Sixteenths.random, laws=["detatch"])


@pytest.mark.parametrize("bad", [lambda: torch.randn(3), lambda: [1.0]], ids=["1-D", "list"])
def test_make_must_give_a_matrix(bad):
    with pytest.raises(tt.LawError, match="two dimensions"):
        check_tensor_subclass(bad)


def test_values_that_cannot_be_read_are_no_failure():
    """A law that cannot be judged is skipped with the reason; with ``values=`` it is judged."""

    class Opaque(Sixteenths):
        dequantize = Tensor.dequantize

        def secret(self):
            return Sixteenths.dequantize(self)

    blind = check_tensor_subclass(Opaque.random, laws=["frozen-step"])
    assert "give values=" in blind.skipped[0].what
    assert check_tensor_subclass(Opaque.random, laws=["load-same"], values=Opaque.secret).passed


def test_the_same_values_each_time_cannot_show_a_load():
    fixed = check_tensor_subclass(
        lambda: tt.Weight.encode(torch.ones(4, 8), tt.int8()), laws=["load-same", "load-plain"]
    )
    assert [result.law for result in fixed.skipped] == ["load-same"]
    assert fixed.ok


def test_an_error_of_make_is_the_failure_of_each_law():
    calls = []

    def make():
        calls.append(1)
        if len(calls) > 1:
            raise OSError("no more\nof these")
        return Sixteenths.random()

    report = check_tensor_subclass(make, laws=["clone", "swap"])
    assert [result.what for result in report.failed] == ["raises OSError: no more of these"] * 2


def test_flags_and_random_numbers_are_left_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    future = torch.__future__
    future.set_swap_module_params_on_conversion(True)
    try:
        with torch.no_grad():
            check_tensor_subclass(BROKEN["module-to"].random, laws=["dtype", "module-to", "module-load"])
            assert not torch.is_grad_enabled()
        assert future.get_swap_module_params_on_conversion()
    finally:
        future.set_swap_module_params_on_conversion(False)
    assert torch.equal(torch.get_rng_state(), state)
    assert threading.active_count() >= 1


def test_a_child_that_hangs_is_ended(monkeypatch):
    class Sleeps(Sixteenths):
        def share_memory_(self):
            import time

            time.sleep(100)

    children = []
    fork = os.fork

    def watched():
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", watched)
    monkeypatch.setattr(processes, "_PATIENCE", 0.5)
    report = check_tensor_subclass(Sleeps.random, laws="share-memory")
    assert "does not end" in report.failed[0].what
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], os.WNOHANG)


@pytest.mark.slow
def test_without_fork_the_class_is_made_in_a_fresh_process(monkeypatch):
    monkeypatch.delattr(os, "fork")
    assert check_tensor_subclass(_plain, laws="share-memory").passed
    local = check_tensor_subclass(lambda: torch.randn(4, 8), laws="share-memory")
    assert "function of a module" in local.skipped[0].what


def _plain():
    return torch.randn(8, 16)


@pytest.mark.slow
def test_sharding_runs_in_two_processes():
    assert check_tensor_subclass(_plain, laws="fsdp2").check().passed
    report = check_tensor_subclass(Sixteenths.random, laws="fsdp2")
    assert report.failed
    assert "raises" in report.failed[0].what


class NoRepr(Sixteenths):
    """It compiles, but cannot be printed meanwhile, because torch's default repr reads values."""

    __repr__ = Tensor.__repr__


def test_who_listens_to_the_compiler_changes_no_verdict():
    """torch prints traced tensors if its log has a handler, as under pytest, so a law held in some processes only."""
    trace, heard = logging.getLogger("torch.__trace"), logging.NullHandler()
    trace.addHandler(heard)
    try:
        check_tensor_subclass(NoRepr.random, laws="compile").check()
        assert heard in trace.handlers
    finally:
        trace.removeHandler(heard)


def _each_sharded(rank, rows, folder):
    """Law ``fsdp2`` of every scheme in one group of processes: starting them takes longer than all of it."""

    def task():
        found = {}
        for index in rows:
            row = SCHEMES[index]
            spans = [part.span for part in row.scheme.layout((16, 64)).values()]
            make = partial(_sized, row, 2 * max(8, max(spans) // 64))  # halves cut no block: nf4-double has one of 256
            try:
                found[row.id] = processes._product_of_shards(Subject(make, None, None))
            except Exception as error:
                found[row.id] = f"raises {type(error).__name__}: {error}"
        return "; ".join(f"{name}: {said}" for name, said in found.items() if said)

    return processes._grouped(rank, folder, task)


def _sized(row, rows):
    return tt.Weight.encode(torch.randn(rows, 64), row.scheme)


@pytest.mark.slow
def test_weights_of_every_scheme_shard(tmp_path):
    code, said = processes._spawned(_each_sharded, (range(len(SCHEMES)), str(tmp_path)), 500.0, processes=2)
    assert (code, said) == (0, "")


class Bytes(tt.WrapperTensor):
    """float8 codes, for which plain pickle has no storage class."""

    inner_names = ("codes",)

    def decode(self):
        return self.codes.to(self.dtype)

    def encode(self, values):
        return {"codes": values.to(torch.float8_e4m3fn)}

    @classmethod
    def random(cls):
        return cls(codes=torch.randn(8, 16).to(torch.float8_e4m3fn), dtype=torch.float32)


def test_inner_tensors_of_float8_are_pickled_and_shared():
    check_tensor_subclass(Bytes.random, laws=["pickle", "torch-save", "deepcopy", "share-memory"]).check()


class Words(tt.WrapperTensor):
    """Unsigned integers of 16 bits, of which plain pickle has no storages either."""

    inner_names = ("codes",)

    def decode(self):
        return self.codes.to(self.dtype)

    @classmethod
    def random(cls):
        return cls(codes=torch.randint(65536, (8, 16)).to(torch.uint16), dtype=torch.float32)


def test_inner_tensors_of_wide_unsigned_integers_are_pickled_and_shared():
    check_tensor_subclass(Words.random, laws=["pickle", "torch-save", "deepcopy", "share-memory"]).check()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_pickles_keep_the_bits_of_wide_unsigned_integers(dtype):
    codes = torch.tensor([[0, 1], [2**15, 2 ** (8 * dtype.itemsize - 1) - 1]], dtype=torch.int64).to(dtype)
    made = pickle.loads(pickle.dumps(Words(codes=codes, dtype=torch.float64)))
    assert made.codes.dtype == dtype
    assert torch.equal(made.codes.view(torch.uint8), codes.view(torch.uint8))
