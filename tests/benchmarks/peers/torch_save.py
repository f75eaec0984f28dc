"""torch.save and torch.load, on the same file system as the store."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tests.benchmarks.peers import Peer


class TorchSave(Peer):
    id: ClassVar[str] = "torch.save"
    name: ClassVar[str] = "torch.save, torch.load"
    settings: ClassVar[str] = "weights_only=True; mmap=True; not atomic"

    def put(self, key: str, value: Any) -> None:
        torch.save(value, self.root / key)

    def get(self, key: str) -> Any:
        return torch.load(self.root / key, weights_only=True, mmap=True)

    def drop(self, key: str) -> None:
        (self.root / key).unlink(missing_ok=True)


class TorchSaveRead(TorchSave):
    """For values so small that reading beats mapping."""

    settings: ClassVar[str] = "weights_only=True; mmap=False; not atomic"

    def get(self, key: str) -> Any:
        return torch.load(self.root / key, weights_only=True)
