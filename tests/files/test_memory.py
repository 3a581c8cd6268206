"""Memory for what is loaded."""

import gc

import pytest
import torch

from torchtether.files import memory
from torchtether.files.memory import fresh
from torchtether.files.system import HUGE_PAGE

LARGE = (HUGE_PAGE // 4 + 3, 1)


def is_on_a_huge_page(tensor):
    return tensor.data_ptr() % HUGE_PAGE == 0 and not tensor.untyped_storage().resizable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize(("shape", "stride"), [((), None), ((0, 3), None), ((3, 5), (1, 3)), ((1024, 2049), (1, 1024))])
def test_it_has_the_shape_strides_and_bytes_that_are_asked_for(shape, stride, dtype):
    made, wanted = fresh(shape, dtype, stride=stride), torch.empty(shape, dtype=dtype)
    assert (made.shape, made.dtype, made.stride()) == (wanted.shape, dtype, stride or wanted.stride())
    assert made.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    assert is_on_a_huge_page(made) == (made.nbytes >= HUGE_PAGE)
    assert torch.equal(made.copy_(torch.ones(shape)), torch.ones(shape, dtype=dtype))


def test_without_a_mapping_it_is_memory_of_torch(monkeypatch):
    def refused(nbytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory, "_anonymous", refused)
    made = fresh(LARGE, torch.float32)
    assert made.shape == LARGE
    assert made.untyped_storage().resizable()


def test_other_devices_and_modes():
    assert fresh(LARGE, torch.float32, "meta").is_meta
    with torch.device("meta"), torch.inference_mode():
        made = fresh(LARGE, torch.float32)
    assert made.device.type == "cpu"


def test_mappings_are_counted_and_come_to_an_end(monkeypatch):
    """A process may not have many; a model may have a hundred thousand experts."""
    gc.collect()
    monkeypatch.setattr(memory, "_MOST_ROOMS", len(memory._ROOMS) + 2)
    held = [fresh(LARGE, torch.float32) for _ in range(4)]
    assert [is_on_a_huge_page(tensor) for tensor in held] == [True, True, False, False]
    view = held[0][1:]
    del held[0]
    assert not is_on_a_huge_page(fresh(LARGE, torch.float32))
    del view
    assert is_on_a_huge_page(fresh(LARGE, torch.float32))
