"""Refitting: writing new values into the memory of a model, such as a trainer's floats into a quantized rollout."""
