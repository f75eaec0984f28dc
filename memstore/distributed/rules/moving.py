"""How homes move: adopt, give, take. Any of it may be cut off by a kill, and repeated. Giving stands in `giving.py`.

1. *Adopt*: a member writes the new view. From this transaction on no process of its host commits to a key that is at
   home elsewhere, since each commit compares `membership`. Sharded puts of such keys that wait for parts end in it.
2. *Give*: it sends the records of such keys, and the outcomes of their sharded puts, to the new homes. Nobody can
   change them meanwhile: so who still finds one here finds the right one.
3. When all of them are acknowledged it deletes the records here, and only then says *given*.
4. *Take*: until it has heard this of the old home of a group, the new one serves nothing of the group.

A record that is damaged can't be sent, and keeps no other from moving. It stays where it is, and the new home is told
its key, which is damaged there too from then on: nobody is told that there is no such key, or puts another value
beside it.

So no two hosts serve a key at one time, and a get that finds a record need not ask whether the home is still here.
"""

from __future__ import annotations

import msgspec

from memstore.distributed.rules.attempts import end_strays, remember
from memstore.distributed.rules.members import Standing, View, givers_to
from memstore.distributed.rules.messages import Answer, Done, Entry, Give, Given, Later, Refused, Stale
from memstore.distributed.rules.partition import is_here, passing_over
from memstore.distributed.rules.tables import Tables
from memstore.errors import CorruptionError


def adopt(tables: Tables, member: bytes, view: View) -> bool:
    """Writes the view, if it is newer than what this member has."""
    standing = tables.standing()
    if standing is not None and standing.view.epoch >= view.epoch:
        return False
    # Versions go on above those of any home before, also of one that could not be asked.
    tables.version = max(tables.version, view.version_floor)
    is_joining = has_keys_of_its_own(tables) if member not in view.before else False
    standing = Standing(member, view, givers_to(view, member), is_joining)
    tables.put_standing(standing)
    end_strays(tables, standing)
    return True


def has_keys_of_its_own(tables: Tables) -> bool:
    """Whether this root had keys when it was first served, and they aren't all at their homes yet."""
    standing = tables.standing()
    return bool(tables.page(b"", 1)) if standing is None else standing.is_joining


def leave(tables: Tables) -> None:
    """This root was removed from the cluster."""
    standing = tables.standing()
    if standing is not None and not standing.is_removed:
        standing = msgspec.structs.replace(standing, is_removed=True)
        tables.put_standing(standing)
        end_strays(tables, standing)


# --- the new home -----------------------------------------------------------------------------------------------------


def take(tables: Tables, standing: Standing, request: Give) -> Answer:
    refused = _other_epoch(standing, request.epoch)
    if refused is not None:
        return refused
    if request.giver in standing.missing:  # else it is a late duplicate: what is here may be newer
        for key, entry in request.rows:
            if _comes_from(standing, key, request.giver):
                _write(tables, standing, key, entry)
        for key in request.damaged:
            if _comes_from(standing, key, request.giver):
                tables.put_damaged(key)
        for outcome in request.outcomes:
            if _comes_from(standing, outcome.key, request.giver):
                remember(tables, outcome)
    return Done()


def _comes_from(standing: Standing, key: bytes, giver: bytes) -> bool:
    return standing.is_home_of(key) and standing.view.home_before(key) == giver


def _write(tables: Tables, standing: Standing, key: bytes, entry: Entry) -> None:
    """As `partition.write`. One entry that can't be a record, or whose bytes are gone, keeps no other from coming."""
    try:
        tables.put_record(key, entry)
    except CorruptionError as error:
        tables.pass_over(key, error)
        tables.put_damaged(key)
        return
    for place in entry.places:
        if is_here(standing, place):
            with passing_over(tables, key):
                tables.own(place, key)


def has_given(tables: Tables, standing: Standing, request: Given) -> Answer:
    refused = _other_epoch(standing, request.epoch)
    if refused is None and request.giver in standing.missing:
        missing = tuple(giver for giver in standing.missing if giver != request.giver)
        tables.put_standing(msgspec.structs.replace(standing, missing=missing))
    return refused or Done()


def _other_epoch(standing: Standing, epoch: int) -> Answer | None:
    if standing.is_removed:
        return Refused("this host was removed from the cluster", is_removed=True)
    if epoch == standing.view.epoch:
        return None
    return Stale(standing.view.epoch) if epoch < standing.view.epoch else Later()
