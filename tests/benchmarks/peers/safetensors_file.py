"""safetensors files, on the same file system as the store."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from tests.benchmarks.peers import Peer, Value, needs


class SafetensorsFile(Peer):
    id: ClassVar[str] = "safetensors"
    name: ClassVar[str] = "safetensors"
    settings: ClassVar[str] = "save_file, load_file"

    @classmethod
    def missing(cls) -> str | None:
        return needs("safetensors")

    def setup(self) -> None:
        import safetensors.torch as library

        self._library = library

    def ready(self, value: Value) -> Any:
        return value if isinstance(value, dict) else {"value": value}

    def put(self, key: str, value: Any) -> None:
        self._library.save_file(value, self.root / key)

    def get(self, key: str) -> Any:
        return self._library.load_file(self.root / key)

    def drop(self, key: str) -> None:
        (self.root / key).unlink(missing_ok=True)


class SafetensorsRenamed(SafetensorsFile):
    """Files that appear whole, or not at all, as values of a store do."""

    settings: ClassVar[str] = "save_file and os.replace, load_file"

    def put(self, key: str, value: Any) -> None:
        new = self.root / f".{key}.new"
        self._library.save_file(value, new)
        os.replace(new, self.root / key)
