"""TensorDict's memory maps: a folder with a file a leaf, or (`.tdz`) one archive file."""

from __future__ import annotations

import shutil
from typing import Any, ClassVar

from tensordict import TensorDict

from tests.benchmarks.peers import Peer, Value


class Memmap(Peer):
    id: ClassVar[str] = "memmap"
    name: ClassVar[str] = "TensorDict.memmap"
    settings: ClassVar[str] = "a folder, one thread (its default, and faster for small leaves); not atomic"
    suffix: ClassVar[str] = ""

    def ready(self, value: Value) -> TensorDict:
        return TensorDict(dict(value) if isinstance(value, dict) else {"value": value}, batch_size=[])

    def put(self, key: str, value: Any) -> None:
        value.memmap(self.root / f"{key}{self.suffix}")

    def get(self, key: str) -> Any:
        return TensorDict.load_memmap(self.root / f"{key}{self.suffix}")

    def drop(self, key: str) -> None:
        shutil.rmtree(self.root / key, ignore_errors=True)


class MemmapArchive(Memmap):
    id: ClassVar[str] = "tdz"
    name: ClassVar[str] = "TensorDict.memmap, .tdz"
    settings: ClassVar[str] = "one archive file, not compressed; atomic"
    suffix: ClassVar[str] = ".tdz"

    def drop(self, key: str) -> None:
        (self.root / f"{key}{self.suffix}").unlink(missing_ok=True)


class MemmapUpdate(Memmap):
    """Writes into the leaves of a memory map that stays open: its fastest overwrite, seen half-written by readers."""

    id: ClassVar[str] = "update"
    name: ClassVar[str] = "memmap kept open, update_"
    settings: ClassVar[str] = "in place, not atomic: readers see it half-written"

    def setup(self) -> None:
        self._open: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        mapped = self._open.get(key)
        if mapped is None:
            self._open[key] = value.memmap(self.root / key)
        else:
            mapped.update_(value)

    def drop(self, key: str) -> None:
        self._open.pop(key, None)
        super().drop(key)

    def close(self) -> None:
        self._open = {}
