"""Files of other libraries: served in place as entries, loaded, and written.

attach         which format a path has, what all formats have in common, and numpy's .npy files
safetensors    safetensors, and Hugging Face's checkpoints of several files
memmap         folders that TensorDict.memmap writes, and those that load_memmap reads
torch_save     files that torch.save writes, and single tensors that it wrote into larger files
export         values, and bare tensors, as files of these formats
files          documents that lie beside tensors; new files, which appear whole or not at all

A Store imports this package when it is first needed, `between_forks`; tensordict comes later still, with memmap.
"""

# A door: others may use what it imports.
# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

from memstore.formats.attach import Format, describe_files, file_format, load_files
from memstore.formats.export import (
    as_tensordict,
    check_export,
    export_value,
    has_devices,
    make_memmap_folder,
    save_torch,
    write_tensor,
    write_tensors,
)
from memstore.formats.files import ByteMeter, are_sizes, damaged, parse_value, read_whole, sync_all, what_special
from memstore.formats.safetensors import (
    INDEX,
    WholeFile,
    as_written,
    beside_weights,
    find_in_folder,
    header_of,
    index_of,
    read_metadata,
    shard_names,
    shards_of,
    ties_weights,
    whole_files,
    why_not,
    write_checkpoint,
)
from memstore.formats.torch_save import Frames, PlacedTensor, is_legacy
