"""A host that answers as an index process does, in a thread of the test; its only member, and the home of all keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from memstore.distributed.actors import FoundActor
from memstore.distributed.catalog import CatalogTables, look, run
from memstore.distributed.links import CLIENT, Links, Listener, hello_of_this_process
from memstore.distributed.rules import Index, Member, Request, View
from memstore.distributed.rules.moving import adopt
from memstore.distributed.serving.answering import Answers
from memstore.distributed.serving.connections import Connections
from memstore.distributed.serving.ending import Ending
from memstore.distributed.serving.messages import Halt, Report, Reported, Told, decode_answer, encode
from memstore.distributed.serving.waiting import Waits
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
    view = View(b"C" * 16, 1, (member,), (member.id,), member.id)
    run(root, lambda tables: adopt(tables, member.id, view), deadline_after(10))
    index = Index(member, member.address, boot_clock)
    waits = Waits(root, index, ending)
    answers = Answers(
        root,
        index,
        waits,
        ending,
        report=_report,
        actor=lambda: FoundActor(b""),
        owes=lambda: None,
        connections=Connections(),
    )
    listener = Listener(
        "tcp://127.0.0.1:0", secret=None, member=member.id, hello=hello, serve=answers.take, stream=lambda _: None
    )
    if with_waits:
        waits.start()
    listener.start()
    try:
        yield AnsweringHome(root, listener, links, ending)
    finally:
        ending.end()
        links.close()
        listener.close()
        close_root(use)


def join(home: AnsweringHome, here: Root) -> None:
    """A cluster of the two from now on: all keys are at home with the first."""
    members = (
        Member(home.member, home.address, "home"),
        Member(here.member_id(), "tcp://127.0.0.1:1", "here", is_home=False),
    )
    view = View(b"C" * 16, 2, members, (home.member,), home.member)
    for root in (home.root, here):
        member = root.member_id()
        run(root, lambda tables, member=member: adopt(tables, member, view), deadline_after(10))


def _report() -> Reported:
    raise NotImplementedError
