"""Products whose parts and inputs end where memory that cannot be read begins: ``python -m tests.weights.page_ends``.

A kernel that reads beyond them ends the process. ``test_kernels.py`` runs it.
"""

import ctypes
import mmap

import torch
import torch.nn.functional as F

import torchtether as tt
from tests.catalog import SCHEMES

PAGE, NO_ACCESS, READ_AND_WRITE = mmap.PAGESIZE, 0, 3
SHAPES = ((5, 256), (3, 96), (7, 488), (33, 608), (300, 1312))
LIBC = ctypes.CDLL(None)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def at_end(tensor):
    """A copy of the tensor, the last byte of which is the last of a page; no byte after it can be read."""
    size = tensor.numel() * tensor.element_size()
    room = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, room + PAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    LIBC.mprotect(whole.data_ptr() + room, PAGE, NO_ACCESS)
    return whole[room - size : room].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def main():
    torch.manual_seed(0)
    count = 0
    for row in SCHEMES:
        for rows, columns in SHAPES:
            try:
                weight = tt.Weight.encode(torch.randn(rows, columns), row.scheme)
            except tt.SchemeError:  # the shape does not fit
                continue
            for dtype in (torch.bfloat16, torch.float32):
                plain = weight.to(dtype)
                guarded = plain.map(at_end)
                assert torch.equal(guarded.dequantize(), plain.dequantize()), (row.id, columns, dtype)
                for m in (1, 3, 26):
                    x = torch.randn(m, columns).to(dtype)
                    assert torch.equal(F.linear(at_end(x), guarded), F.linear(x, plain)), (row.id, columns, dtype, m)
                    count += 1
    print(count)


if __name__ == "__main__":
    with torch.no_grad():
        main()
