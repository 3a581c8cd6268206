"""The tests of this folder run on a device: ``cuda``, or what TORCHTETHER_TEST_DEVICE says (``cpu`` proves the tests).

Without it they are left out when they are collected, and pytest says how many.
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
    """Mark what is in this folder, and leave it out where there is no device."""
    here = [item for item in items if FOLDER in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
    if not is_there():
        left_out[:] = here
        items[:] = [item for item in items if FOLDER not in item.path.parents]


def pytest_terminal_summary(terminalreporter):
    if left_out:
        terminalreporter.write_line(f"{len(left_out)} tests were left out, because they need {DEVICE.type}: tests/gpu")


@pytest.fixture
def device():
    """The device with its index, as tensors on it say."""
    return torch.empty(0, device=DEVICE).device


@pytest.fixture
def gpu(device):
    """The module of the device; a test that needs streams, graphs or counts of memory is skipped on a CPU."""
    if device.type == "cpu":
        pytest.skip("a CPU has neither streams nor memory of its own")
    torch.accelerator.synchronize(device)
    return torch.get_device_module(device)
