"""A memory limit for processes that read untrusted files."""

import contextlib
import sys
from pathlib import Path


@contextlib.contextmanager
def little_memory(nbytes=2**30):
    """Limit memory in the block: allocations far above those of a sample and a few threads raise foreign errors."""
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
