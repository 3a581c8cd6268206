"""The tests of this folder run on ``cuda``, or the device in TORCHTETHER_TEST_DEVICE (``cpu`` tests the tests).

Without that device they are deselected at collection, and pytest prints how many.
"""

import os
from pathlib import Path

import pytest
import torch

DEVICE = torch.device(os.environ.get("TORCHTETHER_TEST_DEVICE", "cuda"))
FOLDER = Path(__file__).parent
left_out = []


def is_there():
    return DEVICE.type == "cpu" or torch.get_device_module(DEVICE).is_available()


def pytest_collection_modifyitems(config, items):
    """Mark the tests of this folder, and deselect them if there is no device."""
    files = {path for path in {item.path for item in items} if FOLDER in path.parents}
    here = [item for item in items if item.path in files]
    for item in here:
        item.add_marker(pytest.mark.gpu)
    if not is_there():
        left_out[:] = here
        items[:] = [item for item in items if item.path not in files]


def pytest_terminal_summary(terminalreporter):
    if left_out:
        terminalreporter.write_line(f"{len(left_out)} tests were left out, because they need {DEVICE.type}: tests/gpu")


@pytest.fixture
def device():
    """Return the device with its index."""
    return torch.empty(0, device=DEVICE).device


@pytest.fixture
def gpu(device):
    """Return the torch module of the device; skips a test that needs streams, graphs or memory counts on a CPU."""
    if device.type == "cpu":
        pytest.skip("a CPU has neither streams nor memory of its own")
    torch.accelerator.synchronize(device)
    return torch.get_device_module(device)
