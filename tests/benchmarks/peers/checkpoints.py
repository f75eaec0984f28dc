"""Ways to save a state dict and to restore it in place. Each saves to a path that is new."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import memstore
from tests.benchmarks import pages
from tests.benchmarks.peers import Peer, needs
from tests.benchmarks.report import Role

State = dict[str, torch.Tensor]
NAME = "model"
THREADS = 2  # of DCP


class Checkpointer(Peer):
    """Saves and restores. What one can't do it leaves out of `does`."""

    does: ClassVar[frozenset[str]] = frozenset({"save", "save_durably", "save_async", "restore", "open"})

    def save(self, path: Path, state: State) -> Any:
        """Returns when another process can restore it."""
        raise NotImplementedError

    def save_durably(self, path: Path, state: State) -> Any:
        """Returns when all of it is on the disk, names included."""
        raise NotImplementedError

    def save_async(self, path: Path, state: State) -> Callable[[], object]:
        """Returns when the tensors may change: what waits until another process can restore it."""
        raise NotImplementedError

    def restore(self, path: Path, state: State) -> Any:
        """Reads it into these tensors."""
        raise NotImplementedError

    def open(self, path: Path) -> Any:
        """What is saved, so that each tensor's name and shape are known and it can be read."""
        raise NotImplementedError


class Snapshots(Checkpointer):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    settings: ClassVar[str] = "Snapshot.take, async_take, restore, view; with checksums, which a restore compares"
    role: ClassVar[Role] = "memstore"
    checksum: ClassVar[bool] = True

    def save(self, path: Path, state: State) -> Any:
        memstore.Snapshot.take(path, _app_state(state), durability="process", checksum=self.checksum)

    def save_durably(self, path: Path, state: State) -> Any:
        memstore.Snapshot.take(path, _app_state(state), checksum=self.checksum)

    def save_async(self, path: Path, state: State) -> Callable[[], object]:
        return memstore.Snapshot.async_take(path, _app_state(state), durability="process", checksum=self.checksum).wait

    def restore(self, path: Path, state: State) -> Any:
        memstore.Snapshot(path).restore(_app_state(state))

    def open(self, path: Path) -> Any:
        return memstore.Snapshot(path).view()


class SnapshotsUnsummed(Snapshots):
    id: ClassVar[str] = "memstore-plain"
    name: ClassVar[str] = "memstore, checksum=False"
    settings: ClassVar[str] = "as the peers, which have no checksums"
    checksum: ClassVar[bool] = False


def _app_state(state: State) -> dict[str, Any]:
    return {NAME: memstore.StateDict(state)}


class TorchFile(Checkpointer):
    id: ClassVar[str] = "torch.save"
    name: ClassVar[str] = "torch.save, torch.load"
    settings: ClassVar[str] = "weights_only=True, mmap=True, and copy_; not atomic"
    does: ClassVar[frozenset[str]] = Checkpointer.does - {"save_async"}

    def save(self, path: Path, state: State) -> Any:
        torch.save(state, path)

    def save_durably(self, path: Path, state: State) -> Any:
        self.save(path, state)
        _sync(path)

    def restore(self, path: Path, state: State) -> Any:
        _copy(self.open(path), state)

    def open(self, path: Path) -> Any:
        return torch.load(path, mmap=True, weights_only=True)


class SafetensorsCheckpoint(Checkpointer):
    id: ClassVar[str] = "safetensors"
    name: ClassVar[str] = "safetensors"
    settings: ClassVar[str] = "save_file; safe_open, get_tensor and copy_; not atomic"
    does: ClassVar[frozenset[str]] = Checkpointer.does - {"save_async"}

    @classmethod
    def missing(cls) -> str | None:
        return needs("safetensors")

    def save(self, path: Path, state: State) -> Any:
        from safetensors.torch import save_file

        save_file(state, path)

    def save_durably(self, path: Path, state: State) -> Any:
        self.save(path, state)
        _sync(path)

    def restore(self, path: Path, state: State) -> Any:
        with self.open(path) as file:
            for name, tensor in state.items():
                tensor.copy_(file.get_tensor(name))

    def open(self, path: Path) -> Any:
        from safetensors import safe_open

        return safe_open(path, "pt")


class DcpCheckpoint(Checkpointer):
    id: ClassVar[str] = "dcp"
    name: ClassVar[str] = "DCP"
    settings: ClassVar[str] = (
        f"no_dist=True, thread_count={THREADS}; sync_files where it is durable; async_save with a stager that is kept"
    )

    def setup(self) -> None:
        self._stager = DefaultStager(StagingOptions(False, False, False, False))  # all four need CUDA

    def save(self, path: Path, state: State) -> Any:
        self._save(path, state, sync=False)

    def save_durably(self, path: Path, state: State) -> Any:
        self._save(path, state, sync=True)

    def save_async(self, path: Path, state: State) -> Callable[[], object]:
        writer = FileSystemWriter(path, sync_files=False, thread_count=THREADS)
        done: Any = dcp.async_save(dict(state), storage_writer=writer, async_stager=self._stager, no_dist=True)
        return done.result

    def restore(self, path: Path, state: State) -> Any:
        dcp.load(dict(state), storage_reader=FileSystemReader(path), no_dist=True)

    def open(self, path: Path) -> Any:
        return FileSystemReader(path).read_metadata()

    def _save(self, path: Path, state: State, *, sync: bool) -> None:
        writer = FileSystemWriter(path, sync_files=sync, thread_count=THREADS)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)

    def close(self) -> None:
        if hasattr(self, "_stager"):
            self._stager.close()


class Torchsnapshot(Checkpointer):
    id: ClassVar[str] = "torchsnapshot"
    name: ClassVar[str] = "torchsnapshot"
    settings: ClassVar[str] = "its defaults; it syncs nothing"
    does: ClassVar[frozenset[str]] = Checkpointer.does - {"save_durably"}

    @classmethod
    def missing(cls) -> str | None:
        return needs("torchsnapshot")

    def setup(self) -> None:
        import torchsnapshot

        self._library = torchsnapshot

    def save(self, path: Path, state: State) -> Any:
        self._library.Snapshot.take(str(path), self._app_state(state))

    def save_async(self, path: Path, state: State) -> Callable[[], object]:
        return self._library.Snapshot.async_take(str(path), self._app_state(state)).wait

    def restore(self, path: Path, state: State) -> Any:
        self._library.Snapshot(str(path)).restore(self._app_state(state))

    def open(self, path: Path) -> Any:
        return self._library.Snapshot(str(path)).get_manifest()

    def _app_state(self, state: State) -> dict[str, Any]:
        return {NAME: self._library.StateDict(**state)}


class TorchCheckpointing(Checkpointer):
    id: ClassVar[str] = "torch_checkpointing"
    name: ClassVar[str] = "torch_checkpointing"
    settings: ClassVar[str] = "staging into shared memory, warmed up; it syncs nothing"
    does: ClassVar[frozenset[str]] = frozenset({"save", "save_async", "restore"})

    @classmethod
    def missing(cls) -> str | None:
        return needs("torch_checkpointing")

    def setup(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False)
        self._sync = CheckpointManager(CheckpointManager.Config.with_sync_save())
        self._async_config = CheckpointManager.Config(save=AsyncCheckpointSaverConfig(staging_config=staging))
        self._async: Any = None

    def save(self, path: Path, state: State) -> Any:
        self._sync.save(str(path), {NAME: state})

    def save_async(self, path: Path, state: State) -> Callable[[], object]:
        if self._async is None:  # it starts a process
            self._async = self._async_config.build()
        done = self._async.save(str(path), {NAME: state})
        return done.result

    def restore(self, path: Path, state: State) -> Any:
        found: Any = self._sync.load(str(path), into={NAME: state})
        _copy({name: tensor for name, tensor in found[NAME].items() if tensor is not state[name]}, state)

    def close(self) -> None:
        for manager in (getattr(self, "_sync", None), getattr(self, "_async", None)):
            if manager is not None:
                manager.close()


class WarmMemory(Checkpointer):
    """A copy into memory that is there and warm, and out of it."""

    id: ClassVar[str] = "memcpy"
    name: ClassVar[str] = "memcpy"
    role: ClassVar[Role] = "limit"
    does: ClassVar[frozenset[str]] = frozenset({"save", "save_async"})

    def save(self, path: Path, state: State) -> Any:
        if not hasattr(self, "_kept"):
            self._kept = {name: torch.ones_like(tensor) for name, tensor in state.items()}
        _copy(state, self._kept)

    def save_async(self, path: Path, state: State) -> Callable[[], object]:
        self.save(path, state)
        return lambda: None


class PlainFile(Checkpointer):
    """One file: a pwrite for each tensor, and one preadv of all of them. Nothing is checked or published."""

    id: ClassVar[str] = "file"
    name: ClassVar[str] = "plain file, pwrite and preadv"
    role: ClassVar[Role] = "limit"
    does: ClassVar[frozenset[str]] = frozenset({"save", "save_durably", "restore"})

    def save(self, path: Path, state: State) -> Any:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            start = 0
            for tensor in state.values():
                start += os.pwrite(fd, tensor.numpy(), start)
        finally:
            os.close(fd)

    def save_durably(self, path: Path, state: State) -> Any:
        self.save(path, state)
        _sync(path)

    def restore(self, path: Path, state: State) -> Any:
        buffers = [memoryview(tensor.numpy()).cast("B") for tensor in state.values()]
        fd = os.open(path, os.O_RDONLY)
        try:
            start = 0
            while buffers:
                start += os.preadv(fd, buffers[:MOST_BUFFERS], start)
                del buffers[:MOST_BUFFERS]
        finally:
            os.close(fd)


MOST_BUFFERS = 64  # of a preadv: 64 MiB a call stay below what Linux reads at most at once


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _copy(source: State, target: State) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def _sync(path: Path) -> None:
    pages.flush(path)
    pages.flush(path.parent)
