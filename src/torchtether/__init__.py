"""Keeps a PyTorch model's parameters attached: to each other, to their optimizer and to their checkpoint."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from ._interruptions import uncollected as _uncollected
from .torch_private.versions import naming_torch as _naming_torch

if _TYPE_CHECKING:
    from . import distributed, testing

# one garbage collection over all objects of torch would take a third of the import time
with _naming_torch(), _uncollected():
    from ._version import __version__ as __version__
    from .checkpoint.reader import Checkpoint
    from .checkpoint.reader import open_checkpoint as open
    from .checkpoint.saver import CONFIGS as _CONFIGS
    from .checkpoint.saver import save
    from .conversion.activations import quantize_activations
    from .conversion.building import INITIALISING as _INITIALISING
    from .conversion.building import on_meta
    from .conversion.converting import convert
    from .conversion.materializing import FILLED as _FILLED
    from .conversion.materializing import materialize
    from .conversion.quantizing import dequantize, quantize
    from .conversion.sizing import QuantizePlan, plan_quantize
    from .errors import (
        ArgumentError,
        CheckpointError,
        ConversionError,
        LawError,
        LoadError,
        OptimizerError,
        RuleError,
        SchemeError,
        TetherError,
        TieError,
        TrainingWarning,
        UnsupportedOpError,
    )
    from .exchange.exchange import LISTENERS as _LISTENERS
    from .exchange.exchange import keep_policy as keep_policy  # named in pickles, as the two rebuild functions are
    from .exchange.optimizer_state import check_optimizer
    from .exchange.scope import swapping
    from .geometry.views import View
    from .integrations import imported as _imported
    from .integrations.adopting import adopt
    from .loading.plan import LoadPlan, load, plan_load
    from .loading.report import LoadReport
    from .pictures import StorageDiff, StorageMap, storage_map
    from .refitting.refit import refit
    from .refitting.report import RefitReport
    from .renaming.gguf_names import gguf_names
    from .renaming.joining import Concat, Split, Stack
    from .renaming.reordering import Rotary, Transpose
    from .schemes import (
        Affine,
        Biased,
        BlockScheme,
        Codebook,
        ColumnScaled,
        Mastered,
        Part,
        Plain,
        ScaledFloat,
        Scheme,
        SuperBlocks,
        fp4,
        fp8,
        int4,
        int8,
        mxfp4,
        mxfp8,
        nf4,
        nvfp4,
        sinq,
    )
    from .ties.edit import tie, untie
    from .ties.records import check_ties, find_ties
    from .torch_private.versions import warn_if_untested as _warn_if_untested
    from .weights import module_load as _module_load  # noqa: F401 - registers its rule
    from .weights import ops as _ops  # noqa: F401 - registers the rules
    from .weights.spec import Tie, WeightSpec
    from .weights.weight import Weight
    from .weights.weight import rebuild_weight as rebuild_weight
    from .weights.wrapper import WrapperTensor
    from .weights.wrapper import rebuild_wrapper as rebuild_wrapper

_warn_if_untested()
_CONFIGS.update(_imported.CONFIGS)
_LISTENERS.update(_imported.LISTENERS)
_imported.ABOVE["load"] = load
_INITIALISING.update(_imported.INITIALISING)
_FILLED.update(_imported.FILLED)

__all__ = [
    # checkpoints
    "load", "plan_load", "save", "open", "Checkpoint", "LoadPlan", "LoadReport", "refit", "RefitReport",
    "Concat", "Split", "Stack", "Transpose", "Rotary", "gguf_names",
    # conversions
    "convert", "quantize", "dequantize", "adopt", "quantize_activations", "swapping", "on_meta", "materialize",
    "plan_quantize", "QuantizePlan",
    # ties and optimizers
    "find_ties", "check_ties", "tie", "untie", "check_optimizer",
    # many machines
    "distributed",
    # pictures
    "storage_map", "StorageMap", "StorageDiff",
    # the nouns
    "Weight", "WeightSpec", "WrapperTensor", "Tie", "View",
    # schemes
    "Scheme", "Part", "BlockScheme", "Affine", "Biased", "ScaledFloat", "Codebook", "SuperBlocks", "Plain", "Mastered",
    "ColumnScaled",
    "int8", "int4", "sinq", "fp8", "nf4", "fp4", "mxfp8", "mxfp4", "nvfp4",
    # errors
    "TetherError", "ArgumentError", "CheckpointError", "ConversionError", "LoadError", "OptimizerError", "RuleError",
    "SchemeError", "TieError", "UnsupportedOpError", "LawError", "TrainingWarning",
    # laws for other people's schemes and classes
    "testing",
]  # fmt: skip


_LATE = ("distributed", "testing")
"""Packages imported at first use: few programs need them, and torch's DTensor alone takes as long as all the rest."""


def __getattr__(name: str) -> _Any:
    if name in _LATE:
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
