"""Random sequences of operations on a model, which never break its ties, objects or optimizer.

A model with ties of every kind and an optimizer goes through conversions, quantization, files, copies and steps, each
by one of several functions.  After each operation the Parameters are the same objects, tied as before, with the
expected values, and the optimizer holds them and their state.  An error leaves everything as it was.
"""

import contextlib
import copy
import io
import tempfile
from collections import Counter
from pathlib import Path

import safetensors.torch
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

import torchtether as tt

ROWS, COLUMNS = 16, 64
KINDS = ("none", "object", "far object", "storage", "transposed", "rows", "buffer", "turned buffer", "row buffer")
SCHEMES = (tt.int8(), tt.int4(32), tt.fp8(), tt.nf4(), tt.nf4(double_quant=True), tt.mxfp4(), tt.nvfp4(), tt.Plain())
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}
HAPPENED: Counter = Counter()
"""How often each operation went well, and how often it was refused: for who runs this at length."""


def build(layers, seed):
    """``layers``: for each, how its memory is shared, whether it is trained, and how deep it lies in the tree."""
    torch.manual_seed(seed)
    model, before = nn.Module(), None
    for i, (kind, is_trained, depth) in enumerate(layers):
        home = model
        for level in range(depth):
            name = f"deep{level}"
            if not hasattr(home, name):
                home.add_module(name, nn.Module())
            home = getattr(home, name)
        layer = nn.Linear(COLUMNS, ROWS, bias=bool(i % 2)).requires_grad_(is_trained)
        home.add_module(f"layer{i}", layer)
        own = layer.weight
        if kind == "object":
            layer.alias = own
        elif kind == "far object" and before is not None:
            layer.weight = before
        elif kind in ("storage", "transposed", "rows"):
            data = {"storage": own.data, "transposed": own.data.t(), "rows": own.data[4:8]}[kind]
            layer.alias = nn.Parameter(data, requires_grad=is_trained)
        elif kind.endswith("buffer"):
            shared = own.detach()
            shared = shared.t() if kind == "turned buffer" else shared[3] if kind == "row buffer" else shared
            layer.register_buffer("alias", shared)
        before = layer.weight
    model.register_buffer("steps", torch.tensor(3))
    return model


def named(model):
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def ones(module):
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(1)


def plain(tensor):
    return tensor.detach().dequantize().clone() if isinstance(tensor, tt.Weight) else tensor.detach().clone()


def same(one, two):
    return one.dtype == two.dtype and torch.equal(one.nan_to_num(), two.nan_to_num())


def flat(state):
    return {
        (number, key): plain(value)
        for number, values in enumerate(state.values())
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }


class Shot:
    """What there is now."""

    def __init__(self, model, optimizer):
        tensors = named(model)
        self.ids = {name: id(tensor) for name, tensor in tensors.items()}
        self.values = {name: plain(tensor) for name, tensor in tensors.items()}
        self.weights = {name: t.detach().clone() for name, t in tensors.items() if isinstance(t, tt.Weight)}
        self.ties = [tie.names for tie in tt.find_ties(model)]
        self.trained = {name: tensor.requires_grad for name, tensor in tensors.items()}
        self.kinds = {n: t.scheme if isinstance(t, tt.Weight) else None for n, t in tensors.items()}
        self.notes = {name: getattr(tensor, "note", None) for name, tensor in model.named_parameters()}
        self.state = flat(optimizer.state)
        self.held = [id(p) for group in optimizer.param_groups for p in group["params"]]


class Lives(RuleBasedStateMachine):
    @initialize(
        layers=st.lists(st.tuples(st.sampled_from(KINDS), st.booleans(), st.integers(0, 2)), min_size=1, max_size=5),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        seed=st.integers(0, 10_000),
    )
    def begin(self, layers, optimizer, seed):
        self.folder = tempfile.TemporaryDirectory()
        self.model = build(layers, seed)
        for name, parameter in self.model.named_parameters():
            parameter.note = name
        trained = [p for p in self.model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
        self.optimizer = OPTIMIZERS[optimizer](trained)
        self.is_belonging = any(p.requires_grad for p in self.model.parameters())
        self.files, self.number = 0, seed
        self.first = Shot(self.model, self.optimizer)

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @property
    def follows(self):
        return self.optimizer if self.is_belonging else None

    def path(self):
        self.files += 1
        return Path(self.folder.name, str(self.files))

    @contextlib.contextmanager
    def kept(self, what, *, values=True, copies=False, kinds=False):
        """The identities, ties and state of before; the values, too, unless the operation is there to change them."""
        before = Shot(self.model, self.optimizer)
        try:
            yield before
        except tt.TetherError as error:
            HAPPENED[f"{what} refused: {type(error).__name__} {str(error).partition(': ')[2][:60]}"] += 1
            after, values, copies, kinds = Shot(self.model, self.optimizer), True, False, False
            assert "\n" not in str(error), what
        else:
            HAPPENED[what] += 1
            after = Shot(self.model, self.optimizer)
        assert after.ids.keys() == before.ids.keys(), what
        if not copies:
            assert after.ids == before.ids, what
            assert after.held == before.held, what
        assert after.ties == before.ties, (what, after.ties, before.ties)
        assert after.trained == before.trained, what
        assert after.notes == before.notes, what
        assert kinds or after.kinds == before.kinds, what
        assert after.state.keys() == before.state.keys(), what
        for key, value in before.state.items():
            assert torch.equal(after.state[key], value.to(after.state[key].dtype)), (what, key)
        if values:
            for name, value in before.values.items():
                assert same(after.values[name], value), (what, name)
        self.after = after

    @invariant()
    def aliases_agree(self):
        if hasattr(self, "model"):
            tensors = named(self.model)
            for tie in tt.find_ties(self.model):
                owner = plain(tensors[tie.owner])
                for name, view in zip(tie.names, tie.views, strict=True):
                    seen = owner if view is None else owner.as_strided(view.size, view.stride, view.offset)
                    assert same(plain(tensors[name]), seen), (name, tie)
            if self.is_belonging:
                tt.check_optimizer(self.model, self.optimizer)

    # -- conversions ------------------------------------------------------------------------------------------------

    @rule(dtype=st.sampled_from(DTYPES), how=st.sampled_from(("verb", "stock", "full")))
    def convert(self, dtype, how):
        with self.kept(f"convert {how}", values=False) as before:
            if how == "stock":
                with tt.swapping(self.model, optimizer=self.follows):
                    self.model.to(dtype)
            else:
                how = "full" if how == "full" else "checked"
                tt.convert(self.model, dtype=dtype, optimizer=self.follows, atomic=how)
            for name, tensor in named(self.model).items():
                held = before.weights.get(name)
                wanted = before.values[name] if held is None else held
                expected = plain(wanted.to(dtype) if wanted.is_floating_point() else wanted)
                assert same(plain(tensor), expected), name

    @rule(scheme=st.sampled_from(SCHEMES), which=st.sampled_from(("*.weight", "*", "*[02].weight", "*.alias")))
    def quantize(self, scheme, which):
        if not any(name.endswith("weight") for name in named(self.model)):
            return
        with self.kept("quantize", values=False, kinds=True) as before:
            rules = {"*bias": None, which: scheme} if which == "*" else {which: scheme}
            tt.quantize(self.model, rules, optimizer=self.follows)
            for name, tensor in named(self.model).items():
                if isinstance(tensor, tt.Weight) and before.kinds[name] != tensor.scheme:
                    self.within_bound(name, tensor, before.values[name])
                else:
                    assert same(plain(tensor), before.values[name]), name

    @rule()
    def dequantize(self):
        with self.kept("dequantize", kinds=True):
            tt.dequantize(self.model, optimizer=self.follows)
            assert not any(isinstance(tensor, tt.Weight) for tensor in named(self.model).values())

    def within_bound(self, name, tensor, values):
        spec = tensor.spec
        if spec.scheme.transparent:
            return
        exact = tensor.detach().to(torch.float32).dequantize().double()
        bound = spec.scheme.bound(tensor.parts, spec.base).expand(spec.base).permute(spec.order).double()
        assert ((exact - values.double()).abs() <= bound * 1.001 + 1e-12).all(), name

    # -- files ------------------------------------------------------------------------------------------------------

    @rule(
        aliases=st.sampled_from(("drop", "copy")),
        size=st.sampled_from((None, 3000)),
        how=st.sampled_from(("into", "emptied", "zeroed")),
    )
    def save_and_load(self, aliases, size, how):
        path = self.path()
        with self.kept(f"save and load {how}"):
            tt.save(self.model, path, aliases=aliases, max_shard_size=size)
            self.lose(how)
            tt.load(self.model, path, device="cpu", optimizer=self.follows)

    @rule(how=st.sampled_from(("into", "emptied", "zeroed")))
    def load_what_others_wrote(self, how):
        """Floats, each memory once under one name, as transformers writes them."""
        path = self.path()
        path.mkdir()
        with self.kept(f"load others {how}", values=False) as before:
            ties = tt.find_ties(self.model)
            left_out = {name for tie in ties for name in tie.names if name != tie.owner}
            stored = {name: v.contiguous() for name, v in before.values.items() if name not in left_out}
            safetensors.torch.save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
            self.lose(how)
            tt.load(self.model, path, device="cpu", optimizer=self.follows)
            for name, tensor in named(self.model).items():
                if name not in before.weights:
                    assert same(plain(tensor), before.values[name]), name
                else:
                    self.within_bound(name, tensor, before.values[name])

    def lose(self, how):
        if how == "zeroed":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.zero_()
        if how == "emptied":
            with tt.swapping(self.model):
                self.model.to_empty(device="meta")

    @rule(assign=st.booleans(), is_full=st.booleans())
    def load_state_dict(self, assign, is_full):
        with self.kept(f"load_state_dict assign={assign} full={is_full}"):
            given = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
            if not is_full:
                for tie in tt.find_ties(self.model):
                    for name in tie.names[1:]:
                        given.pop(name, None)
            with tt.swapping(self.model, optimizer=self.follows):
                self.model.load_state_dict(given, assign=assign)

    @rule()
    def materialize(self):
        """Memory that nobody has written, then the values again."""
        with self.kept("materialize"):
            given = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
            with tt.swapping(self.model):
                self.model.to_empty(device="meta")
            tt.materialize(self.model, init=ones)
            with tt.swapping(self.model):
                self.model.load_state_dict(given)

    # -- copies -----------------------------------------------------------------------------------------------------

    @rule(how=st.sampled_from(("deepcopy", "torch.save")))
    def copied(self, how):
        if how == "deepcopy" and not all(all(tie.objects) for tie in tt.find_ties(self.model)):
            return  # torch copies each Parameter by itself
        with self.kept(how, copies=True):
            if how == "deepcopy":
                made = copy.deepcopy((self.model, self.optimizer))
            else:
                torch.save((self.model, self.optimizer), room := io.BytesIO())
                room.seek(0)
                made = torch.load(room, weights_only=False)
            self.model, self.optimizer = made
            for name, parameter in self.model.named_parameters():
                parameter.note = name  # which torch's deepcopy forgets

    # -- training ---------------------------------------------------------------------------------------------------

    @rule()
    def step(self):
        before = Shot(self.model, self.optimizer)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                self.number += 1
                generator = torch.Generator().manual_seed(self.number)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad()
        HAPPENED["step"] += 1
        after = Shot(self.model, self.optimizer)
        assert (after.ids, after.ties, after.trained, after.kinds) == (
            before.ids,
            before.ties,
            before.trained,
            before.kinds,
        )
        if self.is_belonging:
            assert after.state
        for name, value in after.values.items():
            assert value.isfinite().all(), name
            if not before.trained[name] and not any(name in tie for tie in after.ties):
                assert same(value, before.values[name]), name


Lives.TestCase.settings = settings(max_examples=10, stateful_step_count=8)
TestLives = Lives.TestCase
