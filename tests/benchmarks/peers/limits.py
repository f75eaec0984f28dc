"""What the machine itself takes: the floor under each figure. Nothing here checks, locks out or cleans up anything."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from ctypes import memmove
from typing import Any, ClassVar

import lmdb
import numpy as np
import torch

from tests.benchmarks.peers import Peer, Value
from tests.benchmarks.report import Role

ONE_CORE = 1 << 20  # bytes; below, a second core costs more than it brings


class BareLmdb(Peer):
    """LMDB alone, as the catalog has it (no writemap, no sync), for values of a few KiB. A get makes one tensor."""

    id: ClassVar[str] = "lmdb"
    name: ClassVar[str] = "LMDB alone"
    role: ClassVar[Role] = "limit"

    def setup(self) -> None:
        self._env = lmdb.open(
            str(self.root / "lmdb"), map_size=1 << 30, writemap=False, sync=False, metasync=False, lock=True
        )

    def put(self, key: str, value: Any) -> None:
        self._dtype = value.dtype
        with self._env.begin(write=True) as transaction:
            transaction.put(key.encode(), memoryview(value.numpy()))

    def get(self, key: str) -> Any:
        with self._env.begin() as transaction:
            return torch.frombuffer(bytearray(transaction.get(key.encode())), dtype=self._dtype)

    def put_all(self, values: Mapping[str, torch.Tensor]) -> None:
        """In one transaction."""
        self._dtype = next(iter(values.values())).dtype
        with self._env.begin(write=True) as transaction:
            for key, value in values.items():
                transaction.put(key.encode(), memoryview(value.numpy()))

    def keys(self, prefix: str) -> list[str]:
        start, found = prefix.encode(), []
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            more = cursor.set_range(start)
            while more and (key := cursor.key()).startswith(start):
                found.append(key.decode())
                more = cursor.next()
        return found

    def close(self) -> None:
        if hasattr(self, "_env"):
            self._env.close()


class PlainFile(Peer):
    """A file for each value: put writes through a new mapping, get locks and maps it and makes float32 tensors."""

    id: ClassVar[str] = "file"
    name: ClassVar[str] = "plain mapped file"
    settings: ClassVar[str] = "open, flock, mmap; nothing is checked or published"
    role: ClassVar[Role] = "limit"

    def setup(self) -> None:
        self._names: dict[str, list[str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def ready(self, value: Value) -> dict[str, torch.Tensor]:
        return value if isinstance(value, dict) else {"": value}

    def put(self, key: str, value: Any) -> None:
        tensors = list(value.values())
        self._names[key], self._shapes[key] = list(value), (len(tensors), *tensors[0].shape)
        size = sum(tensor.nbytes for tensor in tensors)
        fd = os.open(self.root / key, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, size)
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        fill(np.frombuffer(mapping, np.uint8), tensors)

    def get(self, key: str) -> Any:
        fd = os.open(self.root / key, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            mapping = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
        names, shape = self._names[key], self._shapes[key]
        arrays = np.frombuffer(mapping, np.float32).reshape(shape)
        if len(names) == 1:
            return torch.from_numpy(arrays[0])
        return dict(zip(names, map(torch.from_numpy, arrays), strict=True))

    def drop(self, key: str) -> None:
        (self.root / key).unlink(missing_ok=True)


class Memcpy(Peer):
    """A copy into memory that is mapped and warm. Only a put: a get of it would be nothing at all."""

    id: ClassVar[str] = "memcpy"
    name: ClassVar[str] = "memcpy"
    role: ClassVar[Role] = "limit"

    def ready(self, value: Value) -> list[torch.Tensor]:
        tensors = list(value.values()) if isinstance(value, dict) else [value]
        size = sum(tensor.nbytes for tensor in tensors)
        if getattr(self, "_target", np.empty(0)).size != size:
            self._target = np.ones(size, np.uint8)
        return tensors

    def put(self, key: str, value: Any) -> None:
        fill(self._target, value)

    def get(self, key: str) -> Any:
        raise NotImplementedError("memcpy stores nothing")


def fill(memory: np.ndarray, tensors: list[torch.Tensor]) -> None:
    """Copies contiguous tensors, one after the other: small ones by memmove, on one core; large ones by torch."""
    address, end = memory.ctypes.data, 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        if end - start < ONE_CORE:
            memmove(address + start, tensor.data_ptr(), end - start)
        else:
            torch.from_numpy(memory[start:end]).copy_(tensor.reshape(-1).view(torch.uint8))
