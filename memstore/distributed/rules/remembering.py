"""Owners' memory of keys that aren't there any more, while removed members may come back: see `returning.py`.

A host that comes back brings versions that were lost with it. Its key may have been put and deleted since, and then
nobody has a record of it. So each owner remembers, from the roster on that has a removed member among its `returns`:

- of a key that is deleted, also one that didn't exist: that it was;
- of a key that it drops since its bytes lay on a removed member: which version that was, by which grant it owned the
  group, and with whom it was lost. That version alone may come back, and under that grant alone: after a hand-over
  somebody else may have changed the key.

A key that is put anew is there, and what was remembered of it goes.

Nobody owns a removed member's groups before each member has such a roster: all of them tell the heir what they keep.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memstore.distributed.rules.messages import (
    IS_PUT_SINCE,
    IS_THERE,
    MAY_RETURN,
    PORTION,
    STAYS_AWAY,
    Answer,
    Later,
    Offer,
    Offered,
)
from memstore.distributed.rules.nouns import Change, Entry, Returning, Returns, Roster, Standing, group_of
from memstore.distributed.rules.steps import Remembered, Steps, Tables, own_standing, pause, transact, view
from memstore.errors import CorruptionError

MOST_RETURNS = 16  # removed members that may come back: those that were removed last
MOST = 1 << 17  # keys of which a host remembers that they are gone: beyond, groups of removed members don't come back
_BETWEEN = 0.002  # seconds between two portions, in which puts come to the mutex


def returns_of(roster: Roster, ids: Collection[bytes], before: Returns) -> Returns:
    """Returns who may come back, by the next roster: who is a member no more, but for those that are being drained."""
    gone = [member.id for member in roster.members if member.id not in ids and not roster.is_leaver(member.id)]
    return (*(one for one in before if one[0] not in ids), *((one, b"") for one in gone))[-MOST_RETURNS:]


def follow(tables: Tables, roster: Roster) -> None:
    """Begins to remember, in the transaction in which this host hears of a roster."""
    if roster.returns and not tables.remembers():
        tables.put_remembers(True)


def note(tables: Tables, change: Change) -> None:
    """Notes a change of a key in its transaction."""
    if change.body is not None and tables.count_remembered() < MOST:
        tables.forget(change.key)
    elif change.body is not None:  # there are too many, and have to be
        if tables.remembered(change.key) is not None:
            tables.put_remembered(change.key, Remembered())
    elif tables.remembers():
        _remember(tables, change.key, Remembered())


def note_loss(tables: Tables, standing: Standing, key: bytes, entry: Entry) -> None:
    """Notes that a record goes, since bytes of it lay on members that were removed."""
    if not tables.remembers():
        return
    hosts, own = {place.host for place in entry.places}, tables.owned(group_of(key))
    former = hosts.pop() if len(hosts) == 1 else b""
    may_return = own is not None and not entry.is_mutable and standing.roster.may_return(former)
    row = Remembered(former, entry.version, own.number) if own is not None and may_return else Remembered()
    _remember(tables, key, row)


def _remember(tables: Tables, key: bytes, row: Remembered) -> None:
    if tables.count_remembered() < MOST or tables.remembered(key) is not None:
        tables.put_remembered(key, row)


def may_return(tables: Tables, standing: Standing, key: bytes, one: Returning) -> bool:
    """Returns whether a version may come back: nobody has put or deleted its key since it was lost."""
    own = tables.owned(group_of(key))
    if (one.former, one.by) not in standing.roster.returns or own is None:
        return False
    try:
        if tables.head(key) is not None:
            return False
    except CorruptionError:  # something is there
        return False
    known = tables.remembered(key)
    if one.under:
        return own.number == one.under and known is None and tables.count_remembered() < MOST
    return known == Remembered(one.former, one.version, own.number)


def answer_offer(tables: Tables, standing: Standing, request: Offer) -> Answer:
    if any((one.former, one.by) not in standing.roster.returns for one in request.rows):
        return Later()  # this host hasn't heard that it may, or who offers it hasn't heard that it may no more
    pairs = zip(request.keys, request.rows, strict=False)
    return Offered(tuple(_fate(tables, standing, key, one) for key, one in pairs))


def _fate(tables: Tables, standing: Standing, key: bytes, one: Returning) -> int:
    if may_return(tables, standing, key, one):
        return MAY_RETURN
    try:
        entry = tables.head(key)
    except CorruptionError:
        return STAYS_AWAY
    if entry is None:
        return STAYS_AWAY
    return IS_THERE if entry.version == one.version else IS_PUT_SINCE


def forget_all() -> Steps[None]:
    """Forgets what is remembered, once no member may come back any more."""
    while (yield from view(_is_over)):
        yield from transact(_forget_some)
        yield from pause(_BETWEEN)


def _is_over(tables: Tables) -> bool:
    return tables.remembers() and not own_standing(tables).roster.returns


def _forget_some(tables: Tables) -> None:
    if _is_over(tables):
        found: Sequence[bytes] = tables.all_remembered(PORTION)
        for key in found:
            tables.forget(key)
        if not found:
            tables.put_remembers(False)
