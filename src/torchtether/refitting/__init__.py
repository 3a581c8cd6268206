"""New values for a model in the memory that it has: a trainer's floats into a quantized rollout."""
