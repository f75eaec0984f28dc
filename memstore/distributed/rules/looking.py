"""What a process finds in its host's catalog before it asks anybody, and the errors of what it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memstore import errors
from memstore._wording import conflict, no_key
from memstore.distributed.rules.members import Member, Standing
from memstore.distributed.rules.messages import Answer, Entry, Failed, Refused
from memstore.distributed.rules.steps import Steps, pause
from memstore.distributed.rules.tables import Tables
from memstore.distributed.rules.terms import KEY_LIMIT
from memstore.errors import (
    CrossHostError,
    HomeUnavailableError,
    MemstoreError,
    StaleMembershipError,
    UnknownOutcomeError,
    VersionConflictError,
)

AGAIN = 0.01  # seconds
_LONGEST = 4096  # characters of an error


class DeadlinePassed(Exception):
    """Thrown into the steps of a call whose time is over. Its text is why the last message had no answer, if known."""


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
    homes = {standing.view.home_of(key): key for key in keys}
    if len(homes) > 1:
        names = ", ".join(repr(key.decode()) for key in list(homes.values())[:3])
        raise CrossHostError(
            f"{names} have their homes on {len(homes)} hosts, and the keys of one call must have one home, "
            "as keys with the same text before the first '/' have. put_many and delete_many take keys home by home "
            "with atomic=False; get such keys one by one"
        )
    home = standing.view.member(next(iter(homes)))
    assert home is not None, "a home is a member"
    return home


def try_again(answer: Answer | None, key: bytes) -> Steps[None]:
    if isinstance(answer, Refused):
        raise removed()
    if isinstance(answer, Failed):
        raise error_of(answer)
    yield from pause(AGAIN)


_WHAT_TO_DO = (
    "repeat the call; `memstore status` says which hosts answer, and `memstore remove` gives up one that is lost"
)

# --- errors ----------------------------------------------------------------------------------------------------------

_KINDS: dict[str, type[MemstoreError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, MemstoreError) and not name.startswith("_")
}


def unavailable(what: bytes, home: Member | None, why: DeadlinePassed) -> HomeUnavailableError:
    """What a call ends with that has changed nothing.

    Args:
        what: the key.
        home: that was asked, or waited for; None: this host.
    """
    key = what.decode(errors="replace")
    return HomeUnavailableError(
        f"{key!r}: {no_answer(home, why)}, and nothing was changed: {_WHAT_TO_DO}",
        key=key,
    )


def no_answer(home: Member | None, why: DeadlinePassed) -> str:
    """The part of an error that names the host which was waited for. None: this host."""
    return f"{_name(home)} did not answer within the timeout{_reason(why)}"


def not_listed(prefix: bytes, home: Member | None, why: DeadlinePassed, what: str = "") -> HomeUnavailableError:
    """What a listing of the keys with this prefix ends with.

    Args:
        home: as of `unavailable`.
        what: else than keys was to be listed.
    """
    keys = what or (f"the keys that start with {prefix.decode(errors='replace')!r}" if prefix else "all keys")
    who = "this host, if it still gets its keys," if home is None else f"{home.name or 'the host'} at {home.address}"
    return HomeUnavailableError(
        f"{keys} can't be listed: {who} is the home of some, and did not answer within the timeout{_reason(why)}: "
        f"{_WHAT_TO_DO}"
    )


def unknown(what: bytes, home: Member, why: Exception | None = None) -> UnknownOutcomeError:
    key = what.decode()
    return UnknownOutcomeError(
        f"{key!r}: {_name(home)} was asked to change it and gave no answer{_reason(why)}, so nobody knows whether it "
        "has: look at the version, or repeat the call, which is safe with expect_version",
        key=key,
    )


def _reason(why: Exception | None) -> str:
    return f" ({why})" if why is not None and str(why) else ""


def _name(home: Member | None) -> str:
    if home is None:
        return "its home (this host, if it still gets its keys)"
    return f"its home, {home.name or 'the host'} at {home.address},"


def removed() -> StaleMembershipError:
    return StaleMembershipError("this host was removed from the cluster: serve an empty root")


def failed_of(error: Exception) -> Failed:
    """What another host is told of an error that has changed nothing."""
    if not isinstance(error, MemstoreError):
        return Failed("MemstoreError", _sendable(str(error)))
    key = (error.key or "").encode(errors="backslashreplace")
    return Failed(type(error).__name__, _sendable(str(error)), key if 0 < len(key) <= KEY_LIMIT else None)


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()[:_LONGEST]


def error_of(failed: Failed, home: Member | None = None) -> MemstoreError:
    """What a home has answered. A name that this version doesn't know is a MemstoreError.

    Args:
        home: None: this host.
    """
    key = None if failed.key is None else failed.key.decode(errors="replace")
    if failed.error == "VersionConflictError":
        text = conflict(key or "", failed.expected, failed.found)
        return VersionConflictError(text, key=key, expected=failed.expected, found=failed.found)
    if failed.error == "KeyNotFoundError" and key is not None:
        return errors.KeyNotFoundError(no_key(key), key=key)
    says_key = key is None or repr(key) in failed.text
    text = failed.text if says_key else f"{key!r}: {failed.text}"
    if failed.error == "StoreFullError" and home is not None:
        full = errors.StoreFullError(f"{_name(home)} has no room: {text}; nothing was changed", key=key)
        full.host = home.address
        return full
    return _KINDS.get(failed.error, MemstoreError)(text, key=key)
