"""A state machine of an exchange as ``tt.convert`` and ``tt.load`` drive it, with signals and failures between steps.

A state holds the steps that are still to do, as a tuple. At each *labelled* step one of three things happens: the step
succeeds, a signal arrives before it, or it fails (memory is short, or something refuses). So for every path of a
conversion the state machine gives the steps that are taken and the resulting torch model; ``test_model.py`` drives
the code along the same paths.
"""

from typing import NamedTuple

OLD, HALF, NEW = "old", "half", "new"
"""A tensor; half is: the contents are new, the grad is not."""


class Tensor(NamedTuple):
    """What there is to exchange: members of one group share memory, and state is an optimizer's."""

    name: str
    group: str
    has_grad: bool

    @property
    def has_state(self):
        return self.has_grad


class State(NamedTuple):
    todo: tuple
    held: tuple
    state: tuple
    noted: tuple = ()
    journal: tuple = ()
    waiting: bool = False
    error: str = ""
    is_locked: bool = True

    def put(self, field, index, value):
        kept = getattr(self, field)
        return self._replace(**{field: (*kept[:index], value, *kept[index + 1 :])})


FAILING = {"enter", "check", "make", "reset", "replace", "contents", "grad", "follow", "renew"}
LABELLED = {*FAILING, "undo"}


class Model:
    def __init__(self, tensors, atomic):
        """Take ``atomic`` of ``tt.convert``, or "load": ``tt.load`` puts one tensor as it puts several."""
        self.tensors, self.is_full, self.is_load = tensors, atomic == "full", atomic == "load"
        self.index = {tensor.name: i for i, tensor in enumerate(tensors)}

    def start(self):
        groups = {}
        for tensor in self.tensors:
            groups.setdefault(tensor.group, []).append(tensor)
        steps = [("enter", ""), ("check", "")]
        alone = [members[0] for members in groups.values() if len(members) == 1 and not self.is_load]
        for tensor in alone:
            steps += [("safe", ""), ("make", tensor.name)]
            if self.is_full:
                steps += self.put([tensor])
            else:
                steps += [("reset", tensor.name), *(self.put([tensor]) if tensor.has_grad else [])]
        for members in groups.values():
            if len(members) > 1 or self.is_load:
                steps += [("safe", ""), ("make", members[0].group), *self.put(members)]
        if len(alone) == len(groups):
            steps += [("safe", "")]
        count = len(self.tensors)
        return State((*steps, ("exit", "")), (OLD,) * count, (OLD,) * count)

    def put(self, members):
        """The steps for all members of a group: first what takes memory, then what is undone if the next one fails."""
        begun = []
        for tensor in members:
            yield "replace", tensor.name
        for tensor in members:
            begun = [*begun, tensor.name]
            yield "begin", tensor.name
            yield "contents", tuple(begun)
            if tensor.has_grad:
                yield "grad", tuple(begun)

    def follow(self, state):
        """The steps by which state follows: of those that have changed, in the order in which that was noted."""
        changed = [name for name in state.noted if state.held[self.index[name]] != OLD]
        return tuple(("follow", name) for name in changed if self.tensors[self.index[name]].has_state)

    def raised(self, state, error):
        """The state after an error inside of the block, or in its end."""
        if error == "enter":
            return state._replace(todo=(("end", ""),), error="error")
        back = tuple(reversed(state.journal)) if self.is_full else self.follow(state)
        return state._replace(todo=(*back, ("last renew", ""), ("end", "")), error=error, journal=())

    def label(self, state):
        """What is seen of the next step from outside, and whether it can fail; ``None`` if nothing is."""
        kind, about = state.todo[0]
        kind = kind.removeprefix("last ")
        if kind not in LABELLED:
            return None
        return kind, about[-1] if isinstance(about, tuple) else about

    def fails(self, state):
        """The next step fails."""
        kind, about = state.todo[0]
        if kind == "enter":
            return self.raised(state, "enter")
        if kind == "last renew":
            return state._replace(todo=(("end", ""),), error="error")
        if kind == "follow" and state.error:
            return state._replace(todo=(("last renew", ""), ("end", "")), error="error")
        if kind in ("contents", "grad"):
            undo = tuple(("undo", name) for name in reversed(about))
            return state._replace(todo=(*undo, ("forget", about), ("raise", "")))
        return self.raised(state, "error")

    def goes_on(self, state):
        """The next step is taken."""
        (kind, about), state = state.todo[0], state._replace(todo=state.todo[1:])
        name = about[-1] if isinstance(about, tuple) else about
        at = self.index.get(name, -1)
        if kind == "safe" and state.waiting:
            return self.raised(state._replace(waiting=False), "interrupt")
        if kind == "reset" and not self.tensors[at].has_grad:
            return state.put("held", at, NEW)._replace(noted=(*state.noted, name))
        if kind == "begin":
            journal = (*state.journal, ("undo", name)) if self.is_full else ()
            return state._replace(journal=journal, noted=(*state.noted, name))
        if kind == "contents":
            return state.put("held", at, HALF if self.tensors[at].has_grad else NEW)
        if kind == "grad":
            return state.put("held", at, NEW)
        if kind == "undo":
            return state.put("held", at, OLD)
        if kind == "restore":
            return state.put("state", at, OLD)
        if kind == "forget":
            return state._replace(noted=tuple(one for one in state.noted if one not in about))
        if kind == "raise":
            return self.raised(state, "error")
        if kind == "exit":
            return state._replace(todo=(*self.follow(state), ("renew", ""), ("end", "")))
        if kind == "follow":
            journal = (*state.journal, ("restore", name)) if self.is_full and not state.error else state.journal
            return state.put("state", at, NEW)._replace(journal=journal)
        if kind == "end":
            error = "interrupt" if state.waiting else state.error
            return state._replace(error=error, waiting=False, is_locked=False, journal=())
        return state

    def next(self, state):
        """Every state that may follow, each with its label and what came: nothing, a signal, or a failure."""
        label = self.label(state)
        if label is None:
            return [(None, "", self.goes_on(state))]
        made = [(label, "", self.goes_on(state)), (label, "signal", self.goes_on(state._replace(waiting=True)))]
        return [*made, (label, "fails", self.fails(state))] if label[0] in FAILING else made

    def traces(self, events):
        """Yield each way with so many events at most: what came at which label, and the state at the end."""
        ways = [((), events, self.start())]
        while ways:
            trace, left, state = ways.pop()
            if not state.todo:
                yield trace, state
                continue
            for label, event, after in self.next(state):
                if left or not event:
                    ways.append(((*trace, (label, event)) if label else trace, left - bool(event), after))

    def ends(self):
        """Every state at the end, however many events come, each with whether state could fail to follow."""
        seen, new = set(), {(self.start(), False)}
        while new:
            seen |= new
            after = {
                (then, failed or (event == "fails" and label[0] == "follow"))
                for state, failed in new
                if state.todo
                for label, event, then in self.next(state)
            }
            new = after - seen
        return [(state, failed) for state, failed in seen if not state.todo]
