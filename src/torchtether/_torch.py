"""Every private torch call of the house, each with the reason why no public one does the job.

A leaf: the other rooms import from here.  ``check_torch`` names what an unknown torch lacks, before any change.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, overrides
from torch.nn.utils import parametrize

from .errors import ConversionError

_NEEDED: tuple[tuple[Any, str], ...] = (
    (torch._C, "_swap_tensor_impl"),
    (Tensor, "_use_count"),
    (Tensor, "_cdata"),
    (Tensor, "_make_subclass"),
    (Tensor, "_backward_hooks"),
    (Tensor, "_post_accumulate_grad_hooks"),
)


TESTED = ("2.13.0", "2.15.0")
"""The oldest and the newest torch with which all tests pass; README lists them."""


def warn_if_untested() -> None:
    """Warn once, in one line, of a torch that is newer than all that the tests have run with."""
    if _minor(torch.__version__) > _minor(TESTED[-1]):
        warnings.warn(
            f"torchtether was tested with torch {TESTED[0]} to {TESTED[-1]}, this is torch {torch.__version__}",
            stacklevel=2,
        )


def _minor(version: str) -> list[int]:
    """Return the first two numbers of ``version``: a release within them changes no behaviour."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def check_torch() -> None:
    """Raises ConversionError if this torch lacks a call that exchanging tensors needs."""
    missing = [f"{owner.__name__}.{name}" for owner, name in _NEEDED if not hasattr(owner, name)]
    if missing:
        raise ConversionError(
            f"torch {torch.__version__} has no {', '.join(missing)}, without which tensors cannot be exchanged",
            fix="Use the torch that this torchtether was released for.",
        )


def one_core() -> None:
    """The ops that this thread calls use one core from now on, where torch computes with OpenMP; other threads' do not.

    ``torch.set_num_threads`` is process-wide. OpenMP keeps a number for each thread, which torch sets at first use.
    """
    torch.get_num_threads()
    if _set_openmp_threads is not None:
        _set_openmp_threads(1)


def _find_openmp() -> Any:
    try:
        found = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_int,), None
    return found


_set_openmp_threads = _find_openmp()


def is_direct() -> bool:
    """Whether ops that are called now run at once and unseen: nobody traces, records or transforms them.

    What works on the memory of tensors without torch must not run otherwise.  There are public ways to ask each
    tracer, but none that knows them all.
    """
    if torch.compiler.is_compiling() or is_tracing():
        return False
    return _modes() == 0 and _transforms() is None


_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_transforms: Callable[[], Any] = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)


as_plain = torch._C.DisableTorchFunctionSubclass
"""Inside, tensor subclasses answer as ``Tensor`` does: their attributes are read without running their code."""


# -- one tensor object and the implementation behind it ----------------------------------------------------------------


def swap_impl(one: Tensor, two: Tensor) -> None:
    """The two objects have each other's contents: storage, dtype, device, layout, autograd state; nothing of Python's.

    ``torch.utils.swap_tensors`` swaps class and attributes first and this last, although only this can refuse, so a
    refusal leaves a torn object; it also poisons a graph that may still be needed.  Refuses C++ weak references only.
    """
    torch._C._swap_tensor_impl(one, two)  # type: ignore[attr-defined]


def impl_id(tensor: Tensor) -> int:
    """Which implementation the object has now; there is no public way to tell one from another."""
    with as_plain():
        return tensor._cdata  # type: ignore[no-any-return]


def find_cpp_weakly_held(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those to which C++ (CUDA graphs, an autocast cache) holds a weak reference, with which no exchange is possible.

    Nothing tells but the exchange itself, so each is exchanged with itself.
    """
    found, swap = [], torch._C._swap_tensor_impl  # type: ignore[attr-defined]
    for tensor in tensors:
        try:
            swap(tensor, tensor)
        except RuntimeError:
            found.append(tensor)
    return found


def reset(held: Tensor, new: Tensor) -> bool:
    """The leaf ``held`` has the contents of ``new``, if ``held.data = new`` does all that an exchange would do.

    So it is for nearly all parameters; for all others nothing happens, and the answer is no.  It keeps the
    implementation with its hooks, as stock conversions do.  A grad would have to follow, a view would stay a view of
    what it was cut from, and a buffer would share its version with what it was detached from.  Torch refuses, before
    it does anything, another kind of memory and whole numbers that would require grad.  Compressed sparse layouts are
    left out: torch would take the new dtype and keep the old values.
    """
    if type(held) is not nn.Parameter or type(new) is not Tensor or held.size() != new.size():
        return False
    if held.grad is not None or held._base is not None or held.layout is not torch.strided:
        return False
    try:
        held.data = new
    except RuntimeError:
        return False
    return True


def use_counts(tensors: Iterable[Tensor]) -> list[int]:
    """``use_count`` of each."""
    with as_plain():
        return [tensor._use_count() for tensor in tensors]  # type: ignore[attr-defined]


def use_count(tensor: Tensor) -> int:
    """How many own the implementation: 1 for the object itself, more for views, graphs and C++."""
    with as_plain():
        return tensor._use_count()  # type: ignore[no-any-return, attr-defined]


def has_gradient_edge(tensor: Tensor) -> bool:
    """Whether an AccumulateGrad node exists for this leaf, that is: some graph, spent or not, leads to it."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return False
    before = use_count(tensor)
    edge = torch.autograd.graph.get_gradient_edge(tensor)  # makes the node if there is none
    existed = use_count(tensor) == before
    del edge
    return existed


def as_class(kind: type[Tensor], data: Tensor, requires_grad: bool) -> Tensor:
    """A new object of ``kind`` over the memory of ``data``.

    ``nn.Parameter(...)`` cannot make a subclass without calling its constructor, which may ask for anything.
    """
    made: Tensor = Tensor._make_subclass(kind, data, requires_grad)  # type: ignore[attr-defined]
    return made


def hooks_of(tensor: Tensor) -> tuple[Any, Any]:
    """The dictionaries of both kinds of hooks, ``None`` where there was never one."""
    with as_plain():
        return tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def seat_hooks(tensor: Tensor) -> None:
    """Hooks of both kinds that the object holds fire again, also those registered later.

    The dictionaries belong to the object, but the implementation calls them: after an exchange the new one knows
    nothing of them, and only an assignment tells it.
    """
    with as_plain():
        hooks, post = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if hooks is not None:
            tensor._backward_hooks = hooks
        if post is not None:
            tensor._post_accumulate_grad_hooks = post  # type: ignore[attr-defined]


GRAD_SWITCH = torch._C._set_grad_enabled
"""What ``no_grad`` calls on its way out; function modes see it, and an error there would leave gradients off."""


# -- what stock conversions go through ---------------------------------------------------------------------------------

Apply = Callable[..., nn.Module]


def stock_apply() -> Apply | None:
    """``nn.Module._apply`` as torch has it, through which every stock conversion goes; ``None`` if it was replaced."""
    found = nn.Module._apply
    is_torchs = (found.__module__, found.__qualname__) == ("torch.nn.modules.module", "Module._apply")
    return found if is_torchs else None


def replace_apply(function: Apply, expected: Apply) -> None:
    """``nn.Module._apply`` is ``function`` in this process, if it was ``expected``.

    Nothing else is told that a conversion begins, and which module it converts, without a mode that sees every tensor
    function; such a mode, even one that does nothing, doubles the time of a conversion.
    """
    if nn.Module._apply is expected:
        nn.Module._apply = function  # type: ignore[method-assign]


def function_modes() -> list[Any]:
    """The function modes of this thread, the innermost last."""
    return overrides._get_current_function_mode_stack()  # type: ignore[no-any-return]


def set_function_modes(modes: Sequence[Any]) -> None:
    """The function modes of this thread are ``modes``; a mode can be left only when it is the innermost."""
    for _ in overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


# -- graphs ------------------------------------------------------------------------------------------------------------


def is_released(node: Any) -> bool:
    """Whether backward has freed what this node saved, so that no gradient can pass it again.

    Reads the raw saved variables first: the public accessors would run unpack hooks (recompute, read from disk).
    """
    for name in dir(node):
        if not name.startswith("_raw_saved_"):
            continue
        try:
            raw = getattr(node, name)
            saved = raw if isinstance(raw, (tuple, list)) else (raw,)
            if any(one.data is not None or one.unpack_hook is not None for one in saved):
                return False
            if name != "_raw_saved_tensors":
                getattr(node, name.removeprefix("_raw"))  # nothing was saved, or it is freed: only this tells which
        except RuntimeError:
            return True
    return False


def saved_by(node: Any) -> Iterator[Tensor]:
    """The tensors that a node has saved, without running unpack hooks."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                raw = getattr(node, name)
                for one in raw if isinstance(raw, (tuple, list)) else (raw,):
                    if isinstance(one.data, Tensor):
                        yield one.data
            except RuntimeError:
                continue


# -- modules -----------------------------------------------------------------------------------------------------------


def flat_weight_refs(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the weak references that ``nn.RNNBase`` modules keep to their own weights."""
    return {
        id(ref)
        for module in modules
        if isinstance(module, nn.RNNBase)
        for ref in getattr(module, "_flat_weight_refs", ())
    }


def forget_flat_weights(module: nn.RNNBase) -> None:
    """The module has no weak reference to its weights, so that torch's own exchange does not refuse them."""
    module._flat_weight_refs = []


def renew_flat_weights(module: nn.RNNBase) -> None:
    """The module's list of flat weights is that of its parameters, compact in memory where cuDNN wants it."""
    module._init_flat_weights()


def is_parametrization_cached() -> bool:
    """Whether ``parametrize.cached()`` is active and holds computed weights, which a conversion would leave stale."""
    return bool(getattr(parametrize, "_cache_enabled", 0)) and bool(getattr(parametrize, "_cache", None))


def fsdp2_state(module: nn.Module) -> Any:
    """FSDP2's state of a module that ``fully_shard`` was applied to, ``None`` for any other."""
    get = getattr(module, "_get_fsdp_state", None)
    return get() if get is not None else None


def is_forwarded(state: Any) -> bool:
    """Whether FSDP2 has run a forward, after which it holds buffers in the old dtype and on the old device."""
    return getattr(state, "_is_root", None) is not None


def renew_shards(state: Any) -> None:
    """FSDP2 refers to the memory of the parameters that the module has now."""
    for param in _fsdp2_params(state):
        param.reset_sharded_param()


def offloaded_parameters(state: Any) -> list[Tensor]:
    """The sharded parameters that FSDP2 keeps on the CPU, whatever device it computes on."""
    return [param.sharded_param for param in _fsdp2_params(state) if param.offload_to_cpu]


@lru_cache(maxsize=1)
def frees_before_copy() -> bool:
    """Return whether FSDP2 frees the buffer of the previous all-gather before it copies the next one out.

    Torch 2.15 does, torch 2.13 frees it after. No public name tells: the method that frees it is looked for.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
    except ImportError:
        return False
    return hasattr(FSDPCommContext, "release_all_gather_state_for_comm_reuse")


def _fsdp2_params(state: Any) -> Iterator[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        yield from group.fsdp_params if group is not None else ()


def reseat_slots(state: Any) -> None:
    """Every module that shares a sharded parameter has it again, where an assignment gave one of them another."""
    for param in _fsdp2_params(state):
        if param.sharded_state.name == "SHARDED":
            param._setattr_on_modules(param.sharded_param)


def sharded_slots(model: nn.Module) -> dict[int, Any]:
    """FSDP2's record of each sharded parameter of ``model``, by the id of the parameter."""
    found: dict[int, Any] = {}
    for module in model.modules():
        state = fsdp2_state(module)
        if state is not None:
            found.update((id(param.sharded_param), param) for param in _fsdp2_params(state))
    return found


def follow_buffer(model: nn.Module, parameter: Tensor, module: nn.Module, name: str, *, detached: bool) -> None:
    """The buffer ``name`` of ``module`` is the parameter in whichever state FSDP2 has it: sharded, or gathered.

    FSDP2 tells every module that shares a parameter, by setting an attribute; it would not know of a buffer.
    """
    record = sharded_slots(model)[id(parameter)]
    slot = _BufferSlot(module, detached)
    record._module_info.shared_modules.append(slot)
    record._module_info.shared_param_names.append(name)
    setattr(slot, name, parameter)


class _BufferSlot:
    """Stands for a module among those that share a parameter: what is set on it goes to the buffers of the module."""

    _module: nn.Module
    _detached: bool

    def __init__(self, module: nn.Module, detached: bool) -> None:
        self.__dict__.update(_module=module, _detached=detached)

    def __setattr__(self, name: str, tensor: Tensor) -> None:
        self._module._buffers[name] = tensor.detach() if self._detached else tensor


def stale_shards(state: Any) -> list[Any]:
    """FSDP2's records of which the parameter has been replaced, or its memory, since FSDP2 looked last."""
    found = []
    for param in _fsdp2_params(state):
        info = param._module_info
        held = info.module._parameters.get(info.param_name)
        if param.sharded_state.name != "SHARDED":
            continue
        local, flat = getattr(held, "_local_tensor", None), param._sharded_param_data
        if held is not param.sharded_param or local is None:
            found.append(param)
        elif type(local) is Tensor and not local.is_meta and local.numel():
            if local.untyped_storage()._cdata != flat.untyped_storage()._cdata:
                found.append(param)
        elif local.shape != param.padded_sharded_param_size and getattr(local, "_room", local) is None:
            found.append(param)
    return found


def changed_dtypes(state: Any) -> list[tuple[Any, torch.dtype]]:
    """FSDP2's records of which the parameter has another dtype than at the first forward, and that dtype."""
    found = []
    for param in _fsdp2_params(state):
        before = getattr(param, "orig_dtype", None)
        if before is not None and param.sharded_param.dtype != before:
            found.append((param, before))
    return found


# -- who looks on ------------------------------------------------------------------------------------------------------


def is_observed() -> bool:
    """Whether ops must go through torch's dispatcher: a mode counts, fakes or casts them, a trace or transform follows.

    There is no public way to ask for the modes that are active, nor for the level of ``torch.func`` or of forward AD.
    """
    return (
        _count_modes() > 0
        or _level() is not None
        or _forward_ad._current_level >= 0
        or _is_autocasting()
        or is_tracing()
    )


def _find_empty() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    try:
        return torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[no-any-return, attr-defined]
    except AttributeError:
        return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


empty_on_cpu = _find_empty()
"""``torch.empty_strided(shape, stride, dtype=dtype, device="cpu")`` past the dispatcher, where nothing looks on: what
graphs of the compiler call for their results, at half the price of the public one."""


def _ask_each(*tensors: Any) -> bool:
    with as_plain():
        return any(isinstance(one, Tensor) and one.requires_grad for one in tensors)


any_requires_grad: Callable[..., bool] = getattr(torch._C, "_any_requires_grad", _ask_each)
"""Whether one of the tensors (others are not) requires grad; a subclass is not asked through its own Python."""

_forward_ad = torch.autograd.forward_ad
_count_modes = torch._C._len_torch_dispatch_stack
_level = torch._C._functorch.maybe_current_level
_is_autocasting = torch._C._is_any_autocast_enabled

Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """``function``, which the compiler does not translate as a frame of its own, nor what it calls.

    As ``torch.compiler.disable``, but without importing the compiler; and a graph that it follows goes through it.
    """
    frames = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def has_fast_float16() -> bool:
    """Whether oneDNN multiplies float16 with vectors of this processor; False where this torch does not say."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False


is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether ``torch.jit.trace`` looks on, which sees torch's own ops only."""

WATCHED = (_count_modes, _level, _is_autocasting, is_tracing)
"""What ``is_observed`` asks, for who asks from outside of Python; and the level of forward AD."""


@contextmanager
def untraced() -> Iterator[None]:
    """What is computed inside is a constant to a trace that looks on. There is no public way to look away."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
