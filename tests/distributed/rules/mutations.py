"""Rules left out on purpose. Schedules must find what each of them prevents."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from memstore.distributed.rules import calls, changing, giving, joining, lending, moving, partition, seed
from memstore.distributed.rules.index import Index
from memstore.distributed.rules.members import Standing
from memstore.distributed.rules.messages import Done, Failed, Given, Listed, NoSession, Open, Stale
from memstore.distributed.rules.seed import Seed
from memstore.distributed.rules.sessions import Sessions
from memstore.distributed.rules.steps import NotSent
from memstore.errors import HomeUnavailableError
from tests.distributed.rules.tables import SimTables
from tests.distributed.rules.world import World

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, tuple[str, Callable[[Patch], None]]] = {}  # what is left out -> a scene that finds it, and how


def mutation(name: str, scene: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS[name] = (scene, patch)
        return patch

    return add


# --- calls ------------------------------------------------------------------------------------------------------------


@mutation("a repeated call is made again", "cuts")
def _(patch: Patch) -> None:
    patch.setattr(partition, "answer_again", lambda tables, call: None)  # pyright: ignore


@mutation("an old duplicate is made again", "late duplicates")
def _(patch: Patch) -> None:
    def answer_again(tables: Any, call: Any) -> Any:
        answer = calls.answer_again(tables, call)
        last = tables.last_call(call.session, call.lane)
        return None if isinstance(answer, NoSession) and last is not None and last.number > call.number else answer

    patch.setattr(partition, "answer_again", answer_again)


@mutation("outcomes are in memory only", "kills")
def _(patch: Patch) -> None:
    kill_index = World.kill_index

    def forget(world: World, host: Any) -> None:
        host.tables.calls.clear()
        kill_index(world, host)

    patch.setattr(World, "kill_index", forget)


@mutation("a failure is no outcome", "late duplicates")
def _(patch: Patch) -> None:
    def keep_answer(tables: Any, call: Any, answer: Any) -> Any:
        return answer if isinstance(answer, Failed) else calls.keep_answer(tables, call, answer)

    patch.setattr(partition, "keep_answer", keep_answer)


@mutation("a call that was interrupted leaves its number to the next one", "interrupts")
def _(patch: Patch) -> None:
    commit = changing.Client.commit

    def interrupted(client: Any, *arguments: Any) -> Any:
        before = copy.copy(client._numbers)
        try:
            return (yield from commit(client, *arguments))
        except GeneratorExit:
            client._numbers = before
            raise

    patch.setattr(changing.Client, "commit", interrupted)


@mutation("a session that has ended is a new one", "sessions")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "has_session", lambda tables, session: True)  # pyright: ignore


@mutation("a call that wasn't answered is made anew", "cuts")
def _(patch: Patch) -> None:
    def once(home: Any, request: Any, attempt: Any) -> Any:
        attempt.is_sent = True
        answer = yield from changing.send(home, request)
        return Stale(0) if answer is None else answer

    patch.setattr(changing, "_repeated", once)


@mutation("no answer means that nothing happened", "cuts")
def _(patch: Patch) -> None:
    patch.setattr(changing, "UnknownOutcomeError", HomeUnavailableError)


@mutation("a message without an answer was not sent", "cuts")
def _(patch: Patch) -> None:
    patch.setattr(changing, "NotSent", NotSent | None)  # pyright: ignore


@mutation("a batch is several commits", "storm")
def _(patch: Patch) -> None:
    commit = changing.Client.commit

    def one_by_one(client: Any, changes: Any, until: int) -> Any:
        for change in changes:
            versions = yield from commit(client, [change], until)
        return versions  # pyright: ignore

    patch.setattr(changing.Client, "commit", one_by_one)


@mutation("the sessions of clients that are gone stay", "sessions")
def _(patch: Patch) -> None:
    def nothing(self: Any, connected: Any) -> Any:
        return
        yield

    patch.setattr(Sessions, "run", nothing)


@mutation("sessions end though their clients are there", "sessions of the unlucky")
def _(patch: Patch) -> None:
    run = Sessions.run
    patch.setattr(Sessions, "run", lambda self, connected: run(self, lambda: ()))  # pyright: ignore


@mutation("a call of a session that has ended was never made", "sessions")
def _(patch: Patch) -> None:
    repeated = changing._repeated  # pyright: ignore[reportPrivateUsage]

    def never(home: Any, request: Any, attempt: Any) -> Any:
        answer = yield from repeated(home, request, attempt)
        attempt.is_sent = attempt.is_sent and not isinstance(answer, NoSession)
        return answer

    patch.setattr(changing, "_repeated", never)


# --- who is the home --------------------------------------------------------------------------------------------------


@mutation("requests of any epoch are answered", "homes")
def _(patch: Patch) -> None:
    refusal = partition.refusal
    patch.setattr(partition, "refusal", lambda standing, epoch, keys: refusal(standing, standing.view.epoch, ()))  # pyright: ignore


@mutation("a local commit doesn't look whether the home is still here", "stalled moves")
def _(patch: Patch) -> None:
    patch.setattr(
        partition,
        "commit_here",
        lambda tables, membership, changes: partition.apply(tables, tables.standing(), changes),  # pyright: ignore
    )


@mutation("a new home begins at once", "joins")
def _(patch: Patch) -> None:
    patch.setattr(Standing, "is_ready_for", lambda standing, key: True)  # pyright: ignore


@mutation("versions go on from where the new home was", "losses")
def _(patch: Patch) -> None:
    adopt = moving.adopt

    def keep_version(tables: Any, member: bytes, view: Any) -> bool:
        version = tables.version
        is_newer = adopt(tables, member, view)
        tables.version = version
        return is_newer

    patch.setattr(moving, "adopt", keep_version)
    patch.setattr(seed, "adopt", keep_version)


# --- moving -----------------------------------------------------------------------------------------------------------


@mutation("records are written whenever they come", "homes")
def _(patch: Patch) -> None:
    def take(tables: Any, standing: Any, request: Any) -> Any:
        for key, entry in request.rows:
            if standing.is_home_of(key):
                partition.write(tables, standing, key, entry)
        return Done()

    patch.setattr(moving, "take", take)


@mutation("'given' is said before the records are deleted", "homes")
def _(patch: Patch) -> None:
    patch.setattr(giving, "_drop_page", lambda tables, view, after: (None,))  # pyright: ignore


@mutation("records are sent once", "homes")
def _(patch: Patch) -> None:
    tell = giving._tell  # pyright: ignore[reportPrivateUsage]

    def once(standing: Any, home: bytes, request: Any) -> Any:
        if isinstance(request, Given):
            return (yield from tell(standing, home, request))
        yield from giving.send(standing.view.member(home), request)
        return True

    patch.setattr(giving, "_tell", once)


@mutation("what lies on no member stays in the index", "losses")
def _(patch: Patch) -> None:
    patch.setattr(giving, "dispose", lambda tables, standing, entry: None)  # pyright: ignore
    patch.setattr(SimTables, "delete_record", _delete_unless_lost)


def _delete_unless_lost(tables: SimTables, key: bytes) -> None:
    standing = tables.standing()
    entry = tables.records[key]
    if standing is None or all(place.host in standing.view.ids for place in entry.places):
        del tables.records[key]


@mutation("a page of keys may be of another epoch, or short", "homes")
def _(patch: Patch) -> None:
    def list_page(tables: Any, standing: Any, request: Any) -> Any:
        page = tables.page(request.after, request.limit, request.prefix)
        return Listed(tuple((key, entry and entry.version) for key, entry in page if standing.is_home_of(key)))

    patch.setattr(partition, "list_page", list_page)


# --- the seed ---------------------------------------------------------------------------------------------------------


@mutation("the view changes before all have settled", "joins")
def _(patch: Patch) -> None:
    patch.setattr(Seed, "_all_settled", lambda seed, view: True)  # pyright: ignore


@mutation("a removal counts as settled", "lost while homes move")
def _(patch: Patch) -> None:
    remove = Seed.remove

    def settled(self: Any, tables: Any, standing: Any, request: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Seed, "_all_settled", lambda seed, view: True)  # pyright: ignore
            return remove(self, tables, standing, request)

    patch.setattr(Seed, "remove", settled)


@mutation("a stranger is heard whatever epoch it names", "losses")
def _(patch: Patch) -> None:
    answer = Seed.answer

    def heard(self: Any, tables: Any, standing: Any, ask: Any) -> Any:
        if standing.view.member(ask.member.id) is None:
            ask = msgspec.structs.replace(ask, epoch=standing.view.epoch)
        return answer(self, tables, standing, ask)

    patch.setattr(Seed, "answer", heard)


@mutation("a member says that it has settled before it has", "joins")
def _(patch: Patch) -> None:
    ask_of = Index._ask  # pyright: ignore[reportPrivateUsage]
    patch.setattr(Index, "_ask", lambda self, tables: msgspec.structs.replace(ask_of(self, tables), is_settled=True))  # pyright: ignore


# --- bytes ------------------------------------------------------------------------------------------------------------


@mutation("nobody audits what was lent", "kills")
def _(patch: Patch) -> None:
    def nothing(audit: Any) -> Any:
        return
        yield

    patch.setattr(lending.Audit, "run", nothing)


@mutation("an audit doesn't resolve the call", "stalls")
def _(patch: Patch) -> None:
    def resolved(audit: Any, standing: Any, lent: Any) -> Any:
        return True
        yield

    patch.setattr(lending.Audit, "_resolved", resolved)


@mutation("an audit gives back what was lent anew", "moves under audits")
def _(patch: Patch) -> None:
    patch.setattr(lending.Audit, "_retire", lambda audit, tables, place, lent: tables.retire(place))  # pyright: ignore


@mutation("an audit goes by what was at home here before", "stalled moves")
def _(patch: Patch) -> None:
    patch.setattr(Standing, "__eq__", lambda one, other: True)  # pyright: ignore


@mutation("an audit doesn't wait until a call's time is over", "slow")
def _(patch: Patch) -> None:
    lend = SimTables.lend
    patch.setattr(
        SimTables,
        "lend",
        lambda tables, place, lent: lend(tables, place, msgspec.structs.replace(lent, until=0)),  # pyright: ignore
    )


@mutation("lent bytes are not looked for before they are used", "stalled moves")
def _(patch: Patch) -> None:
    for module in (partition, changing.partition):
        patch.setattr(module, "bytes_gone", lambda tables, standing, changes: None)  # pyright: ignore


@mutation("a host isn't told what nothing names any more", "quiet")
def _(patch: Patch) -> None:
    patch.setattr(SimTables, "owe", lambda tables, place: None)  # pyright: ignore


@mutation("a host is told once", "long")
def _(patch: Patch) -> None:
    send = lending.send

    def once(member: Any, request: Any) -> Any:
        return (yield from send(member, request)) or Done()

    patch.setattr(lending, "send", once)


@mutation("bytes that were given away are nobody's", "homes")
def _(patch: Patch) -> None:
    lend = SimTables.lend
    patch.setattr(
        SimTables,
        "lend",
        lambda tables, place, lent: lend(tables, place, lent) if lent.session else None,  # pyright: ignore
    )


@mutation("an audit looks once, whatever becomes of the members", "losses")
def _(patch: Patch) -> None:
    run = lending.Audit.run

    def of_one_epoch(audit: Any) -> Any:
        standing = yield from lending.transact(lambda tables: tables.standing())
        audit._epoch = 0 if standing is None else standing.view.epoch
        return (yield from run(audit))

    patch.setattr(lending.Audit, "run", of_one_epoch)


# --- roots with keys --------------------------------------------------------------------------------------------------


@mutation("what was being registered is begun anew after a kill", "roots with keys")
def _(patch: Patch) -> None:
    kill_index = World.kill_index

    def forget(world: World, host: Any) -> None:
        for key, row in host.tables.from_before.items():
            host.tables.from_before[key] = msgspec.structs.replace(row, session=0)
        kill_index(world, host)

    patch.setattr(World, "kill_index", forget)


@mutation("what registers keys has sessions as others have", "roots with keys, away for long")
def _(patch: Patch) -> None:
    patch.setattr(joining, "Open", lambda lasts: Open())  # pyright: ignore


@mutation("a root with keys becomes a home at once", "roots with keys")
def _(patch: Patch) -> None:
    patch.setattr(moving, "has_keys_of_its_own", lambda tables: False)  # pyright: ignore
