"""Drawing in text and in SVG, independent of tensors; opens no files and needs neither network nor script."""

from .scale import Scale
from .text import clean, cut, cut_end, describe_bytes, padded, width_of, wrapped
from .timeline import draw_timeline

__all__ = ["Scale", "clean", "cut", "cut_end", "draw_timeline", "padded", "describe_bytes", "width_of", "wrapped"]
