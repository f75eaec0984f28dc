"""memstore itself, as its README uses it. The value is put as it is: a tensor, a dict, or a TensorDict."""

from __future__ import annotations

from typing import Any, ClassVar

from tensordict import TensorDict

import memstore
from tests.benchmarks.peers import Peer, Value
from tests.benchmarks.report import Role


class Store(Peer):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    role: ClassVar[Role] = "memstore"

    def setup(self) -> None:
        self.store = memstore.open(self.root / "store")

    def put(self, key: str, value: Any) -> None:
        self.store.put(key, value)

    def get(self, key: str) -> Any:
        return self.store.get(key)

    def drop(self, key: str) -> None:
        self.store.delete(key, missing_ok=True)
        self.store.gc()

    def close(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


class StoreWithChecksums(Store):
    """A store that keeps a checksum of each leaf."""

    id: ClassVar[str] = "memstore-sum"
    name: ClassVar[str] = "memstore, checksum=True"

    def setup(self) -> None:
        self.store = memstore.open(self.root / "store", checksum=True)


class StoreThatVerifies(StoreWithChecksums):
    """Each get compares what it got with its checksums."""

    id: ClassVar[str] = "memstore-verify"
    name: ClassVar[str] = "memstore, verify=True"

    def setup(self) -> None:
        self.store = memstore.open(self.root / "store", checksum=True, verify=True)


class StoreOfTensorDicts(Store):
    """The same store; what is put is a TensorDict of the tensors."""

    id: ClassVar[str] = "memstore-td"
    name: ClassVar[str] = "memstore, TensorDict"

    def ready(self, value: Value) -> Any:
        return value if not isinstance(value, dict) else TensorDict(dict(value), batch_size=[])
