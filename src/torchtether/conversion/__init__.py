"""The verbs that change a model in place: dtype, device, quantization, from meta to memory."""
