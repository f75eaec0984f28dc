"""Steps are driven: what they ask for is done, and what they have to know is thrown into them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from memstore.distributed.client.driving import drive
from memstore.distributed.links import Begun
from memstore.distributed.rules import NOT_SENT, DeadlinePassed, Done, Pause, Race, Send, Stale, Steps, Transact
from memstore.distributed.rules.messages import Open
from memstore.engine import Creation, Root, close_root, deadline_after, open_root
from memstore.errors import HomeUnavailableError, LinkRefusedError, StoreTimeoutError

DONE, STALE = (msgspec.msgpack.encode(answer) for answer in (Done(), Stale(2)))
MESSAGE = Send("tcp://127.0.0.1:1", None, Open())


class Answering:
    """Links on which the other side says this, or raises it."""

    def __init__(self, *answers: bytes | BaseException | None, trouble: str = "no route") -> None:
        self.answers = list(answers)
        self.trouble = trouble
        self.sent = 0
        self.given_up: list[str] = []

    def send(self, address: str, member: bytes | None, message: bytes, deadline: float) -> bytes | None:
        self.sent += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def begin(
        self,
        address: str,
        member: bytes | None,
        message: bytes,
        seconds: float,
        told: Callable[[], None],
        deadline: float,
    ) -> Begun:
        """Answers later those of which an answer is left, and the others never."""
        self.sent += 1
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, BaseException):
            raise answer
        begun = Begun(told, lambda: self.given_up.append(address))
        if answer is not None:
            threading.Timer(0.05, begun.end, (answer,)).start()
        return begun

    def trouble_of(self, address: str) -> str:
        return self.trouble


@pytest.fixture
def served(scratch: str) -> Iterator[Root]:
    use = open_root(scratch, "a", Creation(), 10.0)
    yield use.root
    close_root(use)


def test_what_is_asked_for_comes_back(served: Root) -> None:
    def steps() -> Steps[list[object]]:
        answer = yield MESSAGE
        yield Pause(0.001)
        version = yield Transact(lambda tables: tables.version, is_read=True)
        return [answer, version]

    assert drive(steps(), served, Answering(DONE), deadline_after(10)) == [Done(), 0]


def test_what_a_transaction_raises_reaches_the_steps(served: Root) -> None:
    def fail(tables: object) -> None:
        raise StoreTimeoutError("no")

    def steps() -> Steps[str]:
        try:
            yield Transact(fail)
        except StoreTimeoutError as error:
            return str(error)
        return ""

    assert drive(steps(), served, Answering(DONE), deadline_after(10)) == "no"


@pytest.mark.parametrize("answer", [None, b"", b"\xc1", msgspec.msgpack.encode([99])])
def test_an_answer_that_says_nothing_is_none(served: Root, answer: bytes | None) -> None:
    def steps() -> Steps[object]:
        return (yield MESSAGE)

    assert drive(steps(), served, Answering(answer), deadline_after(10)) is None


@pytest.mark.parametrize(("within", "answer"), [(None, None), (60.0, NOT_SENT)])
def test_a_link_that_breaks_before_the_time_of_an_answer_is_told_apart(
    served: Root, within: float | None, answer: object
) -> None:
    """Keepers are given their two seconds, however often the way to them breaks."""

    def steps() -> Steps[object]:
        return (yield Send(MESSAGE.address, None, Open(), within))

    assert drive(steps(), served, Answering(None), deadline_after(10)) is answer


def test_the_deadline_is_told_in_place_of_a_message_with_the_reason_of_the_last_one(served: Root) -> None:
    links = Answering(None)

    def steps() -> Steps[str]:
        try:
            while True:
                yield MESSAGE
                yield Pause(0.01)
        except DeadlinePassed as passed:
            return str(passed)

    started = time.monotonic()
    assert drive(steps(), served, links, deadline_after(0.5)) == "no route"
    assert 0.5 <= time.monotonic() - started < 20
    assert links.sent > 1


@pytest.mark.parametrize(("trouble", "told"), [("", "this host hasn't heard of it"), ("no route", "^no route$")])
def test_the_last_answer_is_the_reason_where_a_link_has_none(served: Root, trouble: str, told: str) -> None:
    """The time of a call is often over while its last message is under way."""

    def steps() -> Steps[None]:
        while True:
            yield MESSAGE
            yield Pause(0.01)

    with pytest.raises(DeadlinePassed, match=told):
        drive(steps(), served, Answering(STALE, None, trouble=trouble), deadline_after(0.1))


def test_transactions_go_on_after_the_deadline_and_then_it_is_told(served: Root) -> None:
    done: list[str] = []

    def steps() -> Steps[None]:
        yield Transact(lambda tables: done.append("before"))
        try:
            yield MESSAGE
        except DeadlinePassed:
            yield Transact(lambda tables: done.append("after"))

    links = Answering(DONE)
    drive(steps(), served, links, time.monotonic() - 1)
    assert (done, links.sent) == (["before", "after"], 0)


RACE = Race(tuple(Send(f"tcp://127.0.0.1:{port}", None, Open()) for port in (1, 2, 3)))


def race() -> Steps[object]:
    return (yield RACE)


def test_the_first_answer_of_a_race_counts_and_the_others_are_given_up(served: Root) -> None:
    links = Answering(None, DONE)
    assert drive(race(), served, links, deadline_after(10)) == Done()
    assert links.given_up == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:3"]


def test_a_race_ends_where_one_is_not_sent_or_all_are_late(served: Root) -> None:
    links = Answering(None, HomeUnavailableError("away"))
    assert drive(race(), served, links, deadline_after(10)) is NOT_SENT
    assert (links.sent, links.given_up) == (2, ["tcp://127.0.0.1:1"])
    links = Answering(None, None, None)
    assert drive(race(), served, links, deadline_after(0.2)) is None
    assert len(links.given_up) == 3


def test_an_interrupt_ends_the_steps_at_once(served: Root) -> None:
    ended: list[str] = []

    def steps() -> Steps[None]:
        try:
            yield MESSAGE
        finally:
            ended.append("closed")

    with pytest.raises(KeyboardInterrupt):
        drive(steps(), served, Answering(KeyboardInterrupt()), deadline_after(10))
    assert ended == ["closed"]


def test_a_refused_link_is_tried_again_and_then_an_error(served: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstore.distributed.client.driving.REFUSED_FOR", 0.2)

    def steps() -> Steps[object]:
        while True:
            answer = yield MESSAGE
            if answer is not NOT_SENT:
                return answer
            yield Pause(0.01)

    refusal = LinkRefusedError("another secret")
    assert drive(steps(), served, Answering(refusal, refusal, DONE), deadline_after(10)) == Done()
    with pytest.raises(LinkRefusedError, match="another secret"):
        drive(steps(), served, Answering(refusal), deadline_after(10))
