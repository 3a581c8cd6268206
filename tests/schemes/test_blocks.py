"""Walking a tensor in pieces gives the same rows and elements, whatever the strides and the range."""

import pytest
import torch

from torchtether.schemes import Codebook, fp4
from torchtether.schemes.blocks import flat, fold, grid_over, rows

SOURCES = {
    "contiguous": torch.arange(4 * 3 * 5 * 2).view(4, 3, 5, 2),
    "last first": torch.arange(4 * 3 * 5 * 2).view(2, 4, 3, 5).movedim(0, -1),
    "reversed": torch.arange(4 * 3 * 5 * 2).view(2, 5, 3, 4).permute(3, 2, 1, 0),
    "strided": torch.arange(4 * 3 * 5 * 4).view(4, 3, 5, 4)[..., ::2],
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_range_of_rows_and_elements(source):
    matrix, line = source.reshape(60, 2), source.reshape(120)
    for start in range(0, 60, 7):
        for stop in range(start + 1, 61):
            assert torch.equal(rows(source, start, stop), matrix[start:stop])
            assert torch.equal(flat(source, 2 * start + 1, 2 * stop), line[2 * start + 1 : 2 * stop])


def test_rows_are_views_where_strides_allow():
    for source in (SOURCES["contiguous"], SOURCES["strided"][0, 0], SOURCES["reversed"][1, 2]):
        piece = rows(source, 1, 3)
        assert piece.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


@pytest.mark.parametrize("size", [None, 1, 3, 5, 7, 9])
@pytest.mark.parametrize("dim", [0, 1])
def test_fold_reduces_each_run(size, dim):
    x = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([piece.amax(dim, keepdim=True) for piece in x.split(size or 7, dim)], dim)
    assert torch.equal(fold(x, size, dim, torch.amax), expected)


@pytest.mark.parametrize("block", [(1, None), (None, None), (1, 4), (None, 4), (2, 4), (3, None)], ids=str)
@pytest.mark.parametrize("shape", [(5, 10), (2, 5, 10), (4, 8)], ids=str)
def test_reduce_and_expand_agree_with_blocks_cut_by_hand(block, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = x.reshape(1, -1, shape[-1]) if block[0] is None else x.reshape(-1, *shape[-2:])
    expected = torch.empty_like(whole)
    for matrix, out in zip(whole, expected, strict=True):
        height, width = block[0] or matrix.shape[0], block[1] or shape[-1]
        for top in range(0, matrix.shape[0], height):
            for left in range(0, shape[-1], width):
                place = (slice(top, top + height), slice(left, left + width))
                out[place] = matrix[place].max()
    grid = grid_over(shape, block)
    assert torch.equal(grid.expand(grid.reduce(x, torch.amax)), expected.view(shape))


def test_of_equal_values_the_first_code_is_used():
    assert fp4().encode(torch.tensor([1.0, 0.0, -0.0, -1e-9]))["qdata"].tolist() == [0x03, 0x00]
    values = torch.tensor([1.0, 0.0, 0.0, -1.0])
    assert Codebook((1.0, 0.0, 0.0, -1.0), block_size=4).encode(values)["qdata"].tolist() == [0b11010100]
