"""Conversion of checkpoints between formats: `memstore convert`. Guide: docs/convert.md. Decision 024.

    convert("model.pt", "model.safetensors")  # the suffix names the format; without one it is a snapshot

For who works on it, the files:

converting      convert, and its steps; what formats are called
leaves          tensors whose bytes lie in files: mapped, compared, put together
naming          leaves by name, and refusals
files           safetensors, torch.save, memmaps
dcp             torch.distributed.checkpoint's, and memstore's own
torchsnapshot   torchsnapshot's, which are read

Between the two sides is an ordinary value, of tensors over mapped files; what lies in several boxes has a stand-in.
"""

from __future__ import annotations

from memstore._wording import offered
from memstore.convert.converting import FORMATS, WRITTEN, Converted, convert

__all__ = ["FORMATS", "WRITTEN", "Converted", "convert"]
__dir__ = offered(__all__)
