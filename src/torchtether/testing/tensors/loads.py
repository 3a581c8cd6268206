"""Laws of loading: the results of ``module_load`` and ``load_state_dict``, with ``assign`` and without.

The cases are a float checkpoint, a checkpoint of the same class, and a plain module.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..law import Law, NotApplicable, law, require
from .facts import equal, memories, short
from .subject import Subject

LAWS: list[Law] = []


@law(
    LAWS,
    "load-same",
    "a state dict with a tensor of this class replaces the values, with assign or without",
    "a checkpoint of quantized weights loads with old values, or not at all",
)
def _load_same(subject: Subject) -> None:
    given = subject.make_tensor(1)
    values = subject.values(given)
    if equal(values, subject.values(subject.make_tensor(0))):
        raise NotApplicable("make() returns the same values each time: draw them from torch's generator")
    for assign in (False, True):
        held = subject.parameter(0)
        made = held.module_load(given, assign=assign)
        how = f"module_load(same class, assign={assign})"
        require(type(made) is type(given), f"{how} returns a {type(made).__name__}")
        require(equal(subject.values(made), values), f"{how} does not load the values")
        require(made is not held and made is not given, f"{how} returns one of the two, not a new tensor")
    module = subject.tied(0)
    held = module.weight
    module.load_state_dict({"emb.weight": given, "head.weight": given})
    require(module.weight is held, "load_state_dict replaces the Parameter")
    require(equal(subject.values(held), values), "load_state_dict does not load the values")


@law(
    LAWS,
    "load-plain",
    "a float state dict is encoded in this class, with assign or without",
    "a float checkpoint fails to load, or silently makes the module's weights full-size floats again",
)
def _load_plain(subject: Subject) -> None:
    made = subject.make_tensor()
    if type(made) in (Tensor, nn.Parameter):
        raise NotApplicable("it is plain itself")
    old = subject.values(made)
    given = -old
    for assign in (False, True):
        held = subject.parameter()
        made = held.module_load(given.clone(), assign=assign)
        how = f"module_load(plain, assign={assign})"
        require(type(made) is type(held), f"{how} returns a {short(type(made))}: the class is lost silently")
        _arrived(subject, made, given, old, how)
    module = subject.tied()
    held = module.weight
    module.load_state_dict({"emb.weight": given, "head.weight": given})
    require(type(module.weight) is type(held), "load_state_dict loses the class")
    _arrived(subject, module.weight, given, old, "load_state_dict")


@law(
    LAWS,
    "load-into-plain",
    "a state dict with this class fills a plain module with its values, or with assign gives it this class",
    "a quantized checkpoint cannot be loaded into the float model that it was made from",
)
def _load_into_plain(subject: Subject) -> None:
    given = subject.make_tensor()
    values = subject.values(given)
    held = nn.Parameter(torch.zeros_like(values), requires_grad=False)
    memory = memories(held)
    made = held.module_load(given, assign=False)
    require(type(made) is Tensor, f"module_load(assign=False) returns a {short(type(made))} for a plain module")
    require(memories(made) == memory, "module_load(assign=False) does not use the memory of the module")
    require(equal(made.detach(), values), "module_load(assign=False) does not load the values")
    made = nn.Parameter(torch.zeros_like(values), requires_grad=False).module_load(given, assign=True)
    require(type(made) is type(given), f"module_load(assign=True) returns a {short(type(made))}")
    require(equal(subject.values(made), values), "module_load(assign=True) does not load the values")
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.zeros_like(values), requires_grad=False))
    module.load_state_dict({"weight": given})
    require(equal(module.get_parameter("weight").detach(), values), "load_state_dict does not load the values")


def _arrived(subject: Subject, made: Tensor, given: Tensor, old: Tensor, how: str) -> None:
    """Require that ``made`` is closer to ``given`` than to ``old``, its opposite: few bits cannot hold exact values."""
    off, before = ((subject.values(made).double() - x.double()).norm().item() for x in (given, old))
    require(off < before / 2, f"{how} does not load the values")
