"""The measurements of reports: anonymous memory and pages of mapped files, separately."""

import mmap
import os

import pytest
import torch

import torchtether as tt
from torchtether import progress
from torchtether.loading.report import LoadReport
from torchtether.progress import Meter

SIZE = 32 * 2**20
SLACK = 8 * 2**20  # what else happens in the process


@pytest.fixture
def mapped(tmp_path):
    (tmp_path / "file").write_bytes(b"\1" * SIZE)
    with open(tmp_path / "file", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as found:
        yield found


def test_mapped_pages_and_own_memory_are_measured_apart(mapped):
    with Meter() as own:
        held = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # no memory that was free already
        for at in range(0, SIZE, mmap.PAGESIZE):
            held[at] = 1
        own.look()
        held.close()
    assert abs(own.peak - SIZE) < SLACK
    assert own.mapped_peak < SLACK
    with Meter() as other:
        assert sum(mapped[at] for at in range(0, SIZE, mmap.PAGESIZE)) == SIZE // mmap.PAGESIZE
        other.look()
    assert abs(other.mapped_peak - SIZE) < SLACK
    assert other.peak < SLACK


def test_a_load_report_holds_and_prints_both(tmp_path):
    tt.save(torch.nn.Linear(4, 4), tmp_path)
    found = tt.load(torch.nn.Linear(4, 4), tmp_path)
    assert found.peak is not None
    assert found.mapped_peak is not None
    assert "peak 2.5 MB (mapped 3 kB)" in str(LoadReport(peak=2_500_000, mapped_peak=3000))


@pytest.mark.parametrize("text", [None, "Name:\tpython\nVmRSS:\t 100 kB\n"])
def test_where_the_system_does_not_tell_nothing_is_claimed(tmp_path, monkeypatch, text):
    if text is not None:
        (tmp_path / "status").write_text(text)
    monkeypatch.setattr(progress, "_STATUS", tmp_path / "status")
    with Meter() as meter:
        pass
    assert (meter.peak, meter.mapped_peak) == (None, None)
    assert "peak" not in str(LoadReport())


def test_a_meter_whose_exit_never_runs_leaves_no_thread_and_no_open_file():
    """As after an interrupt at the first instruction of ``__exit__``."""
    meter = Meter().__enter__()
    thread, status = meter._thread, meter._status
    assert thread.is_alive()
    del meter
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(status)
