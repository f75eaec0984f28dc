"""Each step of each operation fails, or is interrupted: the change is then done wholly or not at all, nothing leaks."""

from __future__ import annotations

import errno
import itertools
import os

import lmdb
import pytest

import memstore
from tests.crash.leftovers import held_locks, leftovers, open_fds, shared_mappings
from tests.crash.operations import OPERATIONS, Operation
from tests.crash.test_kill_at_steps import check_goes_on
from tests.examples import one_in
from tests.inside import root_of
from tests.support import faults

CAN_FAIL = faults.STEPS - faults.CLEANUPS
# A segment whose claim fails at these, and what is not swept after a change (nor when its unlinking can't be synced),
# is left to the next sweep; all else is given back at once.
CLAIMS = {faults.COMMIT, "open_into", "lock_exclusive", "unlink"}
ERRORS = {"EIO": OSError, "ENOSPC": memstore.StoreFullError, "EMFILE": memstore.ResourceLimitError}


pytestmark = pytest.mark.usefixtures("no_collections")


@pytest.mark.parametrize("name", one_in(2, OPERATIONS))
def test_error_at_each_step(name: str, store: memstore.Store) -> None:
    """The errors take turns; the operations are alike enough that each error meets each kind of step."""
    _check_errors(store, name, list(ERRORS))


@pytest.mark.full
@pytest.mark.parametrize("durability", ["process", "disk"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_error_at_each_step(name: str, error: str, durability: str, request: pytest.FixtureRequest) -> None:
    _check_errors(request.getfixturevalue("store" if durability == "process" else "disk_store"), name, [error])


def _check_errors(store: memstore.Store, name: str, errors: list[str]) -> None:
    names = _steps(store, name)
    for number, step in enumerate(names, 1):
        error = errors[number % len(errors)]
        code = getattr(errno, error)
        if step == faults.COMMIT:
            failure: Exception = lmdb.DiskError("injected") if error == "ENOSPC" else lmdb.Error("injected")
            expected: type[BaseException] = memstore.StoreFullError if error == "ENOSPC" else memstore.CorruptionError
        else:
            failure, expected = OSError(code, os.strerror(code)), ERRORS[error]
        what = f"{name}, {error} at step {number} of {names}: {step}"
        raised, outcome = _fail(store, name, names, number, failure, after=False, what=what)
        if raised is not None:
            assert isinstance(raised, expected), f"{what}: {raised!r}"
            operation = OPERATIONS[name]
            is_told = outcome == "old" or not operation.changes or operation.may_be_done
            assert is_told, f"{what}: it said that it failed, and did it"
        else:
            assert outcome == "new", f"{what}: it said that it did it, and failed"


# Before them and after them in turn in the fast run.
@pytest.mark.parametrize(("name", "after"), one_in(3, itertools.product(OPERATIONS, [False, True])))
def test_interrupt_at_each_step(name: str, after: bool, store: memstore.Store) -> None:
    names = _steps(store, name)
    for number, step in enumerate(names, 1):
        what = f"{name}, interrupted {'after' if after else 'before'} step {number} of {names}: {step}"
        raised, _ = _fail(store, name, names, number, KeyboardInterrupt(), after=after, what=what)
        assert isinstance(raised, KeyboardInterrupt), what


def _steps(store: memstore.Store, name: str) -> list[str]:
    operation = OPERATIONS[name]
    operation.reset(store)
    prepared = _prepare(store, operation)
    names = faults.record(lambda: operation.run(store, prepared), names=CAN_FAIL)
    assert operation.outcome(store) == "new", "it does nothing"
    return names


def _prepare(store: memstore.Store, operation: Operation) -> object:
    prepared = operation.prepare(store)
    root = root_of(store)
    root.sweeps.looked_at_held = root.sweeps.looked_for_dead = 0.0  # looks that come by time come each time
    return prepared


def _fail(
    store: memstore.Store, name: str, names: list[str], number: int, failure: BaseException, *, after: bool, what: str
) -> tuple[BaseException | None, str]:
    """Performs an operation that fails at a step. Returns what it raised, and what became of it."""
    operation = OPERATIONS[name]
    operation.reset(store)
    prepared = _prepare(store, operation)
    before = open_fds(but_ahead=store)
    raised: BaseException | None = None
    try:
        with faults.at_step(number, faults.raising(failure), after=after, names=CAN_FAIL):
            operation.run(store, prepared)
    except (OSError, memstore.MemstoreError, KeyboardInterrupt) as error:
        raised = error.with_traceback(None)
        raised.__context__ = raised.__cause__ = None  # their frames hold what they were working on
    failure.__traceback__ = failure.__context__ = failure.__cause__ = None  # also if the operation went on without it
    assert held_locks(store) == [], what
    assert open_fds(but_ahead=store) == before, what
    assert shared_mappings(store) == [], what
    outcome = operation.outcome(store)
    if isinstance(prepared, memstore.Pin):
        prepared.close()  # the row of one that is dropped goes with the next sweep
    del prepared
    is_swept_later = names[number - 1] in CLAIMS or names[number - 2 : number] == ["unlink", "sync"]
    if outcome == "old" and not is_swept_later:
        assert leftovers(store, spares=True) == [], what
    store.gc()
    assert leftovers(store) == [], what
    assert operation.outcome(store) == outcome, what
    # A change goes on where the header of what it has replaced can't be marked.
    check_goes_on(store, min(operation.keys), what, looks_at_kept=raised is not None or after)
    return raised, outcome
