"""Sharded puts: every rank puts what it holds, and all of it becomes one version at one moment. Decision 012.

1. `find_rank` tells which rank this process is. `AttemptRank.agree` gives all ranks the attempt's name, and tells them
   which plain leaves rank 0 writes. With torch.distributed these messages go through a `StoreCall`.
2. `put_sharded` has this rank's part drafted and prepared.
3. The process that finds all parts merges and publishes them.
4. Each rank waits for the outcome, and gives the attempt up for all when its time is over.
"""

# PendingPut's methods are for users. Functions have what memstore itself needs of it, and look into it.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist

from memstore import _modes as modes
from memstore import contents
from memstore._arguments import whole_number
from memstore._ranks import RankCall, RankStore
from memstore._threads import ABANDONED, check_abandoned
from memstore.engine import (
    AttemptFailure,
    AttemptOutcome,
    Content,
    Participant,
    Path,
    PendingPart,
    Root,
    SegmentExtent,
    deadline_after,
    ended,
    give_up,
    make_room_and_retry,
    missing_ranks,
    outcome_of,
    pending_parts,
    prepare,
    resource_errors,
    shared_id,
    to_explain,
    version_of_outcome,
)
from memstore.errors import (
    HomeUnavailableError,
    MemstoreError,
    NotAStoreError,
    PartialCommitError,
    ResourceLimitError,
    ShardMismatchError,
    StoreFullError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)
from memstore.listing import abort_attempt
from memstore.structure import HeldValue

# --- The put ---------------------------------------------------------------------------------------------------------


log = logging.getLogger("memstore")

# The other ranks know of these already, or nobody can tell them.
_TOLD = (
    StoreTimeoutError,
    ShardMismatchError,
    PartialCommitError,
    VersionConflictError,
    UnknownOutcomeError,
    NotAStoreError,
)
OUTLIVES = 60.0  # seconds that a part of a rank that waits outlives the rank's timeout
TO_PUBLISH = 0.25  # seconds for the mutex, where all parts are there when the time is up
GIVE_UP_WITHIN = 0.5  # seconds for the mutex, or the key's owner, to end an attempt whose time is up
_MOST_TO_GIVE_UP = 5.0  # seconds for the same, where the call has so much time left


@modes.uncompiled_methods
class PendingPut:
    """A sharded put whose parts may still be on their way. Made by `Store.put_sharded` with `wait=False`.

    You may drop this object: the store keeps the part, and the rank that completes the put publishes it. It works after
    the Store is closed, and can't be pickled: other processes find the put in `store.pending()`.

    Attributes:
        key: the key that is put.
        attempt: the text by which the ranks of this put find each other.
    """

    __slots__ = ("_member", "_outcome", "_root", "_timeout", "attempt", "key")

    def __init__(self, root: Root, member: Participant, timeout: float, outcome: AttemptOutcome | None = None) -> None:
        self._root, self._member, self._timeout, self._outcome = root, member, timeout, outcome
        self.key, self.attempt = member.key.decode(), member.attempt

    def wait(self, timeout: float | None = None) -> int:
        """Waits until all ranks' parts are there, and returns the version.

        A timeout ends the wait, not the attempt: others may complete it later, and `wait` may be called again.

        Raises:
            StoreTimeoutError: it names the ranks that are missing.
            PartialCommitError: no rank holds some part of a leaf, or the attempt was given up.
            ShardMismatchError: the ranks disagree.
            VersionConflictError: the key was not at the version that was expected.
        """
        seconds = self._timeout if timeout is None else timeout
        return wait_until(self, deadline_after(seconds), seconds)

    def done(self) -> bool:
        """Returns whether the attempt was published or given up, so that `wait` returns or raises at once.

        If all parts are there, this publishes them. That may wait for other processes, up to the put's timeout.
        """
        return done_by(self, deadline_after(self._timeout))

    def abort(self, *, timeout: float | None = None) -> None:
        """Gives the attempt up, for all ranks, unless it was published already.

        Args:
            timeout: seconds; None: the put's.
        """
        deadline = deadline_after(self._timeout if timeout is None else timeout)
        if self._outcome is None:
            abort_attempt(self._root, self._member, "PendingPut.abort was called", deadline)

    def _look(self, waits_until: float, deadline: float) -> bool:
        """Waits for an outcome, and returns whether there is one. If all parts are there, this publishes them.

        Args:
            waits_until: the monotonic time until which it waits for other ranks.
            deadline: the one until which it waits for the mutex and other hosts, to publish.
        """
        if self._outcome is None:
            with resource_errors(self._root.path, self.key, self._root):
                merge = partial(_merge, self._root)
                self._outcome = outcome_of(self._root, self._member, merge, waits_until, deadline)
            if self._outcome is not None and self._outcome.version:
                text = "%s: put %r: version %d of all ranks, attempt %r"
                log.debug(text, self._root.path, self.key, self._outcome.version, self.attempt)
        return self._outcome is not None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PendingPut can't be pickled: another process finds the put in store.pending(key)")

    def __repr__(self) -> str:
        return f"<memstore.PendingPut {self.key!r} attempt {self.attempt!r} in {self._root.path}>"


def wait_until(pending: PendingPut, deadline: float, seconds: float) -> int:
    """Waits as `PendingPut.wait` does, whose timeout of so many seconds ends at this monotonic time."""
    root, member = pending._root, pending._member
    if not pending._look(deadline, deadline + TO_PUBLISH):
        raise _timed_out(root, member, seconds)
    assert pending._outcome is not None
    return version_of_outcome(pending._outcome)


def done_by(pending: PendingPut, deadline: float) -> bool:
    """Does the same as `PendingPut.done`, up to this monotonic time."""
    return pending._look(time.monotonic(), deadline)


def give_up_after(pending: PendingPut, error: StoreTimeoutError | HomeUnavailableError) -> int:
    """Gives the attempt up, for all ranks, after a wait that ended in this error.

    Returns:
        The version, if the attempt was published already.

    Raises:
        StoreTimeoutError: it is given up.
        UnknownOutcomeError: nobody can say whether it is.
    """
    reason = error if isinstance(error, StoreTimeoutError) else StoreTimeoutError(str(error), key=error.key)
    return version_of_outcome(_end(pending._root, pending._member, reason, time.monotonic()))


def put_sharded(
    root: Root,
    key: str,
    take: Callable[[], HeldValue],
    place: AttemptRank,
    *,
    dtype: torch.dtype | None,
    expect: int | None,
    wait: bool,
    lease: float,
    timeout: float,
) -> int | PendingPut:
    """Makes the put of `Store.put_sharded`, by a rank whose `place` among the ranks is known.

    Args:
        take: makes what this rank holds. If that fails, the other ranks are told.
    """
    deadline = deadline_after(timeout)
    # 1. Agree on the attempt's name, also if this rank has nothing to put: by the name the others are told.
    held: HeldValue | None = None
    failure: Exception | None = None
    try:
        held = take()
    except Exception as error:
        failure = error
    plain = () if held is None else (*[leaf.name for leaf in held.leaves if leaf.is_plain], *held.object_names)
    agreement = place.agree(plain, deadline)
    lease = timeout + OUTLIVES if wait else lease
    member = Participant(key.encode(), agreement.attempt, place.rank, place.world_size, lease)
    try:
        if held is None:
            raise failure or AssertionError
        # 2. Draft and prepare this rank's part. A kill leaves a part without a row, which is swept.
        others = agreement.plain if place.rank else ()
        part = contents.draft_part(
            root, key, held, place.rank, place.world_size, expect=expect, dtype=dtype, others=others
        )
        found = make_room_and_retry(partial(_prepare, part), root, member, deadline, key)
        outcome: AttemptOutcome | None = None
        if isinstance(found, Participant):
            member = found
        else:
            outcome = found
        # From here on the part needs no process: a kill leaves it to the others until its lease is over.
        pending = PendingPut(root, member, timeout, outcome)
        # 3. Publish, if this rank is the last one, and 4. wait for the outcome.
        try:
            if wait:
                return wait_until(pending, deadline, timeout)
            done_by(pending, deadline)
        except (StoreTimeoutError, HomeUnavailableError) as error:
            if wait:  # a put that has raised is never published later
                return give_up_after(pending, error)
            log.info("%s", str(error))  # the part is there all the same, and who waits for the others publishes it
        return pending
    except BaseException as error:
        if isinstance(error, MemstoreError):
            error.key = key
        has_no_part = isinstance(error, StoreTimeoutError | HomeUnavailableError) and not member.number
        outcome = _fail(root, member, error, deadline) if has_no_part or not isinstance(error, _TOLD) else None
        if has_no_part and outcome is not None and outcome.version:  # with the part that it put before a restart
            return outcome.version if wait else PendingPut(root, member, timeout, outcome)
        raise


def _prepare(
    part: contents.PartDraft, root: Root, member: Participant, deadline: float
) -> AttemptOutcome | Participant:
    return prepare(root, member, part.draft, part.content, deadline)


def _merge(root: Root, parts: Sequence[PendingPart], said: Sequence[bytes]) -> Content:
    ranks = [
        contents.read_content(
            content, SegmentExtent(part.segment, part.put_id, part.size, part.start) if part.segment else None
        )
        for part, content in zip(parts, said, strict=True)
    ]
    return contents.merge(parts[0].key.decode(), ranks, with_checksums=root.settings.checksum)


def _timed_out(root: Root, member: Participant, seconds: float) -> StoreTimeoutError:
    key = member.key.decode()
    try:
        waiting = pending_parts(root, member.key, to_explain())
    except HomeUnavailableError as error:
        text = f"attempt {member.attempt!r} was not published within {seconds:g} s, and nobody said whom it waited for"
        return StoreTimeoutError(f"{key!r}: {text}: {error}", key=key)
    parts = [part for part, _ in waiting if part.attempt == member.attempt]
    missing = missing_ranks(parts, member.world_size)
    who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {member.world_size} had put nothing"
    what = who if missing else "all ranks' parts are there, and it was not published"
    advice = ": all ranks must call it, with the same attempt; timeout= gives them longer" if missing else ""
    text = f"{key!r}: attempt {member.attempt!r}: {what} within {seconds:g} s{advice}"
    return StoreTimeoutError(text, key=key)


def _fail(root: Root, member: Participant, error: BaseException, deadline: float) -> AttemptOutcome | None:
    """Tells the other ranks that this one can't put its part. Returns the attempt's outcome, if it can be known."""
    why = f"rank {member.rank} failed: {type(error).__name__}: {error}"
    failure = ended(member, (), why)
    failure.missing_ranks = (member.rank,)  # the others may be on their way
    try:
        return _end(root, member, failure, deadline)
    except UnknownOutcomeError as unknown:
        lacks_part = isinstance(error, ResourceLimitError | StoreFullError) and not member.number
        if isinstance(error, Exception) and not lacks_part:
            raise
        log.warning("%s", str(unknown))  # an interrupt stays one, and so does a lack: who frees something calls again
        return None


def _end(root: Root, member: Participant, failure: AttemptFailure, deadline: float) -> AttemptOutcome:
    """Gives the attempt up. The call's `deadline` may be over: this ends soon after it in any case."""
    key = member.key.decode()
    until = min(max(deadline, deadline_after(GIVE_UP_WITHIN)), deadline_after(_MOST_TO_GIVE_UP))
    try:
        return give_up(root, member, failure, until)
    except UnknownOutcomeError:
        raise
    except (MemstoreError, OSError) as error:
        raise UnknownOutcomeError(
            f"{key!r}: attempt {member.attempt!r} could not be given up, so others may still complete it: {error}",
            key=key,
        ) from failure


# --- The ranks, and the name of their attempt ------------------------------------------------------------------------


_BEGIN = "begin"
_MOST_RANKS = 1 << 16


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """The name of an attempt, and what the ranks of the put know of each other.

    Attributes:
        attempt: the name.
        plain: the plain leaves and objects that rank 0 writes, so that the others need not.
    """

    attempt: str
    plain: tuple[Path, ...] = ()


class AttemptRank:
    """A rank, whose attempt the caller has named."""

    def __init__(self, attempt: str, rank: int, world_size: int) -> None:
        _check_attempt(attempt)
        try:
            attempt.encode()
        except UnicodeEncodeError:
            raise ValueError(f"attempt has a lone surrogate: {attempt!r} is no Unicode text") from None
        rank, world_size = whole_number("rank", rank), whole_number("world_size", world_size)
        if not 0 <= rank < world_size <= _MOST_RANKS:
            raise ValueError(f"rank {rank} of {world_size}: ranks count from 0, and there are {_MOST_RANKS:,} at most")
        self._attempt, self.rank, self.world_size = attempt, rank, world_size

    def agree(self, plain: tuple[Path, ...], deadline: float) -> Agreement:
        """Returns what the ranks agree on. `plain`: the plain leaves and the objects that this rank holds."""
        return Agreement(self._attempt)


class DistributedRank(AttemptRank):
    """A rank of torch.distributed. Rank 0 chooses the attempt's name, and tells the others."""

    def __init__(self, call: StoreCall, attempt: str | None = None) -> None:
        if attempt is not None:
            _check_attempt(attempt)
        self._call = call
        unique = uuid.uuid4().hex  # names may come again, as after a restart
        super().__init__(unique if attempt is None else f"{attempt} {unique}", call.rank, call.world_size)

    def agree(self, plain: tuple[Path, ...], deadline: float) -> Agreement:
        """Tells the others on rank 0, and hears rank 0 on the others. Raises StoreTimeoutError if it says nothing."""
        if self.rank:
            said = self._call.hear(_BEGIN, Agreement, deadline)
            self._call.done_with(_BEGIN)
            return said
        own = Agreement(self._attempt, plain)
        if self.world_size > 1:
            self._call.say(_BEGIN, own)
        return own


def _check_attempt(attempt: object) -> None:
    if not (isinstance(attempt, str) and attempt):
        raise TypeError(f"attempt is a text that is not empty, and not {attempt!r}")


def find_rank(
    attempt: str | None, rank: int | None, world_size: int | None, process_group: Any, key: str, root: Root
) -> AttemptRank:
    """Returns which rank of the put this process is.

    Raises:
        TypeError: neither torch.distributed nor the caller says that.
    """
    if attempt is not None and rank is not None and world_size is not None:
        return AttemptRank(attempt, rank, world_size)
    if rank is not None or world_size is not None:
        text = "a sharded put takes attempt=, rank= and world_size= together, or attempt= alone, or none of them"
        raise TypeError(f"{key!r}: {text}")
    call = meet(process_group, "put", key, root, attempt)
    if call is None:
        raise TypeError(
            f"{key!r}: the value is sharded, and this process is no rank of torch.distributed: call put_sharded with "
            "attempt= (a text that all ranks of this put share, and no other put has), rank= and world_size="
        )
    return DistributedRank(call, attempt)


# --- Messages between the ranks of one call --------------------------------------------------------------------------


def meet(process_group: Any, kind: str, key: str, root: Root, attempt: str | None = None) -> StoreCall | None:
    """Returns one call of a Store that the ranks of a process group make together.

    Calls for a key meet in their order; calls that are named, by `attempt`, meet by their names.

    Args:
        process_group: of torch.distributed; None: the default one.
        kind: of the call: "put" or "load".
        key, root: what it is about.
        attempt: a name that the caller has given to the call; None: it has none.

    Returns:
        The call; None if this process is no rank of torch.distributed.

    Raises:
        TypeError: this is no process group, or this process is none of its ranks.
        PartialCommitError: the group's store is out of reach.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise TypeError(f"{key!r}: process_group is given, and torch.distributed is not initialized")
        return None
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        what = "this process is none of its ranks" if group is dist.GroupMember.NON_GROUP_MEMBER else repr(group)
        raise TypeError(f"{key!r}: process_group must be one of torch.distributed, and have this process: {what}")
    return StoreCall(RankStore.of_group(group), kind, key, root, attempt)


class StoreCall(RankCall):
    """One call of a Store that the ranks of a process group make together.

    Attributes:
        key: what it is about.
    """

    def __init__(self, ranks: RankStore, kind: str, key: str, root: Root, attempt: str | None) -> None:
        self._kind, self.key, self._path = kind, key, root.path
        super().__init__(ranks, f"{kind}/{shared_id(root)}/{(key, attempt)!r}")

    def late(self, missing: Sequence[int], word: str, waited: float) -> StoreTimeoutError:
        who = f"rank {self.rank} waited {round(waited, 1):g} s for rank {missing[0]}"
        where = f"in the store at {self._path}, or went to another store"
        text = f"{self.key!r}: {who}, which did not come to this {self._kind} {where}"
        return StoreTimeoutError(text, key=self.key)

    def cut_off(self, error: Exception) -> PartialCommitError:
        why = str(error).partition("\n")[0]
        text = f"{self.key!r}: rank {self.rank} can't reach the store of its process group: {why}"
        return PartialCommitError(text, key=self.key)

    def look_around(self, word: str, rank: int) -> None:
        """Raises AbandonedError in a load whose task was cancelled.

        A put goes on to where it can tell the others.
        """
        if ABANDONED and self._kind == "load":
            check_abandoned()
