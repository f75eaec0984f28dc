"""What is converted: each source opened as a value over mapped files. Nothing but metadata is read here.

opening         which reader a format has
files           torch.save, safetensors, Hugging Face's folders, TensorDict's memmaps
snapshots       memstore's snapshots, and checkpoints of torch.distributed.checkpoint in them
dcp             checkpoints of torch's own FileSystemWriter
torchsnapshot   folders of torchsnapshot
mapped_files    the files of a folder, mapped
"""

from __future__ import annotations

from memstore.convert.sources.opening import open_source

__all__ = ["open_source"]
