"""What a process finds in its host's catalog before it asks anybody, and the errors of what it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memstore.distributed.members import Member, Standing
from memstore.distributed.messages import Answer, Entry, Failed, Refused
from memstore.distributed.steps import Steps, pause
from memstore.distributed.tables import Tables
from memstore.errors import (
    CrossHostError,
    HomeUnavailableError,
    KeyNotFoundError,
    MemstoreError,
    StaleMembershipError,
    StoreTimeoutError,
    VersionConflictError,
)

AGAIN = 0.01  # seconds


class DeadlinePassed(Exception):
    """Thrown into the steps of a call whose time is over."""


class Look(NamedTuple):
    """One moment of this host's catalog."""

    entries: tuple[Entry | None, ...]
    standing: Standing | None
    membership: int


def look_at(tables: Tables, keys: Sequence[bytes]) -> Look:
    return Look(tuple(tables.record(key) for key in keys), tables.standing(), tables.membership())


def one_home(standing: Standing, keys: Sequence[bytes]) -> Member:
    """Raises CrossHostError, StaleMembershipError."""
    if standing.is_removed:
        raise removed()
    homes = {standing.view.home_of(key) for key in keys}
    if len(homes) > 1:
        names = ", ".join(repr(key.decode()) for key in keys[:3])
        raise CrossHostError(
            f"{names} have their homes on {len(homes)} hosts: keys with one text before the first '/' have one"
        )
    home = standing.view.member(homes.pop())
    assert home is not None, "a home is a member"
    return home


def try_again(answer: Answer | None, key: bytes) -> Steps[None]:
    if isinstance(answer, Refused):
        raise removed()
    if isinstance(answer, Failed):
        raise error_of(answer)
    yield from pause(AGAIN)


# --- errors ----------------------------------------------------------------------------------------------------------


def unavailable(key: bytes) -> HomeUnavailableError:
    name = key.decode(errors="replace")
    return HomeUnavailableError(f"{name!r}: its home did not answer within the timeout", key=name)


def removed() -> StaleMembershipError:
    return StaleMembershipError("this host was removed from the cluster: serve an empty root")


def error_of(failed: Failed) -> MemstoreError:
    key = None if failed.key is None else failed.key.decode()
    text = failed.text if key is None else f"{key!r}: {failed.text}"
    if failed.error == "VersionConflictError":
        return VersionConflictError(text, key=key, expected=failed.expected, found=failed.found)
    kinds: dict[str, type[MemstoreError]] = {
        kind.__name__: kind for kind in (KeyNotFoundError, CrossHostError, StoreTimeoutError)
    }
    return kinds.get(failed.error, MemstoreError)(text, key=key)
