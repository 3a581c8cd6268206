"""A load as a plan: it finds the source of each tensor and every fault before it changes the model or reads values."""
