"""The checker of histories: it takes what one store could have answered, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings

import memstore
from memstore.errors import KeyNotFoundError, StoreFullError, StoreTimeoutError, UnknownOutcomeError
from tests.children import Child, Wire
from tests.examples import examples
from tests.support.history import UNKNOWN, NotLinearizableError, Operation, Recorder, check, read_history
from tests.testing.histories import good_histories, has_an_order, spoilt_histories


def put(value: int | str, start: float, end: float, version: int | None = None, expect: int | None = None) -> Operation:
    return Operation("put", "key", start, end, value=value, version=version, expect_version=expect)


def get(value: int | str | None, start: float, end: float, version: int | None = None) -> Operation:
    return Operation("get", "key", start, end, value=value, version=version)


def missing(start: float, end: float) -> Operation:
    return get(None, start, end, 0)


def delete(start: float, end: float, version: int | None = None) -> Operation:
    return Operation("delete", "key", start, end, version=version)


def wait(newer_than: int, start: float, end: float, version: int | None = None) -> Operation:
    return Operation("wait", "key", start, end, version=version, newer_than=newer_than)


def loss(start: float, end: float, *lost: str, undoes: bool = False) -> Operation:
    return Operation("loss", "key", start, end, lost=lost, undoes=undoes)


GOOD: dict[str, list[Operation]] = {
    "a value that is lost": [put("a", 0, 1, 1), loss(2, UNKNOWN, "a"), get("a", 3, 4), missing(5, 6)],
    "a value that could be lost": [put("a", 0, 1, 1), loss(2, UNKNOWN, "a"), get("a", 5, 6)],
    "a put after a loss": [put("a", 0, 1, 1), loss(2, 3, "a"), missing(4, 5), put("b", 6, 7, 9), get("b", 8, 9)],
    "a put that was seen, not acknowledged, and undone": [
        put("a", 0, 1, 1),
        put("b", 2, UNKNOWN),
        get("b", 3, 4),
        loss(5, 6, undoes=True),
        get("a", 7, 8, 1),
    ],
    "a delete that was seen, not acknowledged, and undone": [
        put("a", 0, 1, 1),
        delete(2, UNKNOWN),
        missing(3, 4),
        loss(5, 6, undoes=True),
        get("a", 7, 8, 1),
    ],
    "nothing": [],
    "a get while a put goes on sees it": [put("a", 0, 9, 1), get("a", 1, 2), get("a", 3, 4)],
    "or does not": [put("a", 0, 9, 1), missing(1, 2), get("a", 3, 4)],
    "puts at once, in the order of their versions": [put("a", 0, 9, 2), put("b", 1, 8, 1), get("a", 10, 11)],
    "an unknown put that happened late": [put("a", 0, 1, 1), put("b", 2, UNKNOWN), get("a", 3, 4), get("b", 5, 6)],
    "an unknown put that never happened": [put("a", 0, 1, 1), put("b", 2, UNKNOWN), get("a", 3, 4), get("a", 5, 6)],
    "an unknown delete": [put("a", 0, 1, 1), delete(2, UNKNOWN), get("a", 3, 4), missing(5, 6)],
    "an unknown put that only a delete shows": [put("a", 0, UNKNOWN), delete(1, 2), missing(3, 4)],
    "an unknown put that only a version shows": [put("a", 0, UNKNOWN), get(None, 1, 2, 7), get("a", 3, 4, 7)],
    "a delete between two puts": [put("a", 0, 1, 1), delete(2, 3), missing(4, 5), put("b", 6, 7, 2), get("b", 8, 9)],
    "a put that expects": [put("a", 0, 1, 1), put("b", 2, 3, 2, expect=1), get("b", 4, 5)],
    "a wait that ends with a put": [put("a", 0, 1, 1), wait(1, 2, 9, 2), put("b", 3, 4, 2)],
    "a wait that ends with nothing": [put("a", 0, 1, 1), wait(1, 2, 9), put("b", 8, 9, 2)],
}

BAD: dict[str, list[Operation]] = {
    "a value is gone that no loss has taken": [put("a", 0, 1, 1), loss(2, 3, "b", undoes=True), missing(4, 5)],
    "a value is gone before the loss": [put("a", 0, 1, 1), missing(2, 3), loss(4, UNKNOWN, "a"), get("a", 5, 6)],
    "a lost value is back": [put("a", 0, 1, 1), loss(2, UNKNOWN, "a"), missing(3, 4), get("a", 5, 6)],
    "a deleted value is back after a loss": [
        put("a", 0, 1, 1),
        delete(2, 3),
        loss(4, 5, "a", undoes=True),
        get("a", 6, 7),
    ],
    "an acknowledged put is undone": [
        put("a", 0, 1, 1),
        put("b", 2, 3, 2),
        loss(4, 5, "c", undoes=True),
        get("a", 6, 7),
    ],
    "an undone value is the old one, and not of no version": [
        put("a", 0, 1, 1),
        put("b", 2, UNKNOWN),
        get("b", 3, 4),
        loss(5, 6),
        get("a", 7, 8, 1),
    ],
    "an acknowledged put that is lost": [put("a", 0, 1, 1), missing(2, 3)],
    "an acknowledged put that is lost for the one before": [put("a", 0, 1, 1), put("b", 2, 3, 2), get("a", 4, 5)],
    "a value that was never put": [put("a", 0, 1, 1), get("b", 2, 3)],
    "a torn value": [put("a", 0, 1, 1), put("b", 2, 9, 2), get("torn: a and b", 3, 4)],
    "a value before it is put": [get("a", 0, 1), put("a", 2, 3, 1)],
    "an old value after a new one": [put("a", 0, 1, 1), put("b", 2, 9, 2), get("b", 3, 4), get("a", 5, 6)],
    "nothing after something": [put("a", 0, 9, 1), get("a", 1, 2), missing(3, 4)],
    "a value that was deleted": [put("a", 0, 1, 1), delete(2, 3), get("a", 4, 5)],
    "a value that is back": [put("a", 0, 1, 1), put("b", 2, UNKNOWN), get("b", 3, 4), get("a", 5, 6)],
    "a put that is there, gone, and there": [put("a", 0, UNKNOWN), get("a", 1, 2), missing(3, 4), get("a", 5, 6)],
    "a version that goes back": [put("a", 0, 1, 5), put("b", 2, 3, 4)],
    "a version that goes back over a delete": [put("a", 0, 1, 5), delete(2, 3), put("b", 4, 5, 4)],
    "two puts with one version": [put("a", 0, 9, 1), put("b", 0, 9, 1)],
    "another version than it was put with": [put("a", 0, 1, 1), get("a", 2, 3, 2)],
    "two versions of one value": [put("a", 0, UNKNOWN), get("a", 2, 3, 1), get("a", 2, 3, 2)],
    "a version that nobody put": [put("a", 0, 1, 1), get(None, 2, 3, 7)],
    "two deletes of one put": [put("a", 0, 1, 1), delete(2, 3), delete(2, 3)],
    "a delete of nothing": [delete(0, 1)],
    "nothing to delete after a put": [put("a", 0, 1, 1), delete(2, 3, version=0)],
    "a put that expected another version": [put("a", 0, 1, 1), put("b", 2, 3, 3, expect=2)],
    "two puts that expected there to be none": [put(a, 0, 9, v, expect=0) for a, v in (("a", 1), ("b", 2))],
    "a wait that overlooked a put": [put("a", 0, 1, 1), put("b", 2, 3, 2), wait(1, 4, 9)],
    "a wait that overlooked a put of an unknown version": [put("a", 0, 1), wait(1, 2, 3), get("a", 4, 5, 2)],
    "no room for a version": [put("a", 0, 1), put("b", 2, 3, 1)],
    "a wait that found an old one": [put("a", 0, 1, 1), wait(1, 2, 3, 1)],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_history_is_taken(name: str) -> None:
    assert has_an_order(GOOD[name])
    check(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_refused(name: str) -> None:
    assert not has_an_order(BAD[name])
    with pytest.raises(NotLinearizableError, match="key"):
        check(BAD[name])


@given(good_histories(most=40))
def test_what_one_store_answered_is_taken(history: list[Operation]) -> None:
    check(history)


@settings(max_examples=examples(200))
@given(spoilt_histories())
def test_the_verdict_is_that_of_all_orders(history: list[Operation]) -> None:
    has_one = has_an_order(history)
    event("good" if has_one else "bad")
    if has_one:
        check(history)
    else:
        with pytest.raises(NotLinearizableError):
            check(history)


def test_a_key_is_no_matter_of_another() -> None:
    other = Operation("put", "other", 0, 1, value="b", version=1)
    with pytest.raises(NotLinearizableError, match="'key'"):
        check([other, *BAD["an acknowledged put that is lost"]])
    with pytest.raises(NotLinearizableError, match="never put"):
        check([other, get("b", 2, 3)])


def test_a_long_history_with_many_unknown_outcomes_is_searched_soon() -> None:
    """A hundred puts of clients that were cut off, which may have happened at any time since."""
    unknown = [put(f"lost {number}", number, UNKNOWN) for number in range(100)]
    known = [put(number, 10 * number, 10 * number + 12, number + 1) for number in range(1000)]
    reads = [get(number, 10 * number + 5, 10 * number + 20) for number in range(1000)]
    late = [get("lost 7", 20_000, 20_001), get("lost 3", 20_002, 20_003)]
    check([*unknown, *known, *reads, *late])
    with pytest.raises(NotLinearizableError, match="lost 7"):
        check([*unknown, *known, *reads, *late, get("lost 7", 20_004, 20_005)])


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ValueError, match="no other has"):
        check([put("a", 0, 1, 1), put("a", 2, 3, 2)])
    with pytest.raises(ValueError, match="ends before it starts"):
        check([put("a", 1, 0, 1)])


# --- The recorder -----------------------------------------------------------------------------------------------------


def outcome_of(path: Path, act: Callable[[Recorder], object]) -> list[Operation]:
    with Recorder(path, "client") as recorder:
        act(recorder)
    return read_history([path])


def test_an_error_says_what_became_of_an_operation(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        for number, error in enumerate((UnknownOutcomeError("?"), StoreFullError("full"), KeyboardInterrupt())):
            with pytest.raises(type(error)), recorder.put("key", number):
                raise error
        with pytest.raises(KeyNotFoundError), recorder.get("key"):
            raise KeyNotFoundError("none")
        with pytest.raises(StoreTimeoutError), recorder.wait("key", newer_than=3):
            raise StoreTimeoutError("late")
        with pytest.raises(memstore.errors.VersionConflictError), recorder.put("key", "c", expect_version=1):
            raise memstore.errors.VersionConflictError("other", expected=1, found=4)

    found = outcome_of(tmp_path / "history", act)
    assert [(one.kind, one.value, one.version, one.is_known) for one in found] == [
        ("put", 0, None, False),
        ("put", 2, None, False),
        ("get", None, 0, True),
        ("wait", None, None, True),
        ("get", None, 4, True),
    ]


def test_a_put_that_failed_must_not_show(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        with pytest.raises(StoreFullError), recorder.put("key", "a"):
            raise StoreFullError("full")
        with recorder.get("key") as outcome:
            outcome.value = "a"

    with pytest.raises(NotLinearizableError, match="put failed"):
        check(outcome_of(tmp_path / "history", act))


def test_a_killed_client_leaves_an_unknown_outcome(tmp_path: Path) -> None:
    with Child(put_and_die, str(tmp_path / "client-7")) as child:
        child.process.join(60)
        assert child.process.exitcode == -signal.SIGKILL
    (found,) = read_history(tmp_path.iterdir())
    assert (found.client, found.value, found.is_known) == ("client-7", "ü", False)


def put_and_die(_: Wire, path: str) -> None:
    with Recorder(path).put("key", "ü"):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("text", ["{", '{"number": 1, "kind": "put"}', '{"kind": "put"}', "[1]", "\xff"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="history was not written by a Recorder"):
        read_history([path])


def test_processes_on_one_store_leave_a_good_history(root: str, tmp_path: Path) -> None:
    memstore.open(root).close()
    with contextlib.ExitStack() as stack:
        clients = [Child(use, root, str(tmp_path / f"client-{number}"), number) for number in range(4)]
        for client in clients:
            stack.enter_context(client)
        for client in clients:
            assert client.receive() == "half"
        clients[0].kill()
        for client in clients[1:]:
            assert client.receive() is None
    history = read_history(tmp_path.iterdir())
    check(history)
    lost = max((one for one in history if one.kind == "put" and one.is_known), key=lambda one: one.version or 0)
    late = Operation("get", lost.key, time.monotonic(), time.monotonic() + 1, version=0)
    with pytest.raises(NotLinearizableError):
        check([*history, late])


def use(wire: Wire, root: str, path: str, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    with memstore.open(root) as store, Recorder(path) as recorder:
        for step in range(60):
            action = int(torch.randint(4, (), generator=numbers))
            value = 1000 * seed + step
            if action < 2:
                with recorder.put("key", value) as outcome:
                    outcome.version = store.put("key", torch.full((1000,), value))
            elif action == 2:
                with recorder.get("key") as outcome:
                    found = store.get("key", None)
                    outcome.version, outcome.value = (0, None) if found is None else (None, the_one_value(found))
            elif step % 4 == 0:
                with recorder.delete("key") as outcome:
                    outcome.version = None if store.delete("key", missing_ok=True) else 0
            if step == 30:
                wire.send("half")


def the_one_value(tensor: torch.Tensor) -> int | str:
    least, most = int(tensor.min()), int(tensor.max())
    return least if least == most else f"torn: {least} to {most}"
