"""Sharded puts, wherever the home of their key is: `attempts.py` on this host alone, else by the rules of a cluster.

A store that nobody serves pays a look at its counters. If it comes to be served meanwhile, the transaction that would
have changed something raises MembershipChanged, and the home is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from memstore.engine.catalog import Outcome, Part
from memstore.engine.files import SealedSegment
from memstore.engine.protocols import attempt_ends, attempt_prepare, attempt_publish
from memstore.engine.protocols.attempt_outcomes import Failure
from memstore.engine.protocols.attempt_publish import Merge
from memstore.engine.protocols.attempts import Member, no_version_yet, parts_here
from memstore.engine.protocols.change import MembershipChanged
from memstore.engine.protocols.elsewhere import elsewhere_of, is_served
from memstore.engine.protocols.put import Draft
from memstore.engine.root import Root
from memstore.engine.sync import deadline_after
from memstore.errors import HomeUnavailableError, KeyNotFoundError, PartialCommitError

_TO_EXPLAIN = 0.25  # seconds for other hosts to say what an error tells: the time of its call may be over


def prepare(
    root: Root, member: Member, draft: Draft, content: Callable[[], bytes], deadline: float
) -> Outcome | Member:
    """As `attempt_prepare.prepare`. Raises HomeUnavailableError and StaleMembershipError too."""
    return attempt_prepare.prepare(root, member, draft, content, _enter, deadline)


def _enter(
    root: Root, member: Member, draft: Draft, segment: SealedSegment | None, content: bytes, deadline: float
) -> Outcome | Member:
    if not is_served(root):
        with contextlib.suppress(MembershipChanged):
            return attempt_prepare.enter(root, member, draft, segment, content, deadline)
    return elsewhere_of(root).prepare(member, draft.expect, segment, content, deadline)


def outcome_of(root: Root, member: Member, merge: Merge, waits_until: float, deadline: float) -> Outcome | None:
    """As `attempt_publish.outcome_of`. Raises HomeUnavailableError and StaleMembershipError too."""
    if not is_served(root):
        with contextlib.suppress(MembershipChanged):
            return attempt_publish.outcome_of(root, member, merge, waits_until, deadline)
    return elsewhere_of(root).outcome_of(member, merge, waits_until, deadline)


def give_up(root: Root, member: Member, failure: Failure, deadline: float) -> Outcome:
    """As `attempt_ends.give_up`."""
    if not is_served(root):
        with contextlib.suppress(MembershipChanged):
            return attempt_ends.give_up(root, member, failure, deadline)
    return elsewhere_of(root).give_up(member, failure, deadline)


def pending_parts(root: Root, key: bytes | None, deadline: float) -> list[tuple[Part, float]]:
    """The parts of the attempts of a key, or of all on all hosts, each with the seconds until it is over.

    Args:
        deadline: for other hosts.

    Raises HomeUnavailableError, which names the host.
    """
    if is_served(root):
        return elsewhere_of(root).pending(key, deadline)
    return parts_here(root, key)


def no_version(root: Root, key: bytes, deadline: float | None = None) -> KeyNotFoundError | PartialCommitError:
    """The error for a key that doesn't exist. If it has parts that wait for others, that is another one.

    Args:
        deadline: for the key's home; None: a moment.
    """
    parts: list[tuple[Part, float]] = []
    with contextlib.suppress(HomeUnavailableError):  # it has just said that there is no version
        parts = pending_parts(root, key, to_explain() if deadline is None else deadline)
    return no_version_yet(key, [part for part, _ in parts])


def to_explain() -> float:
    """The deadline of what is asked for an error's text alone."""
    return deadline_after(_TO_EXPLAIN)
