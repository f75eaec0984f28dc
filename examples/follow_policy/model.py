"""The network, the data, and the stamp by which an evaluator checks that its weights are complete."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from sklearn.datasets import load_digits
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

KEY = "policy"


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """1,797 handwritten digits of 8x8 pixels, every fourth kept for the evaluators."""
    data = load_digits()
    pixels = torch.from_numpy(data.data).float() / 16 - 0.3
    labels = torch.from_numpy(data.target)
    held_out = torch.arange(len(labels)) % 4 == 0
    return (pixels[~held_out], labels[~held_out]), (pixels[held_out], labels[held_out])


def publishable(model: nn.Module, step: int) -> TensorDict:
    """The weights, the step, and a checksum of every leaf at this step: a mixture of two steps can't match it."""
    weights = TensorDict.from_module(model).detach()
    value = TensorDict({"weights": weights, "step": torch.tensor(step)})
    value["stamp"] = stamp(value)
    return value


def stamp(value: TensorDictBase) -> Tensor:
    """A checksum for each leaf, seeded with the step."""
    step = int(value["step"])
    leaves = value["weights"].values(include_nested=True, leaves_only=True)
    sums = [xxhash.xxh3_64_intdigest(leaf.contiguous().numpy(), seed=step) for leaf in leaves]
    return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))


def is_whole(value: TensorDictBase) -> bool:
    """False if any leaf is not of the version that its stamp names, or changed since it was got."""
    return torch.equal(stamp(value), value["stamp"])
