"""The registry of rules refuses two answers for one op."""

import pytest
import torch

from torchtether.errors import TetherError
from torchtether.weights.dispatch import KINDS, REFUSED, RULES, refuse, rule

aten = torch.ops.aten


def test_an_op_has_one_answer():
    before = dict(RULES), dict(KINDS), dict(REFUSED)
    with pytest.raises(TetherError, match=r"aten\.mm\.default has a rule already"):
        rule(aten.mm.default)(lambda *args: None)
    with pytest.raises(TetherError, match=r"aten\.mm\.default has a rule already"):
        refuse(aten.mm.default, why="no")
    with pytest.raises(TetherError, match=r"aten\.resize_\.default has a rule already"):
        rule(aten.resize_.default)(lambda *args: None)
    assert before == (RULES, KINDS, REFUSED)
