"""What every test shares: a Hypothesis profile, Ctrl-C, and the guard of torch's process-wide flags."""

import gc
import signal

import pytest
import torch
from hypothesis import settings

settings.register_profile("default", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=1000)
settings.load_profile("default")


def pytest_collection_finish(session):
    """Leave 20,000 items of tests to themselves: many a test collects garbage, and would walk over them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_heard():
    """A shell starts what runs in the background with SIGINT ignored, and Python leaves that so."""
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
    """Fails a test that leaks one of torch's process-wide flags, and mends the flag for the tests after it."""
    before = _flags()
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack for every kind of device that is absent
    yield
    after = _flags()
    torch.__future__.set_swap_module_params_on_conversion(before[0])
    torch.__future__.set_overwrite_module_params_on_conversion(before[1])
    torch.set_grad_enabled(before[2])
    torch.set_default_dtype(before[4])
    torch._C._set_torch_function_state(before[5])
    assert after == before, f"a process-wide flag leaked: {before} became {after}"
