"""A tensorclass that tests can name."""

from __future__ import annotations

import torch
from tensordict import tensorclass


@tensorclass
class Point:
    x: torch.Tensor
    y: torch.Tensor
