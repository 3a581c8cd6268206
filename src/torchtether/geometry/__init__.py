"""Geometry of memory: views, blocks of bytes, and groups of overlapping ones. No values are read."""
