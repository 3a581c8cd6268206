"""Plain, whose one part is the tensor itself, and the defaults that a minimal scheme inherits."""

import pytest

from tests.schemes import laws
from torchtether.schemes import Affine, Plain, Scheme


class Least(Affine):
    """Keeps of Affine what a scheme must say; the rest is the base class's."""

    decode_into = Scheme.decode_into
    gather = Scheme.gather


@pytest.mark.parametrize("scheme", [Plain(), Least()], ids=["plain", "least"])
@pytest.mark.parametrize("shape", [(6,), (5, 8), (2, 3, 7)])
def test_rows_are_decoded_alone(scheme, shape):
    w = laws.make(shape, "normal", 0)
    laws.check_decode_into(scheme, w)
    laws.check_decode_into(scheme, w.movedim(-1, 0).contiguous().movedim(0, -1))
    laws.check_gather(scheme, w, 0)
