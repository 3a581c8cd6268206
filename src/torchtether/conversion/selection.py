"""Choosing a scheme for each parameter: from the user's rules to one scheme per tied group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._checks import describe_some
from .._warnings import warn
from ..errors import ArgumentError, RuleError, SchemeError, TetherError
from ..schemes import Mastered, Scheme, resolve
from ..ties.names import is_sharded, named_tensors, nearest
from ..torch_private.modules import parameters_of
from ..weights.spec import Tie, order_of
from ..weights.weight import Weight

_EXCLUDE = "Exclude it with a rule of None."

_SMALL = 2**16
"""Bytes of a tensor whose growth is no loss."""

Rules = Scheme | str | Mapping[str, Scheme | str | None] | None
"""``None``; a scheme or its name, for every ``nn.Linear`` and experts; or globs over names, whose first match wins."""


def schemes_for(model: nn.Module, rules: Rules, ties: Iterable[Tie], *, argument: str = "rules") -> dict[str, Scheme]:
    """Return the scheme of each tied group or single parameter that is to be quantized, by its owner's name.

    ``argument`` is the name of ``rules`` in errors.

    Raises:
        RuleError: a glob matches nothing, a scheme is unknown, two rules ask for different schemes in one tied group,
            or a tied group has an alias that is a view which a Weight does not have.
        SchemeError: a scheme does not fit a parameter's shape or dtype.

    >>> import torch, torchtether as tt
    >>> schemes_for(torch.nn.Linear(4, 4), {"*.bias": None, "weight": "int8"}, ())
    Traceback (most recent call last):
    torchtether.errors.RuleError: *.bias: this rule matches no parameter, the nearest is 'bias'. Correct or remove it.
    """
    if rules is None:
        return {}
    asked = _of_mapping(model, rules) if isinstance(rules, Mapping) else _of_products(model, resolved(argument, rules))
    tie_of = {name: tie for tie in ties for name in tie.names}
    tensors = named_tensors(model)
    chosen: dict[str, Scheme] = {}
    for name, scheme in asked.items():
        tie = tie_of.get(name)
        first = name if tie is None else next(other for other in tie.names if other in asked)
        if asked[first] != scheme:
            wanted, other = _describe_scheme(scheme), _describe_scheme(asked[first])
            raise RuleError(
                f"the rules give it {wanted}, and {other} to {first}, to which it is tied",
                name=name,
                fix="Give both names the same scheme, or call tt.untie.",
            )
        owner = name if tie is None else tie.owner
        if scheme is not None and owner not in chosen:
            _check_fit(owner, tensors[owner], scheme)
            if tie is not None and not scheme.transparent:
                _check_aliases(tie, tensors, scheme)
            chosen[owner] = scheme
    _warn_of_growth({name: (tensors[name], scheme) for name, scheme in chosen.items()})
    return chosen


def _warn_of_growth(chosen: Mapping[str, tuple[Tensor, Scheme]]) -> None:
    """Warn of tensors whose parts take more bytes than their values: most often, rows of convolutions are short."""
    grown = {}
    for name, (tensor, scheme) in chosen.items():
        coded = scheme.scheme if isinstance(scheme, Mastered) else scheme  # a master takes memory on purpose
        plain, nbytes = tensor.numel() * tensor.dtype.itemsize, coded.nbytes(tuple(tensor.shape), tensor.dtype)
        if nbytes > plain >= _SMALL:
            grown[name] = f"{nbytes:,} bytes instead of {plain:,}, in rows of {tensor.shape[-1]}"
    if grown:
        first = next(iter(grown))
        warn(
            f"quantization makes {describe_some(list(grown))} larger ({first}: {grown[first]}): scales are per row, "
            f"or per block of one, along the last dimension. {_EXCLUDE} Blocks of nf4 and fp4 go on in the next row."
        )


def _of_products(model: nn.Module, scheme: Scheme) -> dict[str, Scheme | None]:
    asked: dict[str, Scheme | None] = {}
    for path, module in model.named_modules():
        for name in _weights_of(module):
            asked[f"{path}.{name}" if path else name] = scheme
    if not asked:
        computed = next((path for path, module in model.named_modules() if isinstance(module, nn.Linear)), None)
        if computed is not None:
            raise RuleError(
                "the weight of every nn.Linear is computed from other parameters (parametrize, weight_norm)",
                name=computed,
                fix="Call remove_parametrizations (or remove_weight_norm) first, or give a mapping of parameter names.",
            )
        raise RuleError(
            "the model has no nn.Linear with a weight and no experts, to which a bare scheme applies",
            fix="Give a mapping of parameter names: {'*.weight': 'int8'}.",
        )
    return asked


def _weights_of(module: nn.Module) -> list[str]:
    """Return the names of the parameters of ``module`` that multiply its inputs.

    Those are the weight of ``nn.Linear``, the weight of transformers' ``Conv1D`` (a linear layer stored transposed),
    and parameters of 3 dimensions whose first size is a number of experts that the module has: its ``num_experts``, or
    another integer attribute whose name ends in ``experts`` (``total_experts``, ``n_shared_experts``).
    """
    parameters = {name: parameter for name, parameter in parameters_of(module).items() if parameter is not None}
    is_conv1d = (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")
    if isinstance(module, nn.Linear) or is_conv1d:
        return [name for name in parameters if name == "weight"]
    counts = [getattr(module, "num_experts", None)]  # it may be of any type
    counts += [value for name, value in vars(module).items() if name.endswith("experts") and type(value) is int]
    return [name for name, p in parameters.items() if not is_lazy(p) and p.dim() == 3 and p.shape[0] in counts]


def _of_mapping(model: nn.Module, rules: Mapping[str, Scheme | str | None]) -> dict[str, Scheme | None]:
    given = {glob: None if scheme is None else resolved(glob, scheme) for glob, scheme in rules.items()}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for glob, near in unmatched(given, names).items():
        raise RuleError(f"this rule matches no parameter{near}", name=glob, fix="Correct or remove it.")
    asked: dict[str, Scheme | None] = {}
    for name in names:
        for glob in (glob for glob in given if fnmatchcase(name, glob)):
            asked.setdefault(name, given[glob])  # the first match wins
    return asked


def globs_of(only: str | Iterable[str]) -> list[str]:
    """Return ``only`` as a list of globs. Raise ArgumentError if it is neither a glob nor several."""
    try:
        globs = [only] if isinstance(only, str) else list(only)
    except TypeError:
        globs = [only]  # type: ignore[list-item]
    if not all(isinstance(glob, str) for glob in globs):
        fix = "Give text such as 'layers.0.*'."
        raise ArgumentError(f"{only!r:.40} is neither a glob nor a list of globs", name="only", fix=fix)
    return globs


def matched_names(only: str | Iterable[str], names: Collection[str], error: type[TetherError], what: str) -> list[str]:
    """Return the ``names`` that ``only``, a glob or several, matches; raise ``error`` if a glob matches none."""
    globs = globs_of(only)
    for glob, near in unmatched(globs, names).items():
        raise error(f"{what}{near}", name=glob, fix="Correct or remove it.")
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


def unmatched(globs: Iterable[str], names: Collection[str]) -> dict[str, str]:
    """Return the globs that match none of ``names``, each with text for an error message that has the nearest name.

    >>> unmatched(["*.bias", "emb.*"], ["emb.weight", "bias"])
    {'*.bias': ", the nearest is 'bias'"}
    """
    found = {}
    for glob in globs:
        if not isinstance(glob, str):
            raise RuleError(f"{glob!r:.40} is not a glob", name="rules", fix="Give text such as 'layers.*.weight'.")
        if not any(fnmatchcase(name, glob) for name in names):
            near = nearest(glob, names)
            found[glob] = f", the nearest is {near!r}" if near else ""
    return found


def resolved(name: str, scheme: Scheme | str) -> Scheme:
    """Return ``resolve(scheme)``; its errors are about ``name``, an argument or a glob."""
    try:
        return resolve(scheme)
    except RuleError as error:
        raise error.named(name) from None


def _describe_scheme(scheme: Scheme | None) -> str:
    return "no scheme" if scheme is None else str(scheme)


def _check_fit(name: str, tensor: Tensor, scheme: Scheme) -> None:
    if is_lazy(tensor):
        raise SchemeError("is lazy and has no shape yet", name=name, fix="Run one forward first.")
    if is_sharded(tensor):
        fix = "Quantize the plain model, then shard it, or give tt.distributed.load quantize=."
        raise SchemeError("is sharded already, and a sharded tensor cannot become a Weight", name=name, fix=fix)
    other = hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, Weight)
    if other or tensor.layout != torch.strided or tensor.is_nested:
        kind = type(tensor).__name__ if other else "nested tensor" if tensor.is_nested else f"{tensor.layout} tensor"
        raise SchemeError(f"is a {kind}, which cannot become a Weight", name=name, fix=_EXCLUDE)
    if not scheme.transparent and not tensor.is_floating_point():
        raise SchemeError(f"is {tensor.dtype}, which {scheme} cannot hold", name=name, fix=_EXCLUDE)
    scheme.check(tuple(tensor.shape), name=name)


def _check_aliases(tie: Tie, tensors: Mapping[str, Tensor], scheme: Scheme) -> None:
    """Raise RuleError unless every alias is the whole owner with permuted dimensions: a Weight has no other views."""
    owner = tensors[tie.owner]
    for name, view in zip(tie.names, tie.views, strict=True):
        if view is not None and order_of(view, owner) is None:
            raise RuleError(
                f"is a view of {tie.owner} (size {view.size}, stride {view.stride}, offset {view.offset}), "
                f"and a weight in {scheme} cannot have such a view",
                name=name,
                fix=f"Call tt.untie(model, {name!r}) first, or exclude both.",
            )
