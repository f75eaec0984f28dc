"""What workers of DataLoaders call; by name, so that it can be sent to them."""

from __future__ import annotations

import os
from typing import Any

import torch
from tensordict import TensorDict

import memstore
from memstore.engine import lies_in_mapping


def value(rows: int = 100) -> dict[str, Any]:
    """Rows that tell their number, in nested containers."""
    numbers = torch.arange(rows)
    inner = TensorDict({"half": numbers.to(torch.bfloat16), "row": numbers.clone()}, [rows])
    return {
        "x": numbers[:, None, None].expand(rows, 3, 2).float(),
        "pair": (numbers * 2, [numbers > 7]),
        "td": TensorDict({"inner": inner, "empty": torch.zeros(rows, 0)}, [rows]),
    }


def rows_in(batch: dict[str, Any]) -> list[int]:
    """The numbers of the rows of a batch, once all its tensors have the same."""
    rows = batch["td"]["inner", "row"]
    assert torch.equal(batch["x"], rows[:, None, None].expand(-1, 3, 2).float())
    assert torch.equal(batch["pair"][0], rows * 2)
    assert torch.equal(batch["pair"][1][0], rows > 7)
    assert torch.equal(batch["td"]["inner", "half"], rows.to(torch.bfloat16))
    assert batch["td"]["empty"].shape == (len(rows), 0)
    assert batch["td"].batch_size == (len(rows),)
    return rows.tolist()


def where_it_was_read(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform that says which process has read the batch, and whether into shared memory."""
    tensors = [batch["x"], *batch["pair"][1], batch["td"]["inner", "row"]]
    shared = [tensor.is_shared() or lies_in_mapping(tensor.data_ptr()) for tensor in tensors]  # a block, else
    seen = [all(shared), os.getpid(), memstore.bytes_read()]
    return {**batch, "seen": torch.tensor(seen)}


def with_address(batch: dict[str, Any]) -> dict[str, Any]:
    """Says where the batch lies in the worker."""
    return {**batch, "address": torch.tensor(batch["x"].data_ptr())}


def fails_for_some(batch: dict[str, Any]) -> dict[str, Any]:
    """For each fifth batch of four rows."""
    if rows_in(batch)[0] % 20 == 0:
        raise RuntimeError("no such picture")
    return batch


def fails(batch: Any) -> Any:
    raise RuntimeError("no such picture")


def named(batch: Any) -> dict[str, Any]:
    return {"batch": batch, "name": "digits"}
