"""Fake tensors as text, in the form that torchdistX has."""

from __future__ import annotations

import torch

from memstore.fake.arguments import with_index
from memstore.fake.marks import Mark, ref_of, requires_grad


def text_of(tensor: torch.Tensor, mark: Mark) -> str:
    """As `tensor(..., size=(2, 3), dtype=torch.float16, device=cuda:0, fake=True)`; what is the default is left out."""
    ref = ref_of(tensor, mark)
    parts = ["...", f"size={ref.size}"]
    if ref.dtype != torch.get_default_dtype():
        parts.append(f"dtype={ref.dtype}")
    if mark.device.type != "cpu":
        parts.append(f"device={with_index(mark.device)}")
    if requires_grad(tensor):
        parts.append("requires_grad=True")
    return f"tensor({', '.join(parts)}, fake=True)"
