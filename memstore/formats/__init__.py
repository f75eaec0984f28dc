"""Files of other libraries: served in place as entries, loaded, and written.

attach              which format a path has, and what all formats have in common
safetensors         safetensors, and Hugging Face's checkpoints of several
memmap              folders that TensorDict.memmap writes; memmap_export: those that load_memmap reads
torch_save          files that torch.save writes; torch_zip: the zip that these are
npy                 numpy's
documents           the JSON that lies beside the tensors
export, output      values as files of these formats, each of which appears whole or not at all; single: one tensor

A Store imports this package when it is first needed, `between_forks`; tensordict comes later still, with memmap.
"""

from __future__ import annotations

from memstore.formats.attach import describe_files, load_files
from memstore.formats.export import check_export, export_value, has_devices
from memstore.formats.single import write_tensor

__all__ = [
    "check_export",
    "describe_files",
    "export_value",
    "has_devices",
    "load_files",
    "write_tensor",
]
