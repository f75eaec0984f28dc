"""What a store tells about itself and its entries. Nouns only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memstore.errors import CorruptionError
from memstore.wording import shown, size, table_html

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Kind = Literal["inline", "segment", "adopted", "sharded", "mutable"]


@dataclass(frozen=True, slots=True)
class LeafInfo:
    """A tensor of an entry. `name` is its path: ("a", "b") nested; (3, "exp_avg") for int keys."""

    name: tuple[str | int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """A version of a key. `created` is in Unix seconds, `files` are the paths of its bytes."""

    key: str
    version: int
    kind: Kind
    nbytes: int
    created: float
    structure: str
    leaves: tuple[LeafInfo, ...]
    files: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key!r} version {self.version}: {self.structure}, {self.kind}, {size(self.nbytes)}"

    def __repr__(self) -> str:
        return f"<memstore.EntryInfo {self}>"

    def _repr_html_(self) -> str:
        rows = (
            (".".join(map(str, leaf.name)), str(leaf.dtype)[len("torch.") :], str(list(leaf.shape)), size(leaf.nbytes))
            for leaf in self.leaves
        )
        return table_html(("leaf", "dtype", "shape", "size"), rows, f"{self}; {shown(len(self.leaves), 'leaves')}")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds, in bytes, and what this process did.

    `pending_bytes` are parts of sharded puts that wait for other ranks.
    `reusable_bytes` are retired and held by nobody, `pinned_bytes` retired and held or leased; `pinned_by` are the
    pids that hold them, as far as the kernel tells. `huge_page_bytes` counts this process's mappings.
    """

    keys: int
    live_bytes: int
    reusable_bytes: int
    pinned_bytes: int
    filling_bytes: int
    pending_bytes: int
    capacity: int | None
    catalog_bytes: int
    huge_page_bytes: int
    puts: int
    gets: int
    pinned_by: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PendingInfo:
    """A sharded put that waits for the parts of other ranks.

    Attributes:
        ranks: whose parts are there.
        nbytes: of their files.
        expires: when it is given up, in Unix seconds.
    """

    key: str
    attempt: str
    world_size: int
    ranks: tuple[int, ...]
    nbytes: int
    expires: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `Store.verify` found.

    Attributes:
        checked: keys whose bytes were compared with checksums, and fit.
        unchecked: keys whose record and header are whole, but which have no checksums of their bytes.
        damaged: each names the key, where there is one, the file, and what is wrong with it.
        ok: nothing is damaged.
    """

    checked: int
    unchecked: int
    damaged: tuple[CorruptionError, ...]
    ok: bool


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What `memstore.repair` did.

    Attributes:
        recovered: the keys that the store has now, sorted.
        lost: keys that it had, as far as is known, and has no more.
        swept_bytes: of files that were given back.
    """

    recovered: tuple[str, ...]
    lost: tuple[str, ...]
    swept_bytes: int
