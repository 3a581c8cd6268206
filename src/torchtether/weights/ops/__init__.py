"""Every op that a Weight answers, by family; importing this registers the rules."""

from . import create, data, embedding, graph_ops, grouped, inplace, linear, move, sharding, storages, values, views

__all__ = [
    "create",
    "data",
    "embedding",
    "graph_ops",
    "grouped",
    "inplace",
    "linear",
    "move",
    "sharding",
    "storages",
    "values",
    "views",
]
