"""Functions that change a model in place: dtype, device, quantization, and from ``meta`` to memory."""
