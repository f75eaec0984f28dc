"""Sharded puts: several ranks put parts, which become one version at one moment, or never. Decision 012 has the rules.

1. *Prepare* (`attempt_prepare.py`): a rank fills a segment as in any put. Then, in one hold of the store's mutex, its
   row becomes *prepared*, and a row of `pending` keeps it from now on, so that the rank may exit. A kill before leaves
   what a put leaves; after it, a part that waits for the others until its lease is over.
2. *Publish* (`attempt_publish.py`): who finds all parts there merges them outside of the mutex, and commits them by
   steps 4 and 5 of a put (`commit.py`), with its own transaction: the attempt must have no outcome, and its parts must
   be those that were merged; their rows go, and the version becomes the outcome. A kill before the commit leaves
   headers that say live: the mutex's next owner puts them back, since rows of `pending` still name the segments
   (`recovery.py`).
3. *Give up* (`attempt_ends.py`): a timeout, an error of a rank, or `abort` ends an attempt, unless it has an outcome:
   its segments are retired, and the error becomes its outcome. So what raised never publishes later.
4. *Expire*: what is over is ended in the same way, by whoever prepares or sweeps next. Who waits puts that off.

Whatever completes, publishes or ends an attempt counts as a publication and rings the key's doorbell, so that a death
right after the commit is made up for as after a put. What became of an attempt is kept (`attempt_outcomes.py`). In this
file: who takes part, and what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memstore.engine.catalog import Counters, Now, Outcome, Part, Transaction, attempts
from memstore.engine.protocols.change import missing
from memstore.engine.root import Root
from memstore.engine.sync import boot_clock, boot_id
from memstore.errors import KeyNotFoundError, PartialCommitError

_LONGEST_LEASE = 1e9  # seconds


class Member(NamedTuple):
    """A rank's place in an attempt.

    Attributes:
        lease: seconds that its part waits for the others.
        number: of the attempt, once the rank's part is there; 0 before. It tells attempts of one name apart.
        home: of a store on several hosts, the member that has the rank's part; empty: none has, or this one.
    """

    key: bytes
    attempt: str
    rank: int
    world_size: int
    lease: float
    number: int = 0
    home: bytes = b""


def nanoseconds(lease: float) -> int:
    return int(min(max(lease, 0), _LONGEST_LEASE) * 1e9)


def now() -> Now:
    return Now(boot_clock(), boot_id())


def find(transaction: Transaction, member: Member) -> tuple[Outcome | None, list[Part]]:
    """The outcome of an attempt, if it has one, or its parts by rank."""
    outcome = attempts.outcome_of(transaction, member.key, member.attempt)
    if outcome is not None and member.number in (0, outcome.number):
        return outcome, []
    parts = attempts.parts_of(transaction, member.key, member.attempt)
    return None, [part for part in parts if member.number in (0, part.number)]


def look_into(root: Root, member: Member) -> tuple[Outcome | None, list[Part], list[bytes]]:
    """As `find`, with what the parts say of the value."""

    def read(transaction: Transaction) -> tuple[Outcome | None, list[Part], list[bytes]]:
        outcome, parts = find(transaction, member)
        return outcome, parts, [attempts.content_of(transaction, part) for part in parts]

    return root.catalog.view(read)


def parts_here(root: Root, key: bytes | None) -> list[tuple[Part, float]]:
    """The parts of the attempts of a key, or of all, each with the seconds until it is over.

    What is over counts until it is ended; but nobody is left who could wait for what is of another boot.
    """
    moment = now()
    parts = root.catalog.view(lambda transaction: attempts.parts_of(transaction, key))
    return [(part, (part.expires - moment.clock) / 1e9) for part in parts if part.boot == moment.boot]


def no_version_yet(key: bytes, parts: Sequence[Part]) -> KeyNotFoundError | PartialCommitError:
    """The error for a key that doesn't exist. If it has parts that wait for others, that is another one."""
    if not parts:
        return missing(key)
    first, name = parts[0], key.decode()
    ranks = missing_ranks([part for part in parts if part.number == first.number], first.world_size)
    named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    who = f"waits for {named}" if ranks else "is about to be published"
    text = (
        f"{name!r} has no version yet: attempt {first.attempt!r} {who}; abort({name!r}, {first.attempt!r}) gives it up"
    )
    return PartialCommitError(text, key=name, missing_ranks=ranks)


def missing_ranks(parts: Sequence[Part], world_size: int) -> tuple[int, ...]:
    there = {part.rank for part in parts}
    return tuple(rank for rank in range(world_size) if rank not in there)


def ring(root: Root, key: bytes, counters: Counters) -> int:
    """Rings, after the commit of what completes or ends an attempt. Returns the bell, to be woken after the mutex."""
    bell = root.doorbell.bell(key)
    root.doorbell.change(bell)
    root.mutex.publications_rung = counters.publications
    return bell


def are_same(parts: Sequence[Part], others: Sequence[Part]) -> bool:
    return [part.put_id for part in parts] == [part.put_id for part in others]
