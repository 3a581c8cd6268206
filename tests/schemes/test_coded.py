"""A user's own schemes on ``tt.BlockScheme``: every law, over all layouts of blocks, and against a loop."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import torchtether as tt
from torchtether.schemes.bits import unpack
from torchtether.testing import check_scheme, check_tensor_subclass


@dataclass(frozen=True)
class Steps(tt.BlockScheme):
    """Whole numbers times a scale, symmetric."""

    kind: ClassVar[str] = "test-steps"
    bits: int = 3

    def fit(self, x):
        return {"scale": x.abs().amax(-1) / 3}

    def to_codes(self, x, scale):
        return x / scale + 3

    def to_values(self, codes, scale):
        return (codes - 3) * scale

    def error(self, codes, scale):
        return scale / 2


@dataclass(frozen=True)
class Between(tt.BlockScheme):
    """Asymmetric: from the lowest of each block to the highest, with two numbers."""

    kind: ClassVar[str] = "test-between"
    numbers: ClassVar[tuple] = ("scale", "lowest")
    bits: int = 5

    def fit(self, x):
        low, high = x.aminmax(dim=-1)
        return {"scale": (high - low) / (2**self.bits - 1), "lowest": low}

    def to_codes(self, x, scale, lowest):
        return (x - lowest) / scale

    def to_values(self, codes, scale, lowest):
        return codes * scale + lowest

    def error(self, codes, scale, lowest):
        # the difference of two ends is rounded, and so is the sum
        return scale * 0.5 + (lowest.abs() + scale * 2**self.bits) * 2.0**-22


BLOCKS = [(1, None), (1, 16), (1, 5), (None, None), (None, 3), (4, 16), (2, 7), (3, None)]
QUICK = [(Steps, (1, None)), (Between, (1, 5)), (Between, (2, 7)), (Steps, (None, 3))]
ALL = [
    pytest.param(kind, block, id=f"{kind.kind}-{block}", marks=[pytest.mark.slow] * ((kind, block) not in QUICK))
    for kind in (Steps, Between)
    for block in BLOCKS
]
SOME = [(1,), (5, 70), (2, 3, 16), (12, 64)]


@pytest.mark.parametrize(("kind", "block"), ALL)
def test_a_kind_of_ones_own_keeps_every_law(kind, block):
    check_scheme(kind(block=block), shapes=[(7,), (70,), (3, 5), (5, 70), (2, 3, 16), (12, 64)]).check()


@pytest.mark.parametrize("bits", [1, 2, 4, 7, 8])
def test_every_number_of_bits(bits):
    check_scheme(Between(bits=bits, block=(1, 5)), laws=["layout", "bound", "rows"], shapes=SOME).check()


def test_its_weights_keep_the_laws_of_tensors():
    laws = ["clone", "dtype", "pickle", "torch-save", "module-load", "training-step", "compile"]
    check_tensor_subclass(lambda: tt.Weight.encode(torch.randn(12, 64), Between(block=(1, 16))), laws=laws).check()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(13, 23), (3, 7, 23), (23,)], ids=str)
def test_each_block_is_what_a_loop_makes_of_it(block, shape):
    """Block by block, in plain Python: the numbers where the layout says, the codes in their places."""
    if len(shape) == 1 and (block[0] or 1) > 1:
        pytest.skip("blocks of several rows need rows")
    scheme = Between(block=block)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts = scheme.encode(values)
    decoded = scheme.decode(parts, shape, torch.float32).view(-1, shape[-1])
    rows = values.view(-1, shape[-1])
    tall, height = len(shape) > 1 and (block[0] or 1) > 1, block[0] or rows.shape[0]
    matrix = shape[-2] if tall else rows.shape[0]
    bands = [
        (m + r, min(m + r + height, m + matrix)) for m in range(0, len(rows), matrix) for r in range(0, matrix, height)
    ]
    width = block[1] or shape[-1]
    count = 0
    lowest = parts["lowest"].reshape(-1)
    for top, bottom in bands:
        for left in range(0, shape[-1], width):
            x = rows[top:bottom, left : left + width]
            assert lowest[count] == x.min()
            scale = (x.max() - x.min()) / 31
            assert parts["scale"].reshape(-1)[count] == scale
            wanted = ((x - x.min()) / scale).round() * scale + x.min()
            torch.testing.assert_close(decoded[top:bottom, left : left + width], wanted, rtol=1e-6, atol=1e-6)
            count += 1
    assert count == lowest.numel()


def test_codes_are_packed_densely():
    parts = Steps().encode(torch.tensor([[-3.0, -2, -1, 0, 1, 2, 3, 3]]))
    assert parts["qdata"].shape == (1, 3)
    assert unpack(parts["qdata"], 3, 8).tolist() == [[0, 1, 2, 3, 4, 5, 6, 6]]


def test_a_large_tensor_is_encoded_a_chunk_at_a_time():
    values = torch.randn(3000, 700)
    wanted = [Between(block=(1, 64)).encode(piece) for piece in values.split(1000)]
    parts = Between(block=(1, 64)).encode(values)
    for name, part in parts.items():
        assert torch.equal(part, torch.cat([one[name] for one in wanted]))


def test_scales_can_be_divided_by():
    parts = Steps().encode(torch.tensor([[0.0, 0.0], [1e-44, 0.0], [1.0, 2.0]]))
    assert parts["scale"].view(-1)[0] == 1
    assert parts["scale"].view(-1)[1] >= torch.finfo(torch.float32).tiny


def _kind(**methods):
    made = type("Wrong", (Steps,), {"__module__": __name__, **methods})
    return dataclass(frozen=True)(made)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Steps(bits=9), "bits must be an int from 1 to 8, got 9"),
        (lambda: Steps(bits=True), "bits must be an int"),
        (lambda: Steps(block=3), "block must be"),
        (lambda: _kind(numbers="scale")(), "numbers must be a tuple of names"),
        (lambda: _kind(numbers=("qdata",))(), "numbers must be a tuple of names"),
        (lambda: _kind(fit=lambda self, x: x.amax(-1))().encode(torch.ones(2, 4)), "fit gives a Tensor, for values"),
        (lambda: _kind(fit=lambda self, x: {"scale": x.amax(-1, keepdim=True)})().encode(torch.ones(2, 4)), "keepdim"),
        (lambda: _kind(fit=lambda self, x: {"scale": 1.0})().encode(torch.ones(2, 4)), "{'scale': 'a float'}"),
        (lambda: _kind(fit=lambda self, x: {"step": x.amax(-1)})().encode(torch.ones(2, 4)), "fit gives {'step'"),
        (
            lambda: _kind(fit=lambda self, x: {"scale": x.amax(-1) * math.nan})().encode(torch.ones(2, 4)),
            "fit gives a scale that is not finite",
        ),
        (
            lambda: _kind(to_codes=lambda self, x, scale: x[..., :1, :2])().encode(torch.ones(2, 4)),
            "to_codes gives shape",
        ),
        (lambda: _kind(to_codes=lambda self, x, scale: 3)().encode(torch.ones(2, 4)), "to_codes gives an int"),
        (
            lambda: _kind(to_codes=lambda self, x, scale: x * math.nan)().encode(torch.ones(2, 4)),
            "to_codes gives codes that are not a number",
        ),
        (lambda: Steps().encode(torch.ones(())), "without dimensions"),
    ],
)
def test_what_is_wrong_with_a_kind_is_said_in_one_line(made, said):
    with pytest.raises(tt.SchemeError) as caught:
        made()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Rounded(Steps):
    """Its ``to_codes`` rounds, which is the base class's to do."""

    kind: ClassVar[str] = "test-rounded"

    def to_codes(self, x, scale):
        return super().to_codes(x, scale).round()


@dataclass(frozen=True)
class Falling(Steps):
    """Its values fall where codes rise, and its ``to_codes`` rounds."""

    kind: ClassVar[str] = "test-falling"

    def to_codes(self, x, scale):
        return 3 - (x / scale).round()

    def to_values(self, codes, scale):
        return (3 - codes) * scale


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(Steps(), marks=pytest.mark.slow), Rounded(), Falling()],
    ids=lambda scheme: type(scheme).__name__,
)
def test_updates_do_not_drift_even_if_to_codes_rounds(scheme):
    torch.manual_seed(0)
    values = torch.cat((torch.tensor([[3.0]]), torch.linspace(-2.9, 2.9, 50).view(1, 50)), 1).repeat(2000, 1)
    drawn = scheme.decode(scheme.update(values, scheme.encode(values)), values.shape, torch.float32)
    assert (drawn.mean(0) - values[0]).abs().max() < 0.05
