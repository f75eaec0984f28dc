"""State dicts for the tests of checkpoints, and calls of torch's that save and load them."""

from __future__ import annotations

import os
import warnings
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from memstore.integrations.dcp import StorageReader, StorageWriter

StateDict = dict[str, Any]


class Place(NamedTuple):
    """Where a test saves: a path and None, or a store and a key."""

    source: Any
    key: str | None

    def writer(self, **options: Any) -> StorageWriter:
        return StorageWriter(self.source, key=self.key, **options)

    def reader(self) -> StorageReader:
        return StorageReader(self.source, key=self.key)

    def leftovers(self) -> list[str]:
        """What is there beside one checkpoint of one process."""
        if self.key is None:
            return sorted(os.listdir(self.source))[3:]
        others = [key for key in list(self.source) if key != self.key]
        return [*others, *(one.key for one in self.source.pending())]


def small_state(parameter: Any = "0") -> StateDict:
    """Of several dtypes, strides and sizes, nested, with what is no tensor. Optimizers have numbers for parameters."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model": {
            "weight": random(30, 20),
            "turned": random(6, 10).t(),
            "every other": random(40)[::2],
            "scalar": torch.tensor(2.5),
            "none": torch.empty(0, 3),
            "half": random(5, 3).bfloat16(),
            "fp8": random(8).to(torch.float8_e4m3fn),
            "complex": torch.complex(random(4), random(4)),
            "flags": random(9) > 0,
            "negative": torch.complex(random(3), random(3)).conj().imag,
            "a/b%c": torch.arange(3),
        },
        "optimizer": {
            "state": {parameter: {"step": 7, "exp_avg": random(30, 20)}},
            "groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}],
        },
        "epoch": 3,
        "name": "run é",
        "blob": b"\0\1\2",
        "nothing": None,
        "empty": b"",
    }


def like(state: Any) -> Any:
    """The same containers, with other values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state, memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        return {key: like(value) for key, value in state.items()}
    if isinstance(state, list):
        return [like(value) for value in state]
    return None


def save(state: StateDict, writer: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return state_dict_saver.save(state, storage_writer=writer, **options)


def load(state: StateDict, reader: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(state, storage_reader=reader, **options)


def save_number(place: str | Place, number: float, **options: Any) -> None:
    writer = place.writer(**options) if isinstance(place, Place) else StorageWriter(place, **options)
    save({"w": torch.full((1000,), number), "n": number}, writer)


def number_in(place: str | Place) -> float:
    target = {"w": torch.zeros(1000), "n": 0.0}
    load(target, place.reader() if isinstance(place, Place) else StorageReader(place))
    assert torch.equal(target["w"], torch.full((1000,), target["n"])), "parts of two saves"
    return target["n"]


def saved_and_loaded(state: StateDict, place: Any, key: str | None = None, **options: Any) -> StateDict:
    """What a load into an empty copy of the state gives."""
    save(state, StorageWriter(place, key=key), **options)
    target = like(state)
    load(target, StorageReader(place, key=key), **options)
    return target
