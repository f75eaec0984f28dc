"""A host that answers as an index process does, in a thread of the test: the seed, and the owner of all keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from memstore.distributed.catalog import CatalogTables, look, run
from memstore.distributed.links import CLIENT, Links, Listener, hello_of_this_process
from memstore.distributed.rules import Grant, Index, Member, Request, Roster, Standing
from memstore.distributed.rules.directory import give, owner_row
from memstore.distributed.rules.nouns import TERM_BITS
from memstore.distributed.rules.owning import record_grant
from memstore.distributed.serving.duties import Driver, Duties, Ending
from memstore.distributed.serving.questions import Halt, Report, Told, decode_answer, encode
from memstore.distributed.serving.requests import Answers, Connections, KeyWaits, SeedWaits
from memstore.engine import Creation, boot_clock, close_root, deadline_after, open_root
from memstore.engine.root.roots import Root
from memstore.errors import HomeUnavailableError

Result = TypeVar("Result")
Ask = Callable[[Request], Told | None]


class AnsweringHome:
    """Attributes:
    address: where it listens.
    member: its id.
    """

    def __init__(self, root: Root, listener: Listener, links: Links, ending: Ending) -> None:
        self.root, self._listener, self._links, self._ending = root, listener, links, ending
        self.address, self.member = listener.address, root.member_id()

    def ask(self, request: Request | Report | Halt, seconds: float = 20.0) -> Told | None:
        """None: there was no answer."""
        try:
            received = self._links.send(self.address, self.member, encode(request), deadline_after(seconds))
        except HomeUnavailableError:
            return None
        return None if received is None else decode_answer(received)

    def own(self, *groups: bytes) -> tuple[Grant, ...]:
        """The grants of groups that this host owns from now on."""

        def action(tables: CatalogTables) -> tuple[Grant, ...]:
            standing = tables.standing()
            assert standing is not None
            rows = [owner_row(tables, standing.roster, group) for group in groups]
            grants = tuple(
                row.grant if row else give(tables, standing.roster, group, self.member).grant
                for group, row in zip(groups, rows, strict=True)
            )
            for group, grant in zip(groups, grants, strict=True):
                record_grant(tables, group, grant)
            return grants

        return run(self.root, action, deadline_after(10))

    def look(self, action: Callable[[CatalogTables], Result]) -> Result:
        return look(self.root, action, deadline_after(10))

    @property
    def is_ending(self) -> bool:
        """Whether it has found a reason to end, which its agent would be told."""
        return self._ending.is_set


@contextmanager
def answering(path: str, *, with_waits: bool = False) -> Generator[AnsweringHome]:
    """It does nothing by itself; `with_waits` has a thread that answers waits, and lives as long as the process."""
    use = open_root(path, "a", Creation(), 10.0)
    root, ending = use.root, Ending()
    hello, links = hello_of_this_process(), Links(secret=None, kind=CLIENT, hello=hello_of_this_process())
    member = Member(root.member_id(), "tcp://127.0.0.1:1", os.path.basename(path), True)
    _write(root, Roster(b"C" * 16, 1, 1, (member,), member.id))
    index, connections = Index(member, [], boot_clock, cluster=b"C" * 16), Connections()
    waits = KeyWaits(root, index, ending)
    duties = Duties(
        root,
        index,
        Driver(root, links, ending, lambda: None),
        ending,
        has_changed=lambda _: None,
        has_asked=lambda _: None,
        connected=connections.sessions,
        mirrored=lambda: None,
        noted=lambda: None,
        take=_not_here,
        fetch=_not_here,
    )
    at_seed = SeedWaits(root, index, ending, is_asked=lambda: None, changed=lambda: None)
    answers = Answers(
        root,
        index,
        ending,
        waits=waits,
        at_seed=at_seed,
        duties=duties,
        report=_not_here,
        promote=_not_here,
        copy=_not_here,
        connections=connections,
    )
    listener = Listener(
        "tcp://127.0.0.1:0", secret=None, member=member.id, hello=hello, serve=answers.take, stream=lambda _: None
    )
    if with_waits:
        waits.start()
        at_seed.start()
    listener.start()
    try:
        yield AnsweringHome(root, listener, links, ending)
    finally:
        ending.end()
        links.close()
        listener.close()
        close_root(use)


def join(home: AnsweringHome, here: Root) -> None:
    """Makes a cluster of the two: the first owns all keys, also those that the other one puts first."""
    members = (
        Member(home.member, home.address, "home"),
        Member(here.member_id(), "tcp://127.0.0.1:1", "here", is_owner=False),
    )
    for root in (home.root, here):
        _write(root, Roster(b"C" * 16, 1, 2, members, home.member))


def _write(root: Root, roster: Roster) -> None:
    standing = Standing(root.member_id(), roster, roster.term << TERM_BITS, roster.term)
    run(root, lambda tables: tables.put_standing(standing), deadline_after(10))


def _not_here(*_: object) -> Any:
    raise NotImplementedError
