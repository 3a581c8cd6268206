"""Fixtures of all tests of refits."""

import threading

import pytest


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Assert that the threads of a refit have ended, whether it succeeded or not."""
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "torchtether"]
