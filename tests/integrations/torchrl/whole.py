"""Rows that tell whether they are whole: what one write stores, and what a reader looks for."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

import memstore
from memstore.integrations.torchrl.rows import WholeRows, create_rows

WIDTH = 700  # numbers a row: a copy of it takes a while


def batch(numbers: list[int] | torch.Tensor) -> TensorDict:
    number = torch.as_tensor(numbers, dtype=torch.int64)
    return TensorDict({"x": number[:, None].float().expand(-1, WIDTH), "more": {"y": number}}, [len(number)])


def numbers_of(rows: Any) -> list[int]:
    """Fails if a row has numbers of two writes."""
    numbers = rows["more", "y"]
    assert torch.equal(rows["x"], numbers[:, None].float().expand(-1, WIDTH)), "a torn row"
    return numbers.tolist()


def new(store: memstore.Store, slots: int, key: str = "rows") -> WholeRows:
    return WholeRows(create_rows(store, key, batch([0])[0], slots))


def opened(store: memstore.Store, key: str = "rows") -> WholeRows:
    return WholeRows(store.open_dataset(key))
