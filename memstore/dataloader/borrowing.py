"""The side of blocks that gets batches: the process with the DataLoader. It maps each block once."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from multiprocessing import process
from typing import Any

import torch

from memstore.dataloader.blocks import HELD, OUT, Block, tensor_over
from memstore.engine import syscalls
from memstore.errors import VersionGoneError
from memstore.late_imports import Hooks, around_forks
from memstore.structure import modes

Reference = tuple[int, int, bytes, int]  # pid and fd of the worker, token, size
Place = tuple[int, int, int, int]  # lap, ticket, start, size
Shown = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]  # dtype, offset, shape, stride

_mapped: weakref.WeakValueDictionary[bytes, Block] = weakref.WeakValueDictionary()  # by token
# What stays mapped between two batches, as long as anybody has the Process of the worker: its loader has.
_kept: weakref.WeakKeyDictionary[Any, list[Block]] = weakref.WeakKeyDictionary()


def _before_fork() -> None:
    _kept.clear()  # the child would keep it in memory, and so would the parent what is lost by the fork


around_forks(Hooks(_before_fork, lambda: None, lambda: None))


def receive(reference: Reference, place: Place, shown: Shown) -> torch.Tensor:
    """The tensor that a worker has sent. Its memory is the worker's again when nothing refers to it any more.

    Raises:
        VersionGoneError: the worker is dead, or the tensor was received before: a batch is received once.
    """
    block = _mapped.get(reference[2]) or _map(reference)
    lap, ticket, start, size = place
    tickets = block.tickets
    if block.lap != lap or tickets[ticket] != OUT:
        raise VersionGoneError("a batch of a DataLoader's worker is unpickled once, and this one was before")
    tickets[ticket] = HELD
    with modes.put_aside():
        return tensor_over(block.part(start, size, tickets.__setitem__, ticket), *shown)


def _map(reference: Reference) -> Block:
    pid, number, token, size = reference
    try:
        fd = syscalls.open_file_of(pid, number)
    except OSError as error:
        raise VersionGoneError(f"process {pid}, which has read this batch, has ended: {error}") from error
    try:
        block = Block(fd, size) if syscalls.size_of(fd) == size else None
    finally:
        syscalls.close(fd)
    if block is None or bytes(block.token) != token:
        raise VersionGoneError(f"process {pid}, which has read this batch, has ended, or has no room for it any more")
    block.populate()
    _mapped[token] = block
    worker = _child(pid)
    if worker is not None:
        _kept.setdefault(worker, []).append(block)
    return block


def _child(pid: int) -> Any:
    """The Process, if it is a child of this one. (`active_children` would reap those that their loader waits for.)"""
    return next((child for child in tuple(process._children) if child.pid == pid), None)  # type: ignore[attr-defined]
