"""A checkpoint under the names of a model: rules that rename, stack, split and transpose."""
