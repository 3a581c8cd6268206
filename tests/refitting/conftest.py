"""What every test of a refit shares."""

import threading

import pytest


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Whatever happened, the threads that worked for a refit have ended."""
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "torchtether"]
