"""All access to files: checkpoint formats, indexes of shards, and the record of ties and weights."""

from .batch import Batch, Doubt
from .companions import CarriedOver, carry_over, stem_like
from .crew import Scratch
from .dcp import OPTIMIZER, DcpFile, is_dcp
from .dtypes import CODES, DTYPES
from .folder import folder_for, is_folder, is_taken, new_folder
from .ggml import PACKINGS, Packing
from .gguf import PAIRS, GgufFile
from .gguf_parts import names_of_parts
from .gguf_writer import Pairs, gguf_packing, write_gguf
from .header import Stored
from .hub import local_path
from .index import GGUF_SUFFIX, HEADERS, PICKLED, format_index
from .memory import allocate, scratch
from .names import INDEX_SUFFIX, SUFFIX
from .opening import Closing, read_beside
from .reader import TensorFile
from .record import HIDDEN, KEY, Record, is_weight_view, part_key
from .replacing import FolderChange, beside, put_in_place, replacing
from .ring import STAGED, Ring
from .store import Store
from .writer import check_writable, write_made

__all__ = [
    "CODES", "DTYPES", "GGUF_SUFFIX", "HEADERS", "HIDDEN", "INDEX_SUFFIX", "KEY", "OPTIMIZER", "PACKINGS", "PAIRS",
    "PICKLED", "STAGED", "SUFFIX", "Batch", "CarriedOver", "Closing", "DcpFile", "Doubt", "FolderChange", "GgufFile",
    "Packing", "Pairs", "Record", "Ring", "Scratch", "Store", "Stored", "TensorFile", "allocate", "beside",
    "carry_over", "check_writable", "folder_for", "format_index", "gguf_packing", "is_dcp", "is_folder", "is_taken",
    "is_weight_view", "local_path", "names_of_parts", "new_folder", "part_key", "put_in_place", "read_beside",
    "replacing", "scratch", "stem_like", "write_gguf", "write_made",
]  # fmt: skip
