"""Shared by all tests: Hypothesis profiles, the handler of Ctrl-C, and a guard of torch's process-wide flags."""

import gc
import os
import shutil
import signal

# Before torch starts its threads: those of several workers share the cores, and threads that spin while they wait keep
# the others from working. The suite took three times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings

settings.register_profile("default", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=1000)
settings.register_profile("few", derandomize=True, deadline=None, max_examples=5)  # what ran with "default" already
settings.load_profile("default")


def pytest_collection_finish(session):
    """Exclude the 20,000 test items from garbage collection, because many tests collect and would walk over them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def cxx():
    """Skip the test if there is no C++ compiler, which inductor needs for graphs on the CPU."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("torch.compile needs a C++ compiler here")


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_heard():
    """Restore the handler of SIGINT: a shell starts background jobs with it ignored, and Python keeps that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _flags():
    return (
        torch.__future__.get_swap_module_params_on_conversion(),
        torch.__future__.get_overwrite_module_params_on_conversion(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch._C._get_torch_function_state(),
        torch._C._len_torch_dispatch_stack(),
    )


@pytest.fixture(autouse=True)
def flags_are_restored():
    """Fail a test that leaks one of torch's process-wide flags, and restore the flag for later tests."""
    before = _flags()
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack trace for every absent kind of device
    yield
    after = _flags()
    torch.__future__.set_swap_module_params_on_conversion(before[0])
    torch.__future__.set_overwrite_module_params_on_conversion(before[1])
    torch.set_grad_enabled(before[2])
    torch.set_default_dtype(before[4])
    torch._C._set_torch_function_state(before[5])
    assert after == before, f"a process-wide flag leaked: {before} became {after}"
