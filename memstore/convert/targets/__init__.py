"""What is written: for each format what it can't express, and its files.

writing         which writer a format has
parts           files made of bytes and of tensors that lie elsewhere
safetensors     a file of safetensors; Hugging Face's folder of several
torch_save      a file of torch.save; single tensors in larger files
dcp             checkpoints of torch.distributed.checkpoint: torch's, and memstore's
memmap          TensorDict's memmaps
snapshots       memstore's snapshots
"""

from __future__ import annotations

from memstore.convert.targets.writing import Draft, draft_target

__all__ = ["Draft", "draft_target"]
