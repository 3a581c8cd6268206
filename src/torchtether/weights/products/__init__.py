"""Kernels for decoding and for products with quantized weights, which read the parts in place.

``table.py`` selects the kernels, with measurements. The layout of the scheme is the only one, so no copy in another
layout must be kept or invalidated: moving, saving, ties, in-place writes and rows of embeddings use the same storage.

If no kernel fits, and on all devices but CPUs and CUDA, weights are decoded in chunks of rows and multiplied by torch;
in a compiled graph the compiler fuses the decoding. An H100 has run the calls for CUDA, except those for compute
capability 10. Tests check with fake tensors that they are valid, and on the CPU that their results are right, for the
ops that torch has there, too.
"""
