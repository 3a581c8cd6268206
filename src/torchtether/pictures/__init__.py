"""Storage maps: storages and the tensors that share them, as text, as a picture and as a comparison."""

from .storage_map import StorageDiff, StorageMap, storage_map

__all__ = ["StorageDiff", "StorageMap", "storage_map"]
