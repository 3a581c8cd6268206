"""The ops that have a rule for Weight, by family; importing this package registers the rules."""

from . import create, data, embedding, graph_ops, grouped, inplace, linear, move, sharding, storages, values, views  # noqa: F401
