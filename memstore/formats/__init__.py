"""Files of other libraries: served in place as entries, loaded, and written.

attach              which format a path has, and what all formats have in common
safetensors         safetensors, and Hugging Face's checkpoints of several
memmap              folders that TensorDict.memmap writes; memmap_export: those that load_memmap reads
torch_save          files that torch.save writes; torch_zip: the zip that these are
torch_tensors       single tensors that torch.save wrote into larger files
npy                 numpy's
documents           the JSON that lies beside the tensors
export, output      values as files of these formats, whole or not at all; single: bare tensors

A Store imports this package when it is first needed, `between_forks`; tensordict comes later still, with memmap.
"""

from __future__ import annotations

from memstore.formats.attach import describe_files, file_format, load_files
from memstore.formats.documents import are_sizes, damaged, parse_value, read_whole
from memstore.formats.export import (
    as_tensordict,
    check_export,
    export_value,
    has_devices,
    make_memmap_folder,
)
from memstore.formats.output import Meter, sync_all, what_special
from memstore.formats.safetensors import (
    INDEX,
    find_in_folder,
    header_of,
    index_of,
    read_metadata,
    shard_names,
    shards_of,
    why_not,
)
from memstore.formats.single import write_tensor, write_tensors
from memstore.formats.torch_tensors import Frames, PlacedTensor, locate_tensor
from memstore.formats.torch_zip import is_legacy

__all__ = [
    "Frames",
    "INDEX",
    "Meter",
    "PlacedTensor",
    "are_sizes",
    "as_tensordict",
    "check_export",
    "damaged",
    "describe_files",
    "export_value",
    "file_format",
    "find_in_folder",
    "has_devices",
    "header_of",
    "index_of",
    "is_legacy",
    "load_files",
    "locate_tensor",
    "make_memmap_folder",
    "parse_value",
    "read_metadata",
    "read_whole",
    "shard_names",
    "shards_of",
    "sync_all",
    "what_special",
    "why_not",
    "write_tensor",
    "write_tensors",
]
