"""Questions of a root to other hosts, where its store goes on beyond this one; and what a get is given.

A root that nobody serves has `membership` 0 in its catalog's counters, and its `owners` are `Alone`. Of a served one:

- who finds no record, or one that lies on other hosts, asks `Elsewhere` (`get.py`, `index.py`);
- who changes keys asks whether this host owns them (`root.owners.membership_for`, in `put.publish`). If it does, the
  commit compares the counters' `membership` with the number under which that was so. If not, `Elsewhere.commit` claims
  what nobody owns, and commits here or there.

A get is given a `MappedEntry`, a version of a key and its bytes in memory; those that still lie on other hosts are its
`Absent`. The engine knows the questions only: memstore/distributed/client answers them.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import msgspec

from memstore.engine.catalog.tables import AttemptOutcome, PendingPart, Transaction
from memstore.engine.files.mapping import Mapping
from memstore.engine.files.segments import SealedSegment
from memstore.engine.format.records import Record, SegmentExtent
from memstore.engine.protocols.attempts import AttemptFailure, Merge, Participant
from memstore.engine.protocols.change import Change
from memstore.engine.root.roots import Root
from memstore.errors import CrossHostError

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class WaitState:
    """Where a begun wait stands.

    Attributes:
        version: the newer one; 0: this host owns the key by now; None: there is none yet.
        again: seconds after which it has to go on, also if nobody was told anything.
    """

    version: int | None
    again: float


IN_A_THREAD = WaitState(None, 0.0)  # what is to be done next may take time


class BegunWait(Protocol):
    """A wait for a newer version that no thread waits for."""

    def go_on(self, deadline: float | None) -> WaitState:
        """To be called at first, when the wait's `told` was called, and after `again`. One at a time.

        Args:
            deadline: monotonic, for a connection; None: it must not block, and says IN_A_THREAD if it would.

        Raises:
            As `Elsewhere`; StoreClosedError.
        """
        ...

    def close(self) -> None:
        """Nobody wants to know any more. It doesn't block."""
        ...


class Elsewhere(Protocol):
    """One a root and process; thread-safe. Deadlines are monotonic; to ask a host takes some time, and gets it.

    Where `deadline` is None, one that the store's mutex is waited for, once a process at most, is some seconds.

    All raise HomeUnavailableError and StaleMembershipError, and CrossHostError where the keys of one call are to be of
    one moment and have several owners.
    """

    def take_in(self, deadline: float | None = None) -> None:
        """Reads anew what the catalog says of who owns what."""
        ...

    @property
    def is_alone(self) -> bool:
        """Returns False: the store has other hosts."""
        ...

    @property
    def membership(self) -> int:
        """Returns the counters' number of what was taken in last; 0 if nothing was."""
        ...

    def membership_for(self, keys: Sequence[bytes], deadline: float | None = None) -> int | None:
        """Returns `membership` if this host owned all of them then, and may change them; else None.

        Nobody is asked. What isn't known yet is read in the catalog.
        """
        ...

    def replicates(self, keys: Sequence[bytes]) -> bool:
        """Returns whether values of some of these keys are to lie on a second host: `commit` sees to that.

        It is of the same moment as `membership`.
        """
        ...

    def check_one_owner(self, keys: Sequence[bytes], deadline: float) -> None:
        """Raises CrossHostError if this process knows that the keys have several owners.

        The directory is asked then, and not else: a group may have been handed over since.
        """
        ...

    def known_owner(self, key: bytes) -> bytes | None:
        """Returns the id of the member that owns the key, as far as this host knows. Nobody is asked."""
        ...

    def is_recovered(self, key: bytes, version: int) -> bool:
        """Returns whether the host that owned the key was removed since the version was put."""
        ...

    def owners_of(self, keys: Sequence[bytes], deadline: float) -> list[bytes | None]:
        """Finds the members that own keys; None: nobody does."""
        ...

    def cluster(self) -> bytes:
        """Returns the id that all hosts of the store have in common."""
        ...

    def name_of(self, member: bytes) -> str:
        """Returns a member's name and address, for errors."""
        ...

    def commit(self, changes: Sequence[Change], deadline: float) -> list[int]:
        """Commits changes as `commit` in `put.py`, wherever the owner is. Raises UnknownOutcomeError too."""
        ...

    def is_member(self, member: bytes) -> bool:
        """Returns whether it is a host of the store now."""
        ...

    def is_unsealed(self, key: bytes, segment: int, put_id: int, deadline: float) -> bool:
        """Returns whether the key still has the mutable entry of this host's segment, and no seal of it is under way.

        Raises HomeUnavailableError, too, where that can't be said.
        """
        ...

    def hold(
        self,
        keys: Sequence[bytes],
        deadline: float,
        *,
        may_lock: bool = True,
        lazily: bool = False,
        max_age: float | None = None,
    ) -> list[MappedEntry | None]:
        """Maps entries as `protocols.hold`. What lies elsewhere is fetched, once a host, and mapped from the copy.

        Args:
            lazily: what isn't here may be fetched when it is read.
            max_age: seconds for which what this process has looked up may be taken for the present.
        """
        ...

    def hold_one(
        self, key: bytes, version: int, deadline: float, *, may_lock: bool = True, lazily: bool = False
    ) -> MappedEntry | None:
        """Maps one version of a key, the present one or one that is kept. Returns None if it can't be read.

        Args:
            lazily: as of `hold`.
        """
        ...

    def versions(self, key: bytes, deadline: float) -> list[int]:
        """Returns the versions of a key that can be read, sorted; none if there is no such key."""
        ...

    def version_records(self, key: bytes, deadline: float) -> list[Record]:
        """Returns the records of these versions; nothing is fetched."""
        ...

    def seen_from_here(self, member: bytes, record: Record) -> Record:
        """Returns the record that a member's catalog has of a version, as this host's would have it."""
        ...

    def hold_version(self, key: bytes, record: Record, deadline: float, *, lazily: bool) -> MappedEntry | None:
        """Maps one version, whose bytes lie elsewhere. Returns None if it is gone."""
        ...

    def records(self, keys: Sequence[bytes], deadline: float) -> list[Record | None]:
        """Returns the records; nothing is fetched. Keys of several owners are not of one moment."""
        ...

    def keys(
        self, prefix: bytes, after: bytes, limit: int, deadline: float, silent: dict[bytes, str] | None = None
    ) -> list[tuple[bytes, int]]:
        """Returns the next keys of all owners in order, with their versions; none if there are no more.

        Args:
            silent: members that gave no answer, with their names: they aren't asked, and others that give none are
                added. None: all are to answer.
        """
        ...

    def wait(self, key: bytes, newer_than: int, deadline: float) -> int | None:
        """Waits for a newer version. Returns None if this host owns it by now, or the deadline is over."""
        ...

    def wait_any(self, prefix: bytes, newer_than: abc.Mapping[bytes, int] | int, deadline: float) -> dict[bytes, int]:
        """Waits until keys with a prefix have newer versions, and returns these. Raises StoreTimeoutError."""
        ...

    def begin_wait_any(
        self, prefix: bytes, newer_than: abc.Mapping[bytes, int] | int, told: Callable[[], None], deadline: float
    ) -> BegunWait:
        """Begins to wait for one of these keys, and returns at once: see `wait_any`, `begin_wait`."""
        ...

    def wait_any_of(
        self, keys: abc.Sequence[bytes], newer_than: abc.Mapping[bytes, int] | int, deadline: float
    ) -> None:
        """Waits until one of these keys may have a newer version, or the deadline is over."""
        ...

    def begin_wait_any_of(
        self,
        keys: abc.Sequence[bytes],
        newer_than: abc.Mapping[bytes, int] | int,
        told: Callable[[], None],
        deadline: float,
    ) -> BegunWait:
        """Begins to wait for one of these keys, and returns at once: see `wait_any_of`, `begin_wait`."""
        ...

    def begin_wait(self, key: bytes, newer_than: int, told: Callable[[], None], deadline: float) -> BegunWait:
        """Begins to wait, and returns at once: see `wait`.

        Args:
            deadline: after which nobody wants to know; it does not end by itself then.
            told: called, by any thread, when there is news. It must not wait.
        """
        ...

    # --- sharded puts -------------------------------------------------------------------------------------------------

    def prepare(
        self, member: Participant, expect: int | None, segment: SealedSegment | None, content: bytes, deadline: float
    ) -> AttemptOutcome | Participant:
        """Gives a rank's part to the owner of its key. Returns the member with the attempt's number and owner.

        Args:
            content: what the part says of the value.
        """
        ...

    def outcome_of(
        self, member: Participant, merge: Merge, waits_until: float, deadline: float
    ) -> AttemptOutcome | None:
        """Returns the outcome of an attempt: see `protocols.outcome_of`."""
        ...

    def give_up(self, member: Participant, failure: AttemptFailure, deadline: float) -> AttemptOutcome:
        """Ends an attempt: see `protocols.give_up`."""
        ...

    def pending(self, key: bytes | None, deadline: float) -> list[tuple[PendingPart, float]]:
        """Returns the parts that wait: see `protocols.pending_parts`."""
        ...

    def close(self) -> None: ...


def elsewhere_of(root: Root) -> Elsewhere:
    """Returns the way to other hosts that this process has for a root. The first call makes it, by `root.connect`.

    The engine imports nothing that is above it, so `listing` gives that to each root that it opens.
    """
    if not root.owners.is_alone:
        return cast(Elsewhere, root.owners)
    assert root.connect is not None, "who opened this root asks no other hosts"
    made = root.connect(root)  # it imports: not under the guard
    with root.guard:
        is_first = root.owners.is_alone  # else another thread was
        if is_first:
            root.owners = made
    if not is_first:
        made.close()
    return cast(Elsewhere, root.owners)


def is_served(root: Root) -> bool:
    """Returns whether the root is a member of a cluster. It takes 0.5 us, so a get asks that finds no record."""
    return not root.owners.is_alone or root.catalog.has_membership()


def owned_now(root: Root, key: bytes) -> int | None:
    """Returns `root.owners.membership_for` of a key, by what the catalog says now."""
    if not is_served(root):
        return 0
    elsewhere = elsewhere_of(root)
    if root.catalog.view(Transaction.counters).membership != elsewhere.membership:
        elsewhere.take_in()
    return elsewhere.membership_for((key,))


def owner_name(root: Root, key: bytes) -> str | None:
    """Returns the name and address of the host that owns a key, as far as this host knows. Nobody is asked."""
    if not is_served(root):
        return None
    owner = elsewhere_of(root).known_owner(key)
    return None if owner is None else elsewhere_of(root).name_of(owner)


def is_recovered(root: Root, key: bytes, version: int) -> bool:
    """Returns whether another host has recovered a version, after the one that owned the key was removed."""
    return is_served(root) and elsewhere_of(root).is_recovered(key, version)


def shared_id(root: Root) -> str:
    """Returns the store's id, and of one on several hosts the same on all of them."""
    return elsewhere_of(root).cluster().hex() if is_served(root) else root.settings.store


def is_fellow(root: Root, store: str) -> bool:
    """Returns whether this store id is that of another host's folder of the same store."""
    return store != root.settings.store and is_served(root) and elsewhere_of(root).is_member(bytes.fromhex(store))


def at_each_owner(
    root: Root,
    things: Sequence[Thing],
    key_of: Callable[[Thing], bytes],
    make: Callable[[list[Thing]], None],
    deadline: float,
) -> None:
    """Calls `make` with parts of what is to be done, each for keys of one owner, or of nobody.

    If owners change meanwhile, it goes on with those of then. Raises what `make` raises: then later parts are not done.
    """
    todo: list[Thing] = list(things)
    while todo:
        part: list[Thing] = _of_one_owner(root, todo, key_of, deadline)
        try:
            make(part)
        except CrossHostError:
            if len(_of_one_owner(root, part, key_of, deadline)) == len(part):
                raise  # that isn't why
        else:
            done = set(map(id, part))
            todo = [thing for thing in todo if id(thing) not in done]


def _of_one_owner(
    root: Root, things: Sequence[Thing], key_of: Callable[[Thing], bytes], deadline: float
) -> list[Thing]:
    """Returns the things that have the owner of the first one."""
    if not is_served(root):
        return list(things)
    owners = elsewhere_of(root).owners_of([key_of(thing) for thing in things], deadline)
    return [thing for thing, owner in zip(things, owners, strict=True) if owner == owners[0]]


def find_record(root: Root, key: bytes, deadline: float) -> Record | None:
    """Returns the record of a key, wherever its owner is."""
    record = root.catalog.read(key)
    if record is None and is_served(root):
        return elsewhere_of(root).records([key], deadline)[0]
    return record


# --- a version of a key, and its bytes -------------------------------------------------------------------------------


class Absent(Protocol):
    """Bytes of a mapping that lie on other hosts until they are needed. Whoever reads some asks for them first.

    All raise HomeUnavailableError within the timeout, and VersionGoneError if the version was replaced before these
    bytes came.
    """

    def need(self, starts: Any, stops: Any) -> None:
        """Brings what lies between these addresses, arrays of int64, as far as it is of the mapping and not there."""
        ...

    def need_all(self) -> None: ...

    def receive(self, starts: Any, stops: Any, into: Any) -> bool:
        """Brings what lies between these addresses to others instead.

        Args:
            starts, stops: as of `need`; of ranges in order, and apart.
            into: an address for each range. After an error anything may lie there.

        Returns:
            False: nothing was done. Some of it is there, or is worth keeping: see `need`.
        """
        ...

    def localized(self) -> MappedEntry:
        """The same version, copied to this host. Raises StoreFullError too."""
        ...


class MappedEntry(msgspec.Struct, frozen=True):
    """A version of a key, and its bytes in memory, which stay there as long as the mapping is referred to.

    The data section starts at `record.start` of the mapping, and is `record.nbytes` long.
    """

    record: Record
    mapping: Mapping | None = None  # None: the value is in the record, or has no bytes
    absent: Absent | None = None  # None: all bytes are there

    def header(self, extent: SegmentExtent | None = None) -> memoryview:
        """Returns the header of a segment: of the only one, or one of several. It doesn't keep the mapping alive."""
        if self.mapping is None:
            return memoryview(b"")
        base, start = (0, self.record.start) if extent is None else (extent.base, extent.start)
        return self.mapping.view()[base : base + start]
