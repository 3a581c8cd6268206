"""Little memory for what reads what strangers wrote."""

import contextlib
import sys
from pathlib import Path


@contextlib.contextmanager
def little_memory(nbytes=2**30):
    """Inside, whoever asks for much more memory than a sample and a few threads take gets an error that is not ours."""
    if sys.platform != "linux":
        yield
        return
    import resource

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
