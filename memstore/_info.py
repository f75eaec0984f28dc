"""Nouns that a store tells about itself and its entries; and progress that `progress=True` shows."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from memstore._wording import ROWS, age, count_of, runs, shown, size, table_html, table_text
from memstore.errors import CorruptionError

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Kind = Literal["inline", "segment", "adopted", "sharded", "dataset", "buffer"]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A part of a tensor that one rank has put.

    Attributes:
        offsets: where the part begins in each dimension of the tensor, in elements.
        shape: of the part, in elements.
        rank: the rank that put it; one of them, if several ranks held the same part.
        file: the path of its bytes.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    file: str


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """A tensor of an entry.

    Attributes:
        name: its path: ("a", "b") nested; (3, "exp_avg") for int keys.
        dtype: of its elements.
        shape: of the whole tensor.
        nbytes: of the whole tensor.
        shards: its parts, in the order of their offsets, if ranks have put them by `put_sharded`: a plain tensor is one
            part. Empty for other entries, and for tensors without elements.
    """

    name: tuple[str | int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    shards: tuple[ShardInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """A version of a key.

    Attributes:
        key: the key.
        version: its version.
        kind: where the bytes are: "inline" in the catalog, "segment" in a file of the store, "adopted" in attached
            files, "sharded" in files of several ranks. The rows of a "dataset" or "buffer" are written in place; its
            leaves and `nbytes` are those of its whole capacity.
        nbytes: of its tensors. In a segment also of the pads between them; of a sharded entry each part once.
        created: when it was put, in Unix seconds.
        structure: what the value is, in a few words for people.
        leaves: its tensors.
        files: the paths of its bytes.
        owner: of a store on several hosts, the one that owns the key: its name and address. Else None.
        recovered: the host that owned the key was removed, and this version is the newest that the others had. It is
            the newest of all, unless another host was lost as well, or did not answer.
        spilled: its bytes, or some of them, were moved to the folder of `spill`.
    """

    key: str
    version: int
    kind: Kind
    nbytes: int
    created: float
    structure: str
    leaves: tuple[LeafInfo, ...]
    files: tuple[str, ...]
    owner: str | None = None
    recovered: bool = False
    spilled: bool = False

    def __str__(self) -> str:
        moved = ", moved to a disk" if self.spilled else ""
        return f"{self.key!r} version {self.version}: {self.structure}, {self.kind}, {size(self.nbytes)}{moved}"

    def __repr__(self) -> str:
        return f"<memstore.EntryInfo {self}>"

    def _repr_html_(self) -> str:
        columns = ("leaf", "dtype", "shape", "size", "ranks")[: 5 if self.kind == "sharded" else 4]
        rows = (_cells(leaf)[: len(columns)] for leaf in self.leaves)
        cut = f"; the first {ROWS} leaves are shown" if len(self.leaves) > ROWS else ""
        return table_html(columns, rows, f"memstore.EntryInfo {self}{cut}")


def _cells(leaf: LeafInfo) -> tuple[str, ...]:
    name, dtype = ".".join(map(str, leaf.name)), str(leaf.dtype).removeprefix("torch.")
    return name, dtype, str(list(leaf.shape)), size(leaf.nbytes), runs([one.rank for one in leaf.shards])


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    """A look at a follower, and at the key that it follows.

    Attributes:
        version: that the module has; 0: none was loaded yet.
        newest: the version of the key in the store; None: there is no such key now, or no store.
        lag: seconds since the newest version was put, if the module doesn't have it; else 0.0.
        loads: how many versions were loaded.
        copied: seconds that the last copy took, for which requests waited unless there is a spare module.
        error: why the newest version was not loaded; None: the last load went well.
    """

    version: int
    newest: int | None
    lag: float
    loads: int
    copied: float
    error: Exception | None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The sizes of a store, in bytes, and how much this Store object did.

    Attributes:
        keys: how many keys there are.
        live_bytes: of the files of current versions.
        reusable_bytes: of files that are retired and held by nobody. The next puts use them again.
        pinned_bytes: of files that are retired, and still held by a process or by a lease.
        filling_bytes: of files that are being written.
        pending_bytes: of the parts of sharded puts that wait for other ranks.
        spilled_bytes: of the files that were moved to the folder of `spill`, and take no memory.
        capacity: how many bytes all files may take together; None: there is no limit.
        catalog_bytes: of the catalog, which has the values that have no file of their own.
        huge_page_bytes: of this process's mappings, as far as they are on huge pages.
        puts: how many values this Store has put.
        gets: how many values this Store has got.
        pinned_by: the pids of the processes that hold retired files, as far as the kernel says.
    """

    keys: int
    live_bytes: int
    reusable_bytes: int
    pinned_bytes: int
    filling_bytes: int
    pending_bytes: int
    spilled_bytes: int
    capacity: int | None
    catalog_bytes: int
    huge_page_bytes: int
    puts: int
    gets: int
    pinned_by: tuple[int, ...]

    def __repr__(self) -> str:
        return table_text((), self._rows(), "memstore.StoreStats:")

    def _repr_html_(self) -> str:
        return table_html(("", "", ""), self._rows(), "StoreStats")

    def _rows(self) -> tuple[tuple[str, str, str], ...]:
        return (
            ("keys", f"{self.keys:,}", ""),
            *rows_of_space(self),
            ("huge pages", size(self.huge_page_bytes), "of this process's mappings"),
            ("puts", f"{self.puts:,}", "by this Store"),
            ("gets", f"{self.gets:,}", "by this Store"),
        )


def rows_of_space(stats: StoreStats) -> tuple[tuple[str, str, str], ...]:
    """Returns the rows of a table of the space that a store takes: names, sizes, and what they mean."""
    room = "no capacity set" if stats.capacity is None else f"of a capacity of {size(stats.capacity)}"
    by = f" by pid {', '.join(map(str, stats.pinned_by))}" if stats.pinned_by else ""
    spilled = [("spilled", size(stats.spilled_bytes), "moved to a disk")] if stats.spilled_bytes else []
    return (
        ("live", size(stats.live_bytes), room),
        ("reusable", size(stats.reusable_bytes), "replaced, and kept for the next puts"),
        ("pinned", size(stats.pinned_bytes), f"replaced, and held{by}"),
        ("filling", size(stats.filling_bytes), "being written"),
        ("pending", size(stats.pending_bytes), "parts of sharded puts that wait for other ranks"),
        *spilled,
        ("catalog", size(stats.catalog_bytes), "with the small values, which have no file of their own"),
    )


@dataclass(frozen=True, slots=True)
class QuotaInfo:
    """A quota, as `Store.set_quota` has set it.

    Attributes:
        prefix: of the keys that it is for.
        quota: how many bytes they may take together.
        used: how many they take.
    """

    prefix: str
    quota: int
    used: int


@dataclass(frozen=True, slots=True)
class PendingInfo:
    """A sharded put that waits for the parts of other ranks.

    Attributes:
        key: the key that is put.
        attempt: the text by which the ranks of this put find each other.
        world_size: how many ranks take part.
        ranks: those whose parts are there.
        nbytes: of their files.
        expires: when it is given up, in Unix seconds.
    """

    key: str
    attempt: str
    world_size: int
    ranks: tuple[int, ...]
    nbytes: int
    expires: float

    def __repr__(self) -> str:
        there = f"{'rank' if len(self.ranks) == 1 else 'ranks'} {runs(self.ranks)} of {self.world_size}"
        left = age(2 * time.time() - self.expires)
        return (
            f"<memstore.PendingInfo {self.key!r} attempt {self.attempt!r}: {there}, {size(self.nbytes)}, "
            f"expires in {left}>"
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The findings of `Store.verify`.

    Attributes:
        checked: keys whose bytes were compared with checksums, and fit.
        unchecked: keys whose record and header are intact, but whose bytes have no checksums.
        damaged: errors; each names the key, if there is one, the file, and what is wrong with it.
        ok: nothing is damaged.
    """

    checked: int
    unchecked: int
    damaged: tuple[CorruptionError, ...]
    ok: bool

    def __repr__(self) -> str:
        return table_text(("key", "file", "damage"), self._rows(), self._caption()) if self.damaged else self._caption()

    def _repr_html_(self) -> str:
        return table_html(("key", "file", "damage"), self._rows(), self._caption())

    def _caption(self) -> str:
        found = shown(len(self.damaged), "damaged", "damaged") if self.damaged else "nothing is damaged"
        return f"memstore.VerifyReport: {found}; {self.checked:,} checked, {self.unchecked:,} without checksums"

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        return ((one.key or "", one.path or "", one.detail) for one in self.damaged)


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The results of `memstore.repair`.

    Attributes:
        recovered: the keys that the store has now, sorted.
        lost: keys that it had, as far as is known, and no longer has.
        swept_bytes: of files that were freed.
    """

    recovered: tuple[str, ...]
    lost: tuple[str, ...]
    swept_bytes: int

    def __repr__(self) -> str:
        return table_text(("lost",), self._rows(), self._caption()) if self.lost else self._caption()

    def _repr_html_(self) -> str:
        return table_html(("lost",), self._rows(), self._caption())

    def _caption(self) -> str:
        recovered, lost = count_of(len(self.recovered), "key", "keys"), shown(len(self.lost), "lost", "lost")
        return f"memstore.RepairReport: {recovered} recovered, {lost}; {size(self.swept_bytes)} given back"

    def _rows(self) -> Iterator[tuple[str]]:
        return ((key,) for key in self.lost)


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """A store of this machine, as its files and /proc tell.

    Attributes:
        root: the folder.
        nbytes: what the files of its values and its catalog take.
        created: when it was made, in Unix seconds.
        changed: when a key was put or deleted last, in Unix seconds.
        pids: the processes that have it open. Those of other users and containers may be missing.
        is_member: it is, or was, one host's part of a store on several hosts.
        is_served: an agent serves it to other hosts now.
    """

    root: str
    nbytes: int
    created: float
    changed: float
    pids: tuple[int, ...]
    is_member: bool
    is_served: bool

    def __repr__(self) -> str:
        return f"memstore.StoreSummary: {self.root}, {self.describe()}"

    def describe(self) -> str:
        """Says size, age and who has it open in a few words."""
        opened = f"open in {count_of(len(self.pids), 'process', 'processes')}" if self.pids else "not open"
        member = ", served to other hosts" if self.is_served else ", a member of a cluster" if self.is_member else ""
        return f"{size(self.nbytes)}, changed {age(self.changed)} ago, {opened}{member}"


@dataclass(frozen=True, slots=True)
class HostStatus:
    """A host that serves a store, as it says itself.

    Attributes:
        address: where it listens, as ``tcp://IP:PORT``.
        name: its host name.
        epoch: of the members that it knows; all hosts come to the same one.
        incarnation: how often its index process was started.
        alive: whether it has answered. If not, `trouble` says why, and the rest is unknown.
        keys: how many keys it owns.
        live_bytes: of the values that lie there.
        transport: how large values are sent between it and hosts with the same transport: "tcp", "rdma" or "monarch".
        sent: bytes that its index process has sent over the network since it was started. They are its answers to
            other hosts, and what they fetch there.
        received: bytes that its index process has received since then. What the host's own processes fetch counts as
            `sent` of the host that it comes from.
        memstore: the version of memstore.
        torch: the version of torch.
        monarch: the version of Monarch; empty: it isn't installed.
        trouble: why the host has not answered; empty: it has.
        draining: what it still has, and what is in the way, if it is drained; empty: it isn't.
        lacking: how many keys it owns that are to have a replica on a second host, and have none.
        spilled_bytes: of the values there that were moved to the folder of `spill`, and take no memory.
    """

    address: str
    name: str
    epoch: int = 0
    incarnation: int = 0
    alive: bool = False
    keys: int = 0
    live_bytes: int = 0
    transport: str = ""
    sent: int = 0
    received: int = 0
    memstore: str = ""
    torch: str = ""
    monarch: str = ""
    trouble: str = ""
    draining: str = ""
    lacking: int = 0
    spilled_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The hosts that serve one store.

    Attributes:
        seed: the address of the host that decides who is a member.
        epoch: of the members, as the host that was asked knows it.
        hosts: the members, each as it says itself.
        deputies: the addresses of the hosts that can be the seed without loss, since they have a copy of its directory.
        recovering: of each host that was removed and whose groups aren't back yet: who recovers them, and what for it
            waits; and of each that comes back, what it has brought, and what stays away.
        lost: keys that were lost with a removed host, and groups that it owned, of which what it has put itself was
            lost; each with that host. 100 of them at most.
    """

    seed: str
    epoch: int
    hosts: tuple[HostStatus, ...]
    deputies: tuple[str, ...] = ()
    recovering: tuple[str, ...] = ()
    lost: dict[str, str] = field(default_factory=dict[str, str])

    def __repr__(self) -> str:
        return table_text(_HOST_COLUMNS, map(_host_cells, self.hosts), f"memstore.{self._caption()}")

    def _repr_html_(self) -> str:
        return table_html(_HOST_COLUMNS, map(_host_cells, self.hosts), self._caption())

    def _caption(self) -> str:
        alive = sum(host.alive for host in self.hosts)
        return f"ClusterStatus: {alive} of {shown(len(self.hosts), 'host', 'hosts')} alive, seed {self.seed}"


_HOST_COLUMNS = ("address", "name", "alive", "keys", "live", "by", "sent", "received")


def _host_cells(host: HostStatus) -> tuple[str, ...]:
    if not host.alive:
        return host.address, host.name, f"no: {host.trouble}", *[""] * 5
    sizes = size(host.live_bytes), host.transport, size(host.sent), size(host.received)
    return host.address, host.name, "yes", f"{host.keys:,}", *sizes


# --- Progress: a bar on a terminal, else lines of the logger ---------------------------------------------------------


_log = logging.getLogger("memstore")

_WIDTH = 30  # characters
_BAR_PAUSE, _LINE_PAUSE = 0.1, 10.0  # seconds between two looks of a bar, and between two lines


def shown_progress(progress: Progress | bool | None, what: str, *, rank: int = 0) -> Progress | None:
    """Returns what is called with the bytes done and those in all; None if nobody wants to know.

    Args:
        progress: a caller's function, or True.
        what: is being done: "writing".
        rank: of several, rank 0 alone shows something; a function is each rank's own.
    """
    if callable(progress):
        return progress
    if progress is not True or rank:
        return None
    if sys.stderr is not None and sys.stderr.isatty():
        return Shown(what).tell
    return Shown(what, _log.info).tell


class Shown:
    """A bar in standard error, or lines.

    Args:
        what: is being done.
        line: writes a line; None: there is a terminal, for a bar.
    """

    def __init__(self, what: str, line: Callable[[str], object] | None = None) -> None:
        self._what, self._line = what, line
        self._started = time.monotonic()
        self._told = self._started if line else 0.0  # a bar is there at once

    def tell(self, done: int, total: int) -> None:
        """Draws the bar anew, or writes a line, if it is time to, or if all is done."""
        now = time.monotonic()
        if done < total and now - self._told < (_BAR_PAUSE if self._line is None else _LINE_PAUSE):
            return
        self._told = now
        part = done / total if total else 1.0
        if self._line is not None:
            self._line(f"{self._what}: {self._numbers(done, total).strip()}")
            return
        bar = "█" * round(_WIDTH * part)
        sys.stderr.write(f"\r{self._what} {bar:<{_WIDTH}} {self._numbers(done, total):<60}")
        sys.stderr.write("\n" if done >= total else "")
        sys.stderr.flush()

    def _numbers(self, done: int, total: int) -> str:
        taken = max(time.monotonic() - self._started, 1e-9)
        part = done / total if total else 1.0
        left = f", {_duration(taken * (1 - part) / part)} left" if 0 < part < 1 else f" in {_duration(taken)}"
        return f"{part:4.0%}  {size(done)} of {size(total)}  {size(done / taken)}/s{left}"


def _duration(seconds: float) -> str:
    """Returns seconds as text: "9 s", "1:05", "2:00:00"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
