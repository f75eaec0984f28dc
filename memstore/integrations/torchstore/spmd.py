"""`initialize_spmd`: ranks of torchrun, without Monarch, agree on a store.

1. The first rank of each host makes the host's folder (`folders.make`), and tells the host's other ranks where it is,
   through the process group's store, or the one at MASTER_ADDR:MASTER_PORT (`_Initialization`). It returns when all
   of them have opened it.
2. On several hosts that rank then calls `memstore.join`: all folders are one store. It waits until the first host has
   made its folder: the agent of a killed job that served there has ended then, and nobody joins that one.
3. `shutdown` on that rank removes the host's folder; on several hosts rank 0 ends the agents of all of them before.
   Ranks that still read call a barrier before, as with TorchStore.
"""

# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

import memstore
from memstore._compat import store_of_default_group
from memstore._ranks import RankCall, RankStore
from memstore.errors import MemstoreError, StoreTimeoutError
from memstore.integrations.torchstore import folders
from memstore.integrations.torchstore.api import DEFAULT_TORCHSTORE_NAME, client, end_with, reset_client
from memstore.integrations.torchstore.strategy import HostStrategy, LocalRankStrategy, TorchStoreStrategy

_TRANSPORTS = ("ipc", "tcp", "metatls", "metatls-hostname")
_BETWEEN_LOOKS = 0.005  # seconds
_AGENT_ENDS_WITHIN = 30.0

_counts: dict[str, Iterator[int]] = {}  # how often this process has initialized a store of this name


@dataclass(frozen=True)
class SPMDEnv:
    """The rank of this process, and the address at which the ranks meet.

    Attributes:
        rank: this rank, of all hosts' ranks, from 0.
        local_rank: this rank, of its host's ranks, from 0.
        world_size: how many ranks there are.
        local_world_size: how many of them are on each host.
        master_addr: the host at which they meet.
        master_port: the port there.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int

    @property
    def num_hosts(self) -> int:
        """Returns how many hosts there are."""
        return self.world_size // self.local_world_size

    @property
    def group_rank(self) -> int:
        """Returns the number of this host."""
        return self.rank // self.local_world_size

    @classmethod
    def from_env(cls, *, master_addr: str | None = None, master_port: int | None = None) -> SPMDEnv:
        """Reads the variables that torchrun sets. The arguments are used for variables that aren't set.

        Raises:
            RuntimeError: a variable is missing.
            ValueError: hosts have unequal numbers of ranks.
        """
        world_size, local_world_size = int(_variable("WORLD_SIZE")), int(_variable("LOCAL_WORLD_SIZE"))
        if world_size % local_world_size:
            raise ValueError(f"WORLD_SIZE is {world_size}, no multiple of LOCAL_WORLD_SIZE, {local_world_size}")
        return cls(
            int(_variable("RANK")),
            int(_variable("LOCAL_RANK")),
            world_size,
            local_world_size,
            _variable("MASTER_ADDR", master_addr),
            int(_variable("MASTER_PORT", None if master_port is None else str(master_port))),
        )


def _variable(name: str, default: str | None = None) -> str:
    value = os.environ.get(name, default)
    if value is None:
        raise RuntimeError(f"initialize_spmd needs {name} in the environment, as torchrun sets it; or give env=")
    return value


async def initialize(
    strategy: TorchStoreStrategy | None = None,
    store_name: str = DEFAULT_TORCHSTORE_NAME,
    *,
    env: SPMDEnv | None = None,
    rendezvous_timeout: timedelta = timedelta(seconds=120),
    transport: str = "ipc",
    monarch_port: int = 26600,
) -> None:
    """Creates one store for the ranks of a job. Every rank calls it, and later `shutdown`.

    Args:
        strategy: a HostStrategy or a LocalRankStrategy, which TorchStore requires. It has no effect.
        store_name: as in `initialize`.
        env: the rank of this process; None reads it from torchrun's environment.
        rendezvous_timeout: how long the ranks wait for each other.
        transport: accepted without effect. Between hosts, bytes are sent as with `memstore.join`.
        monarch_port: accepted without effect.

    Raises:
        RuntimeError: `strategy` is neither of the two, or a variable of torchrun is missing.
        ValueError: `transport` isn't one of TorchStore's, or hosts have unequal numbers of ranks.
        TypeError: another argument is none of what it should be.
        StoreTimeoutError: not all ranks of this host have called it in time.
    """
    if not isinstance(strategy, HostStrategy | LocalRankStrategy):
        raise RuntimeError(f"initialize_spmd takes a HostStrategy or a LocalRankStrategy, and not {strategy!r}")
    if transport not in _TRANSPORTS:
        raise ValueError(f"transport is one of {', '.join(_TRANSPORTS)}, and not {transport!r}")
    _check(store_name, env, rendezvous_timeout)
    found = SPMDEnv.from_env() if env is None else env
    call = await asyncio.to_thread(_Initialization, store_name, found, rendezvous_timeout)
    await asyncio.to_thread(call.find_or_make, store_name)
    reset_client(store_name)
    await client(store_name)
    await asyncio.to_thread(call.wait_for_others)


def _check(store_name: object, env: object, timeout: object) -> None:
    folders.check_name(store_name)
    if env is not None and not isinstance(env, SPMDEnv):
        raise TypeError(f"env is an SPMDEnv, or None to read torchrun's environment, and not {env!r:.100}")
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"rendezvous_timeout is a datetime.timedelta, as timedelta(seconds=120), and not {timeout!r:.100}"
        )
    if timeout < timedelta():
        raise ValueError(f"rendezvous_timeout is a time of 0 or more, and not {timeout!r}")


class _HostFolder(msgspec.Struct, frozen=True):
    """The folder of a host, as its first rank tells the others; or why it has none."""

    path: str = ""
    error: str | None = None


_FOLDER, _SEED, _OPENED = "folder", "seed", "opened"  # words
_LATE = {
    _FOLDER: "the first rank of this host has not called initialize_spmd",
    _SEED: "the first rank of the first host has not called initialize_spmd",
    _OPENED: "not all ranks of this host have called initialize_spmd",
}


class _Initialization(RankCall):
    """One `initialize_spmd` of all ranks of a job. Words of one host only have the host's number behind them."""

    def __init__(self, name: str, env: SPMDEnv, timeout: timedelta) -> None:
        self._env, self._deadline = env, time.monotonic() + timeout.total_seconds()
        self._folder, self._opened = f"{_FOLDER}/{env.group_rank}", f"{_OPENED}/{env.group_rank}"
        count = next(_counts.setdefault(name, itertools.count(1)))
        # The count is this process's, and not that of one store of torch: each call may find another one.
        host = RankStore(_store_of_ranks(env, timeout), env.local_rank, env.local_world_size, token="torchstore")
        super().__init__(host, f"{name}/{count}")

    def late(self, missing: Sequence[int], word: str, waited: float) -> StoreTimeoutError:
        return StoreTimeoutError(f"{_LATE[word.partition('/')[0]]} within rendezvous_timeout")

    def find_or_make(self, name: str) -> None:
        """Makes the folder, on the first rank of each host. The host's other ranks find it."""
        env = self._env
        if env.local_rank:
            said = self.hear(self._folder, _HostFolder, self._deadline)
            if said.error is not None:
                raise MemstoreError(f"the first rank of this host failed: {said.error}")
            folders.follow(name, said.path)
            return
        try:
            path = folders.make(name)
            if env.num_hosts > 1:
                if env.group_rank:
                    self.hear(_SEED, bool, self._deadline)
                else:
                    self.say(_SEED, True)
                cluster = memstore.join(path, timeout=max(self._deadline - time.monotonic(), 0.0))
                end_with(name, JoinedHost(cluster, is_seed=env.rank == 0))
        except BaseException as error:
            folders.leave(name)
            self.say(self._folder, _HostFolder(error=f"{type(error).__name__}: {error}"))
            raise
        self.say(self._folder, _HostFolder(path))

    def wait_for_others(self) -> None:
        """Returns on the first rank when all have opened the store: it may remove it soon."""
        if self.rank:
            self.say(f"{self._opened}/{self.rank}", True)
        else:
            self.hear_all(self._opened, bool, self._deadline)


@dataclass(frozen=True, slots=True)
class JoinedHost:
    """A host of a store on several hosts, as its first rank ends it."""

    cluster: memstore.Cluster
    is_seed: bool

    async def end(self) -> None:
        """Ends the agents of all hosts, on the first rank of all. The first ranks of other hosts wait for theirs."""
        if self.is_seed:
            await asyncio.to_thread(self.cluster.stop)
            return
        deadline = time.monotonic() + _AGENT_ENDS_WITHIN
        while folders.is_served(self.cluster.root) and time.monotonic() < deadline:
            await asyncio.sleep(_BETWEEN_LOOKS)


def _store_of_ranks(env: SPMDEnv, timeout: timedelta) -> Any:
    if dist.is_initialized() and dist.get_world_size() == env.world_size:
        return store_of_default_group()
    url = f"tcp://{env.master_addr}:{env.master_port}"
    found: Any = next(iter(dist.rendezvous(url, env.rank, env.world_size, timeout=timeout)))
    _kept.append(found[0])  # on rank 0 it is the server
    return found[0]


_kept: list[Any] = []
