"""Ctrl-C at any moment: with ``atomic="full"`` a model is all old or all new, and nothing stays locked or switched."""

import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules import module as registration

import torchtether as tt
from tests.conversion.models import KINDS, kept, rig, snapshot
from tests.interrupts import count_steps, interrupted, nothing_held
from torchtether.conversion import building
from torchtether.exchange.exchange import Exchange
from torchtether.ties.components import find_components
from torchtether.ties.records import find_ties
from torchtether.ties.spans import member_view, span_tensor

# an interrupt may come while a generator is closed, where Python reports it and goes on
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FINELY = ("exchange.py", "_interruptions.py", "quantizing.py", "converting.py")
SAMPLES, MANY = 30, 100
HOOKS = [f"_global_{kind}_registration_hooks" for kind in ("parameter", "buffer", "module")]


def to_double(made, atomic):
    tt.convert(made.model, dtype=torch.float64, optimizer=made.optimizer, atomic=atomic)


def to_weights(made, atomic):
    tt.quantize(made.model, {"*weight": tt.Plain()}, optimizer=made.optimizer, atomic=atomic)


def to_plain(made, atomic):
    tt.dequantize(made.model, optimizer=made.optimizer, atomic=atomic)


def quantized():
    return tt.quantize(KINDS["tied_3"](), {"*weight": tt.Plain()})


CASES = {
    **{name: (KINDS[name], to_double) for name in ("plain", "tied_3", "view_transposed", "old_weight_norm", "lstm")},
    **{f"{name} quantized": (KINDS[name], to_weights) for name in ("plain", "view_transposed")},
    "dequantized": (quantized, to_plain),
}
cases = pytest.mark.parametrize(("kind", "verb"), CASES.values(), ids=CASES)


def everything(made):
    """Return everything that must be all old or all new, without ids, which differ between two models."""
    shot, modules = snapshot(made.model, made.optimizer), list(made.model.modules())
    tensors = {
        name: [one["grad"] and one["grad"][1], *(one[key] for key in ("type", "dtype", "requires_grad", "values"))]
        for name, one in shot.items()
        if isinstance(one, dict)
    }
    state = [
        {key: value[1] if isinstance(value, tuple) else value for key, value in shot[name][1].items()}
        for name in shot
        if name.startswith("state ")
    ]
    hooks = [len(module._load_state_dict_pre_hooks) for module in modules]
    computed = [
        {name: value.dtype for name, value in vars(module).items() if torch.is_tensor(value)} for module in modules
    ]
    refs = [len(getattr(module, "_flat_weight_refs", ())) for module in modules]
    return tensors, state, hooks, computed, refs


def names_of(ties):
    return [(tie.names, tie.objects) for tie in ties]


def sweep(kind, verb, atomic, check, samples):
    """Interrupt ``verb`` at many moments, and call ``check`` on the model after each; return its answers."""
    verb(rig(kind), atomic)  # what is done once per process is done
    new, made, found = rig(kind), rig(kind), set()
    steps = count_steps(lambda: verb(new, atomic), FINELY)
    before, after = everything(made), everything(new)
    assert before != after
    for at in range(0, steps, max(steps // samples, 1)):
        same, ties = kept(made.model), names_of(find_ties(made.model))
        with nothing_held():
            interrupted(partial(verb, made, atomic), at, FINELY)
        assert names_of(find_ties(made.model)) == ties
        if verb is to_double:
            assert kept(made.model) == same
        is_done = check(made, before, after)
        found.add(is_done)
        if is_done:
            made.step()
        if everything(made) != before:
            made = rig(kind)
    return found


def is_new(made, before, after):
    now = everything(made)
    assert now in (before, after)
    return now == after


def is_consistent(made, before, after):
    """Assert that tensors over one memory are all old or all new, with the optimizer state and hooks of each."""
    now = everything(made)
    tensors, names = now[0], [name for name, _ in made.model.named_parameters()]
    changed = [name for name in tensors if before[0][name] != after[0][name]]
    for name in changed:
        assert tensors[name] in (before[0][name], after[0][name])
    news = {name for name in changed if tensors[name] == after[0][name]}
    for tie in find_ties(made.model):
        assert len(news & {*tie.names}) in (0, len({*changed} & {*tie.names}))
    for name, state, old, new in zip(names, now[1], before[1], after[1], strict=True):
        assert state == (new if name in news else old)
    paths = [path for path, _ in made.model.named_modules()]
    for path, hooks, old, new in zip(paths, now[2], before[2], after[2], strict=True):
        own = {name for name in changed if name.rpartition(".")[0] == path}
        assert hooks == (new if news & own else old)
    return now == after


@cases
def test_checked_is_consistent(kind, verb):
    assert sweep(kind, verb, "checked", is_consistent, SAMPLES) == {False, True}


@pytest.mark.slow
@cases
@pytest.mark.parametrize("atomic", ["full", "checked"])
def test_many_moments(kind, verb, atomic):
    sweep(kind, verb, atomic, is_new if atomic == "full" else is_consistent, MANY)


@pytest.mark.parametrize("kind", ["plain", "view_transposed", "tied_3"])
def test_an_interrupt_before_the_first_change_leaves_gradients_on(kind):
    """An interrupt can leave torch's own ``no_grad`` half way, so it is not used where signals are not delayed."""
    model = rig(KINDS[kind]).model
    for component in find_components(model):

        def look(component=component):
            for member in component.members:
                member_view(span_tensor(component), member)

        for at in range(count_steps(look)):
            interrupted(look, at)
            assert torch.is_grad_enabled(), at


def test_an_interrupt_between_two_tensors_is_not_put_off(monkeypatch):
    """A long conversion ends at the next tensor."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    done = []

    def half(tensor):
        done.append(tensor)
        if len(done) == 3:
            signal.raise_signal(signal.SIGINT)
        return tensor.double()

    with nothing_held(), pytest.raises(KeyboardInterrupt), Exchange(model) as exchange:  # noqa: PT012
        exchange.check(model.parameters())
        exchange.put_each(model.parameters(), map(half, model.parameters()))
    assert len(done) == 3
    assert [p.dtype == torch.float64 for p in model.parameters()] == [True] * 3 + [False] * 5


def test_what_takes_long_and_changes_nothing_is_left_at_once():
    model, after = nn.Linear(2, 2), []

    def reading():
        with torch.no_grad():
            signal.raise_signal(signal.SIGINT)
        after.append(True)

    with nothing_held(), pytest.raises(KeyboardInterrupt), Exchange(model) as exchange:
        exchange.during(reading)
    assert not after


def test_handlers_of_other_signals_wait_too_and_none_is_lost():
    model, seen = nn.Linear(2, 2), []

    class TimeOutError(Exception):
        pass

    def handler(number, frame):
        seen.append((number, model.weight.dtype, frame is not None))
        if number == signal.SIGALRM:
            raise TimeOutError

    numbers = (signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM)
    old = [signal.signal(number, handler) for number in numbers]
    try:
        with pytest.raises(TimeOutError), Exchange(model) as exchange:  # noqa: PT012
            exchange.put(model.weight, model.weight.detach().double())
            for number in numbers:
                signal.raise_signal(number)
            assert not seen
        assert sorted(seen) == sorted((number, torch.float64, True) for number in numbers)
        assert all(signal.getsignal(number) is handler for number in numbers)
    finally:
        for number, one in zip(numbers, old, strict=True):
            signal.signal(number, one)


def test_who_waits_for_another_converter_can_be_interrupted():
    model, has_it, done = nn.Linear(2, 2), threading.Event(), threading.Event()

    def other():
        with Exchange(nn.Linear(2, 2)):
            has_it.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    has_it.wait(60)
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            tt.convert(model, dtype=torch.float64)
    finally:
        done.set()
        thread.join()
        timer.join()
    assert model.weight.dtype == torch.float32
    with nothing_held():
        tt.convert(model, dtype=torch.float64)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("is_mine", [False, True], ids=["another thread converts", "this thread converts"])
@pytest.mark.parametrize("scope", [Exchange, tt.swapping], ids=["verb", "swapping"])
def test_a_forked_process_can_convert(is_mine, scope):
    has_it, done = threading.Event(), threading.Event()

    def child():
        code = 1
        try:
            model = nn.Linear(2, 2)
            if not is_mine:
                assert not torch.__future__.get_swap_module_params_on_conversion()
                assert nn.Module._apply is stock
            with tt.swapping(model):
                model.double()
            code = 0 if tt.convert(model, dtype=torch.float16).weight.dtype == torch.float16 else 2
        finally:
            os._exit(code)

    def other():
        with scope(nn.Linear(2, 2)):
            has_it.set()
            done.wait(60)

    thread, stock = threading.Thread(target=other), nn.Module._apply
    if is_mine:
        with scope(nn.Linear(2, 2)):
            pid = os.fork()
            if not pid:
                child()
    else:
        thread.start()
        has_it.wait(60)
        pid = os.fork()
        if not pid:
            child()
    try:
        for _ in range(600):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert ended
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        done.set()
        if not is_mine:
            thread.join()


@pytest.mark.parametrize("scope", [tt.swapping, tt.on_meta])
def test_a_handler_that_is_set_inside_stays(scope):
    came, before = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: came.append("theirs"))
    try:
        with scope(), scope():
            signal.signal(signal.SIGTERM, lambda number, frame: came.append("mine"))
        signal.raise_signal(signal.SIGTERM)
        with scope():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == ["mine", "mine"]


def test_a_signal_that_waits_while_a_block_on_meta_begins_comes_before_its_body(monkeypatch):
    def recording():
        signal.raise_signal(signal.SIGINT)
        return stock()

    stock, ran = building.recording, []
    monkeypatch.setattr(building, "recording", recording)
    with pytest.raises(KeyboardInterrupt), tt.on_meta():
        ran.append(torch.get_default_device())
    assert not ran
    assert torch.get_default_device().type == "cpu"


def test_a_block_on_meta_leaves_nothing_switched():
    """Neither the default device, nor hooks of modules, nor the generator's label, wherever it begins or ends."""

    def block():
        with tt.on_meta():
            pass

    def build():
        with tt.on_meta():
            return nn.Linear(2, 3)

    def switched():
        return torch.get_default_device(), torch.initial_seed(), [len(getattr(registration, name)) for name in HOOKS]

    block()  # the first one registers hooks that stay
    before, finely, came = switched(), ("building.py", "generators.py", "recording.py"), 0
    for at in range(count_steps(block, finely)):
        with nothing_held():
            came += interrupted(block, at, finely)
        assert switched() == before
    assert came > MANY
    one, other = tt.materialize(build()), tt.materialize(build())
    assert not torch.equal(one.weight, other.weight)


@pytest.mark.slow
@pytest.mark.parametrize("verb", [to_double, to_weights])
def test_real_signals(verb):
    """At random moments."""
    kind, came = KINDS["view_transposed"], 0
    new, made = rig(kind), rig(kind)
    began = time.perf_counter()
    verb(new, "full")
    span = time.perf_counter() - began
    before, after = everything(made), everything(new)
    theirs = signal.signal(signal.SIGALRM, signal.default_int_handler)
    for number in range(400):
        with nothing_held():
            try:
                signal.setitimer(signal.ITIMER_REAL, max(span * 1.1 * number / 400, 1e-6))
                verb(made, "full")
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                came += 1
        now = everything(made)
        assert now in (before, after)
        if now == after:
            made = rig(kind)
    signal.signal(signal.SIGALRM, theirs)
    assert came > 10
