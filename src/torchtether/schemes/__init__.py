"""Schemes, which encode values as plain tensors (*parts*) and decode them."""

from .affine import Affine
from .biased import Biased
from .bits import same_bits
from .codebook import Codebook
from .coded import BlockScheme
from .column_scaled import ColumnScaled
from .flattened import Flattened
from .mastered import Mastered
from .named import NAMED, fp4, fp8, int4, int8, mxfp4, mxfp8, nf4, nvfp4, resolve, sinq
from .plain import Plain
from .scaled_float import ScaledFloat
from .scheme import SCHEMES, Part, Parts, Scheme, check_encoded, part_rows, row_unit, scheme_from_json, view_parts
from .spelled import scheme_from_text, scheme_to_text
from .super_blocks import SuperBlocks

__all__ = [
    "NAMED", "SCHEMES", "Affine", "Biased", "BlockScheme", "Codebook", "ColumnScaled", "Flattened", "Mastered",
    "Part", "Parts", "Plain", "ScaledFloat", "Scheme", "SuperBlocks", "check_encoded", "fp4", "fp8", "int4", "int8",
    "mxfp4", "mxfp8", "nf4", "nvfp4", "part_rows", "resolve", "row_unit", "same_bits", "scheme_from_json",
    "scheme_from_text", "scheme_to_text", "sinq", "view_parts",
]  # fmt: skip
