"""What an index process answers where something fails: nothing that a caller would take for more than is known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import pytest

from memstore.distributed import rules
from memstore.distributed.catalog import CatalogTables, change_of
from memstore.distributed.rules import Answer, Grant, Index, Request, groups_of, owning
from memstore.distributed.rules.client import error_of
from memstore.distributed.rules.messages import Commit, Committed, Failed, Found, Lookup, Open, Opened, Publish, Resolve
from memstore.distributed.rules.nouns import Call
from memstore.distributed.serving.requests import KeyWaits
from memstore.engine import Change, Content
from memstore.errors import CorruptionError, StoreFullError
from tests.distributed.serving.homes import Ask, answering

GROUPS = [b"k", b"bad", b"\xff", b"a\0b", *(b"%d" % number for number in range(1500))]
GRANTS: dict[bytes, Grant] = {}  # of the host that is asked
CONTENT = Content(b"d", b"", 1, inline=b"v")


@pytest.fixture
def home(scratch: str) -> Iterator[tuple[Ask, Callable[[], int]]]:
    """Asks the owner of all keys; and how many keys it has."""
    with answering(scratch) as one:
        GRANTS.update(zip(GROUPS, one.own(*GROUPS), strict=True))
        yield lambda request: one.ask(request, 1.0), lambda: one.look(lambda tables: len(tables.page(b"", 10)))


def commit(ask: Ask, *keys: bytes) -> Commit:
    """The first call of a new session."""
    opened = ask(Open())
    assert isinstance(opened, Opened)
    changes = tuple(change_of(Change(key, CONTENT), b"t" * 16) for key in keys or (b"k",))
    return Commit(Call(opened.session, 0, 1, 1), changes, of(change.key for change in changes))


def of(keys: Iterable[bytes]) -> tuple[Grant, ...]:
    return tuple(GRANTS[group] for group in groups_of(keys))


def test_a_key_that_is_none_is_refused_for_good(home: tuple[Ask, Callable[[], int]]) -> None:
    ask, keys = home
    for key in (b"\xff", b"a\0b"):
        request = commit(ask, b"k", key)
        failed = ask(request)
        assert isinstance(failed, Failed) and failed.error == "InvalidKeyError"
        assert ask(request) == failed
    assert keys() == 0


def test_a_large_change_holds_up_no_read(home: tuple[Ask, Callable[[], int]], monkeypatch: pytest.MonkeyPatch) -> None:
    ask, _ = home
    answer, threads = Index.answer, list[str]()

    def noted(index: Index, tables: CatalogTables, request: Request) -> Answer:
        threads.append(threading.current_thread().name)
        return answer(index, tables, request)

    small, large = commit(ask), commit(ask, *(b"%d" % number for number in range(1500)))
    with monkeypatch.context() as patch:
        patch.setattr(Index, "answer", noted)
        for request in (small, large):
            assert isinstance(ask(request), Committed)
    assert not threads[0].startswith("change") and threads[-1].startswith("change")


def test_what_can_be_no_record_is_refused_before_the_store_is_locked(
    home: tuple[Ask, Callable[[], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, keys = home
    whole = commit(ask)
    answer, heard = Index.answer, list[Request]()

    def noted(index: Index, tables: CatalogTables, request: Request) -> Answer:
        heard.append(request)
        return answer(index, tables, request)

    monkeypatch.setattr(Index, "answer", noted)
    for body in (b"\xc1", b"\x9f" + bytes(100), b"\xc1" * (1 << 17)):
        number = len(heard) + 2
        changes = (*whole.changes, rules.Change(b"bad", body))
        request = Commit(Call(whole.call.session, 1, number, 1), changes, of((b"k", b"bad")))
        failed = ask(request)
        assert isinstance(failed, Failed) and failed.error == "CorruptionError"
        assert ask(request) == failed, "it is noted as what became of the call"
    publish = Publish(b"k", "attempt", 1, (), b"\xc1")
    failed = ask(publish)
    assert isinstance(failed, Failed) and failed.error == "CorruptionError"
    assert not heard and keys() == 0


def test_a_damaged_record_is_told_with_its_key(home: tuple[Ask, Callable[[], int]]) -> None:
    ask, _ = home
    failing_key = failing(CorruptionError("'k' in the catalog: damaged", key="k"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Index, "answer", failing_key)
        failed = ask(Lookup((b"k",), of([b"k"])))
    assert isinstance(failed, Failed) and failed.key == b"k"
    error = error_of(failed)
    assert isinstance(error, CorruptionError) and error.key == "k" and str(error).count("'k'") == 1


def failing(error: Exception) -> Callable[..., Answer]:
    def answer(index: Index, tables: CatalogTables, request: Request) -> Answer:
        raise error

    return answer


@pytest.mark.parametrize("error", [StoreFullError("no room"), CorruptionError("a row"), MemoryError()])
def test_a_call_that_failed_is_never_made_afterwards(
    home: tuple[Ask, Callable[[], int]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    ask, keys = home
    request = commit(ask)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "answer", failing(error))
        failed = ask(request)
    assert isinstance(failed, Failed)
    assert ask(request) == failed, "a late duplicate is answered again"
    assert keys() == 0


def test_a_call_that_was_made_is_answered_so_whatever_fails_behind_it(
    home: tuple[Ask, Callable[[], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, keys = home
    request = commit(ask)

    def fails(waits: KeyWaits) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(KeyWaits, "look_again", fails)
        assert isinstance(ask(request), Committed)
    assert keys() == 1


@pytest.mark.parametrize("error", [StoreFullError("no room"), MemoryError()])
def test_a_question_that_failed_says_nothing_of_the_call(
    home: tuple[Ask, Callable[[], int]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An audit would take a `Failed` for the call's own answer, and give its bytes back."""
    ask, _ = home
    request = commit(ask)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "answer", failing(error))
        assert ask(Resolve(request.call.session, request.call.lane, request.call.number)) is None
    assert isinstance(ask(request), Committed)


def test_an_answer_has_the_first_records_that_fit(
    home: tuple[Ask, Callable[[], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key may be asked for thousands of times: its record would be in the answer as often."""
    ask, _ = home
    assert isinstance(ask(commit(ask)), Committed)
    with monkeypatch.context() as patch:
        patch.setattr(owning, "BYTES_LIMIT", 10_000)
        found = ask(Lookup((b"k",) * 1000, of([b"k"])))
        assert isinstance(found, Found) and 0 < len(found.entries) < 1000
