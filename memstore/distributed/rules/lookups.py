"""How a home is asked for the entries of keys, of one moment: in one message, or in several where they are too many.

Several answers are of several moments. So when all entries are there, the home is asked for their versions once more:
keys that don't exist first. A version never comes again; so what still has its version had it all the time, and then
there was a moment when all was as it was found: that of the first of these answers. What has changed is asked for anew.
(Beyond 65,536 keys that don't exist, one of them may have been put and deleted in between.)
"""

from __future__ import annotations

from collections.abc import Sequence

from memstore.distributed.rules.members import Member
from memstore.distributed.rules.messages import Answer, Entry, Found, Lookup
from memstore.distributed.rules.steps import Steps, send
from memstore.distributed.rules.terms import BATCH_LIMIT


def look_up_at(home: Member, epoch: int, keys: Sequence[bytes], *, pin: bool = False) -> Steps[Answer | None]:
    """The entries of all keys, in a `Found` of any length; or what the home says instead."""
    answer = yield from _asked(home, Lookup(epoch, tuple(keys[:BATCH_LIMIT]), pin))
    if not isinstance(answer, Found) or len(answer.entries) == len(keys):
        return answer
    found = dict(zip(keys, answer.entries, strict=False))
    missing = list(keys[len(answer.entries) :])
    while missing:
        while missing:
            answer = yield from _asked(home, Lookup(epoch, tuple(missing[:BATCH_LIMIT]), pin))
            if not isinstance(answer, Found):
                return answer
            found.update(zip(missing, answer.entries, strict=False))
            missing = missing[len(answer.entries) :]
        answer = yield from _changed(home, epoch, found)
        if not isinstance(answer, list):
            return answer
        missing = answer
    return Found(tuple(found[key] for key in keys))


def _changed(home: Member, epoch: int, found: dict[bytes, Entry | None]) -> Steps[list[bytes] | Answer | None]:
    """The keys that have other versions by now than those that were found."""
    keys = sorted(found, key=lambda key: found[key] is not None)
    changed: list[bytes] = []
    while keys:
        answer = yield from _asked(home, Lookup(epoch, tuple(keys[:BATCH_LIMIT]), brief=True))
        if not isinstance(answer, Found):
            return answer
        pairs = zip(keys, answer.entries, strict=False)
        changed += [key for key, entry in pairs if _version(entry) != _version(found[key])]
        keys = keys[len(answer.entries) :]
    return changed


def _asked(home: Member, request: Lookup) -> Steps[Answer | None]:
    """A `Found` has one entry at least, and no more than were asked for; else the answer says nothing."""
    answer = yield from send(home, request)
    fits = not isinstance(answer, Found) or 0 < len(answer.entries) <= len(request.keys)
    return answer if fits else None


def _version(entry: Entry | None) -> int:
    return 0 if entry is None else entry.version
