"""Convert a model that an optimizer holds: what breaks with each of PyTorch's three modes, and what ours keeps.

You will see what happens to the optimizer, hooks, ties and gradients in `.to()` in each of torch's modes, and which of
them breaks your training silently. Needs: torch. Takes: seconds.
"""

# %% A model in the middle of training: a tied head, a slice of a matrix, a hook, gradients, momentum.
import contextlib
import textwrap

import torch
from torch import nn

import torchtether as tt

torch.manual_seed(0)
tokens = torch.randint(0, 50, (8, 6))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.mid = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.emb.weight  # one object under two names
        self.first = nn.Parameter(self.mid.weight.data[:4])  # another Parameter over a part of the memory

    def forward(self, tokens):
        return self.head(self.mid(self.emb(tokens)))


class Training:
    """A model that has taken a step, its optimizer, and a hook that counts the gradients it sees."""

    def __init__(self, make=torch.optim.SGD, **options):
        self.model, self.calls = Model(), 0
        self.model.mid.weight.register_post_accumulate_grad_hook(self.count)
        self.optimizer = make(self.model.parameters(), lr=0.1, **options)
        self.step()
        self.ties = tt.find_ties(self.model)
        self.before = tt.storage_map(self.model)

    def count(self, parameter):
        self.calls += 1

    def step(self):
        self.optimizer.zero_grad()
        self.model(tokens).float().logsumexp(-1).mean().backward()
        self.optimizer.step()

    def moves(self):
        """Return whether a step of the optimizer changes the model."""
        before = self.model.emb.weight.detach().clone()
        self.step()
        return not torch.equal(before, self.model.emb.weight)

    def sees_gradients(self):
        """Return whether the hook still fires."""
        before = self.calls
        self.step()
        return self.calls > before

    def holds_the_model(self):
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {id(p) for p in self.model.parameters()} <= held

    def keeps_ties(self):
        try:
            tt.check_ties(self.model, self.ties)
        except tt.TieError:
            return False
        return True


@contextlib.contextmanager
def mode(setter):
    setter(True)
    try:
        yield
    finally:
        setter(False)


# %% What goes wrong without us, silently (1): the default. The momentum stays in the old dtype, the slice is a copy.
one = Training(momentum=0.9)
one.model.to(torch.bfloat16)
assert one.holds_the_model()
assert one.moves()
momentum = one.optimizer.state[one.model.emb.weight]["momentum_buffer"]
assert momentum.dtype == torch.float32  # twice the memory of the 16-bit parameters
assert not one.keeps_ties()  # `first` and `mid.weight` are trained separately from now on
print(tt.storage_map(one.model).diff(one.before))

# %% Adam fails in the middle of a step: some parameters have changed, others have not.
adam = Training(torch.optim.AdamW)
adam.model.to(torch.bfloat16)
try:
    adam.step()
except RuntimeError as error:
    print(textwrap.fill(str(error), 120))
else:
    raise AssertionError("AdamW took a step with state of another dtype")

# %% What goes wrong without us, silently (2): overwrite. The optimizer trains tensors that the model no longer uses.
with mode(torch.__future__.set_overwrite_module_params_on_conversion):
    two = Training(momentum=0.9)
    two.model.to(torch.bfloat16)
assert not two.holds_the_model()
assert not two.moves()  # step() runs, and nothing learns
changes = dict(tt.storage_map(two.model).diff(two.before).changes)
print("emb.weight:", changes["emb.weight"])
assert "another object" in changes["emb.weight"]

# %% tt.check_optimizer finds that in one line. A load with `assign=True` has the same effect, and is found too.
try:
    tt.check_optimizer(two.model, two.optimizer)
except tt.OptimizerError as error:
    print(textwrap.fill(str(error), 120))
else:
    raise AssertionError("an orphaned optimizer was not noticed")

# %% What goes wrong without us, silently (3): swap. The optimizer is right, but hooks are dead, even new ones.
with mode(torch.__future__.set_swap_module_params_on_conversion):
    three = Training(momentum=0.9)
    three.model.to(torch.bfloat16)
assert three.holds_the_model()
assert three.moves()
assert not three.sees_gradients()  # no error: the hook is gone
late = []
three.model.mid.weight.register_post_accumulate_grad_hook(late.append)
three.step()
assert not late  # a hook that is registered afterwards never fires
assert not three.keeps_ties()  # `first` is a copy here too

# %% The same with us: objects, hooks and ties are kept; the state follows. We use `swap_tensors`, and repair the rest.
four = Training(momentum=0.9)
tt.convert(four.model, dtype=torch.bfloat16, optimizer=four.optimizer)
assert four.holds_the_model()
assert four.keeps_ties()
assert four.model.first.data_ptr() == four.model.mid.weight.data_ptr()
assert four.moves()
assert four.sees_gradients()
assert four.optimizer.state[four.model.emb.weight]["momentum_buffer"].dtype == torch.bfloat16
tt.check_optimizer(four.model, four.optimizer)
print(tt.storage_map(four.model).diff(four.before))

# %% Adam too.
five = Training(torch.optim.AdamW)
tt.convert(five.model, dtype=torch.bfloat16, optimizer=five.optimizer)
assert five.moves()

# %% Where the call is not yours to change, put a scope around it.
six = Training(momentum=0.9)
with tt.swapping(six.model, optimizer=six.optimizer):
    six.model.to(torch.bfloat16)  # stock
assert six.holds_the_model()
assert six.keeps_ties()
assert six.sees_gradients()

# %% A parameter that cannot be exchanged is refused before anything changes, and the error names its holder.
seven = Training(momentum=0.9)
loss = seven.model(tokens).sum()  # a graph that is alive holds the parameters
try:
    tt.convert(seven.model, dtype=torch.bfloat16, optimizer=seven.optimizer)
except tt.ConversionError as error:
    print(textwrap.fill(str(error), 120))
else:
    raise AssertionError("a model was converted between forward and backward")
assert {p.dtype for p in seven.model.parameters()} == {torch.float32}
loss.backward()  # still right

# %% Now break it: leave `optimizer=` out of the call for `five`, run again, and read what AdamW says.
