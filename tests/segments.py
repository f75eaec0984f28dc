"""Values that take a segment's file of some size, and the files of a store's segments."""

from __future__ import annotations

import os

import torch


def of_size(nbytes: int, number: int = 7) -> torch.Tensor:
    return torch.full((nbytes,), number % 251, dtype=torch.uint8)


def files(root: str) -> list[str]:
    return sorted(os.listdir(f"{root}/segments"))
