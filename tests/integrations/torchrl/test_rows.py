"""The rows of a storage: written over in place, each whole, whoever writes or dies. Without torchrl."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import memstore
from memstore.integrations import torchrl
from memstore.integrations.torchrl import rows as storage_rows
from memstore.integrations.torchrl.rows import WholeRows, create_rows, slots_of, staging_rows
from tests.children import Child, Wire, children
from tests.examples import examples
from tests.integrations.torchrl.whole import batch, new, numbers_of, opened


def test_rows_are_those_of_the_last_writes_in_every_process(store: memstore.Store) -> None:
    rows, other = new(store, 10), opened(store)
    assert rows.append(batch([0, 1, 2])).tolist() == [0, 1, 2]
    assert other.append(batch([3, 4])).tolist() == [3, 4]
    rows.write(batch([9, 8]), np.array([3, 0]))
    assert len(rows) == len(other) == 5
    assert numbers_of(other.read([0, 1, 2, 3, 4])) == [8, 1, 2, 9, 4]
    assert numbers_of(other.live()) == [8, 1, 2, 9, 4]
    assert (other.journal.state.cursor, other.journal.state.written, other.journal.last) == (5, 7, 0)


@given(slots=st.integers(1, 9000), row=st.integers(0, 1 << 25))
def test_the_slots_can_be_told_from_the_size_of_the_entry(slots: int, row: int) -> None:
    assert slots_of(slots + staging_rows(slots, row), row) == slots


WRITES = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 14)),
        st.tuples(st.just("write"), st.lists(st.integers(0, 5), max_size=14, unique=True)),
        st.tuples(st.just("change"), st.lists(st.integers(0, 5), max_size=6, unique=True)),
        st.tuples(st.just("empty"), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=examples(40))
@given(writes=WRITES, staged=st.integers(1, 6))
def test_all_orders_of_writes_leave_what_a_list_would(writes: list[Any], staged: int) -> None:
    """Six slots; batches of more than `staged` rows are several, and those of more than six go round."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memstore-test-") as folder,
        pytest.MonkeyPatch.context() as m,
    ):
        m.setattr(storage_rows, "_STAGED_ROWS", staged)
        with memstore.open(f"{folder}/store") as store:
            rows, reader = new(store, 6), None
            expected: dict[int, int] = {}
            generations, cursor, number = [-1] * 6, 0, 0
            for kind, what in writes:
                length = len(rows)
                if kind == "append":
                    slots = [(cursor + i) % 6 for i in range(what)]
                    assert rows.append(batch(list(range(number, number + what)))).tolist() == slots
                    cursor = (cursor + what) % 6
                elif kind == "write":
                    slots = what
                    rows.write(batch(list(range(number, number + len(what)))), np.array(what, np.int64))
                elif kind == "change":
                    slots = [slot for slot in what if slot < length]
                    values = torch.arange(number, number + len(slots))
                    rows.change(np.array(slots, np.int64), lambda found, values=values: found.update_(batch(values)))
                else:
                    slots, expected = [], {}
                    generations = [one + 1 if one >= 0 else one for one in generations]
                    rows.empty()
                for place, slot in enumerate(slots):
                    expected[slot] = number + place
                    generations[slot] += 1
                number += len(slots)
                reader = reader or opened(store)
                whole = next((slot for slot in range(6) if slot not in expected), 6)
                assert len(reader) == whole
                assert numbers_of(reader.read(list(range(whole)))) == [expected[slot] for slot in range(whole)]
                found = reader.generations(torch.arange(-1, 7)).tolist()
                assert [one >= 0 for one in found] == [False, *(one >= 0 for one in generations), False]
                if staged == 6 and all(len(set(slots)) == len(slots) for _ in (0,)):
                    assert found[1:-1] == generations


# --- kills ------------------------------------------------------------------------------------------------------------

_FILES = {storage_rows.__file__}


def _die_at_line(_: Wire, path: str, number: int, kind: str) -> None:
    """Writes, and is killed before the `number`-th line of the journal that it comes to; it never goes in lock-step."""
    rows = opened(memstore.open(path))
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in _FILES:
            return None
        if event == "line":
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    if kind == "append":
        rows.append(batch([100, 101, 102]))
    else:
        rows.write(batch([100, 101, 102]), np.array([4, 0, 2]))
    sys.settrace(None)


@pytest.mark.parametrize(
    ("kind", "stride"),
    [("append", 7), *(pytest.param(kind, 1, marks=pytest.mark.full) for kind in ("append", "write"))],
)
def test_a_kill_at_each_line_of_a_write_leaves_all_or_nothing(root: str, kind: str, stride: int) -> None:
    """Five slots of six are written, and the next is slot 4: the batch goes round."""
    outcomes: list[bool] = []
    with memstore.open(root, timeout=10.0) as store:
        rows = new(store, 6)
        for number in range(1, 200, stride):
            rows.empty()
            rows.hold(lambda: rows.journal.set_counts(0, 0))
            rows.append(batch([0, 1, 2, 3, 4]))
            rows.hold(lambda: rows.journal.set_counts(4, 5))
            with Child(_die_at_line, root, number, kind) as child:
                child.process.join(60)
                if child.process.exitcode == 0:
                    break
                assert child.process.exitcode == -signal.SIGKILL
            found = numbers_of(rows.read(range(len(rows))))  # makes whole what isn't
            rows.hold(lambda: None)
            assert numbers_of(rows.read(range(len(rows)))) == numbers_of(rows.live())
            found = numbers_of(rows.live())
            after = [102, 1, 2, 3, 100, 101] if kind == "append" else [101, 1, 102, 3, 100]
            assert found in ([0, 1, 2, 3, 4], after), number
            is_there = found == after
            outcomes.append(is_there)
            state = (rows.journal.state.cursor, rows.journal.state.written, rows.journal.last)
            assert state == (
                ((1 if kind == "append" else 4), 8, (0 if kind == "append" else 2)) if is_there else (4, 5, 4)
            )
            assert numbers_of(rows.read(rows.append(batch([7])))) == [7]
    assert outcomes == sorted(outcomes) and len(set(outcomes)) == 2, (
        "it is absent until a moment, and there from then on"
    )


def _stop_at_store(wire: Wire, path: str) -> None:
    rows = opened(memstore.open(path))

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in _FILES:
            return None
        if event == "call" and frame.f_code.co_name == "_first_unwritten":  # words are even, and the state isn't moved
            os.kill(os.getpid(), signal.SIGSTOP)
        return trace

    sys.settrace(trace)
    rows.append(batch([100, 101]))
    sys.settrace(None)
    wire.send()


def test_a_stopped_writer_is_named_to_writers_and_disturbs_no_reader(root: str) -> None:
    with memstore.open(root, timeout=0.05) as store:
        rows = new(store, 6)
        rows.append(batch([0, 1, 2, 3]))
        with Child(_stop_at_store, root) as child:
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            with pytest.raises(memstore.StoreTimeoutError, match=f"pid {child.pid} "):
                rows.append(batch([5]))
            assert numbers_of(rows.read([0, 1, 2, 3])) == [0, 1, 2, 3]
            os.kill(child.pid, signal.SIGCONT)
            child.receive()
        assert rows.append(batch([5])).tolist() == [0]


def _stop_between(wire: Wire, path: str) -> None:
    """Stops while words are odd."""
    rows = opened(memstore.open(path))
    words = rows.journal.words
    rows.hold(lambda: (words.__setitem__([1], words[[1]] | 1), wire.send(), os.kill(os.getpid(), signal.SIGSTOP)))


def test_who_reads_a_row_that_a_stopped_writer_writes_is_told_whom_it_waits_for(root: str) -> None:
    with memstore.open(root, timeout=0.05) as store:
        rows = new(store, 6)
        rows.append(batch([0, 1, 2, 3]))
        with Child(_stop_between, root) as child:
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            assert numbers_of(rows.read([0, 2, 3])) == [0, 2, 3]
            with pytest.raises(memstore.StoreTimeoutError, match=f"pid {child.pid} "):
                rows.read([0, 1])
        with (
            memstore.open(root, "r", timeout=0.05) as reader,
            pytest.raises(memstore.StoreTimeoutError, match="middle"),
        ):
            WholeRows(reader.open_dataset("rows", "r")).read([1])


# --- several at once --------------------------------------------------------------------------------------------------


def _write_on(wire: Wire, writer: int, path: str, rounds: int) -> int:
    rows = opened(memstore.open(path))
    wire.send()
    wire.receive()
    for number in range(rounds):
        if number % 3:
            rows.append(batch([writer * 100_000 + number] * (1 + number % 40)))
        else:
            rows.write(batch([writer * 100_000 + number] * 5), np.array([3, 1, 4, 59, 26]))
    return rounds


def _sample_while(rows: WholeRows, writers: list[Child], seed: int) -> int:
    """Samples until all writers have ended. How many rows."""
    random = np.random.default_rng(seed)
    count = 0
    for writer in writers:
        writer.send()
    while any(writer.process.is_alive() for writer in writers):
        numbers_of(rows.read(random.integers(0, len(rows), 64)))
        count += 64
    return count


@pytest.mark.parametrize("rounds", [800, pytest.param(20_000, marks=pytest.mark.full)])
def test_no_sampled_row_is_torn_while_two_processes_write(root: str, rounds: int) -> None:
    with memstore.open(root) as store:
        rows = new(store, 600)
        rows.append(batch(list(range(600))))
        with children(2, _write_on, root, rounds) as writers:
            for writer in writers:
                writer.receive()
            assert _sample_while(rows, writers, 0) > 100
            assert [writer.receive() for writer in writers] == [rounds, rounds]
        assert rows.journal.state.written == 600 + 2 * sum(5 if n % 3 == 0 else 1 + n % 40 for n in range(rounds))


@pytest.mark.full
def test_no_row_is_torn_while_writers_are_killed(root: str) -> None:
    """At random, forty times: who comes next completes what was published."""
    with memstore.open(root) as store:
        rows = new(store, 60)
        rows.append(batch(list(range(60))))
        random = np.random.default_rng(1)
        for _ in range(40):
            with children(2, _write_on, root, 1_000_000) as writers:
                for writer in writers:
                    writer.receive()
                for writer in writers:
                    writer.send()
                for _ in range(int(random.integers(1, 40))):
                    numbers_of(rows.read(random.integers(0, len(rows), 64)))
                writers[0].kill()
                for _ in range(5):
                    numbers_of(rows.read(random.integers(0, len(rows), 64)))
            numbers_of(rows.read(range(60)))
            numbers_of(rows.live())
            assert len(rows) == 60


def test_after_a_crash_of_the_host_rows_behind_the_flushed_ones_are_not_there(disk_root: str) -> None:
    with memstore.open(disk_root, durability="disk") as store:
        rows = new(store, 6)
        rows.append(batch([0, 1, 2]))
        rows.flush()
        rows.append(batch([3, 4]))
        (path,) = store.info("rows").files
        del rows
        with open(path, "r+b") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            file.seek(start + 72)
            file.write(b"another boot!!!!")
        rows = opened(store)
        assert numbers_of(rows.live()) == [0, 1, 2]
        rows.write(batch([9]), np.array([3]))
        assert numbers_of(rows.live()) == [0, 1, 2, 9], "the row behind it may be torn"


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_changes_nothing(store: memstore.Store) -> None:
    rows = new(store, 6)
    rows.append(batch([1, 2]))
    with pytest.raises(memstore.StructureMismatchError, match="more.*is missing"):
        rows.append(TensorDict({"x": torch.zeros(2, 700)}, [2]))
    with pytest.raises(memstore.StructureMismatchError, match="float64"):
        rows.append(batch([1]).double())
    with pytest.raises(ValueError, match="2 rows for 1 slots"):
        rows.write(batch([1, 2]), np.array([0]))
    with pytest.raises(IndexError, match="row 2"):
        rows.read([2])
    extra = batch([3]).set("other", torch.zeros(1))
    assert rows.append(extra).tolist() == [2]
    assert numbers_of(rows.live()) == [1, 2, 3]


def test_a_store_for_readers_is_read_and_not_written(root: str) -> None:
    with memstore.open(root) as store:
        rows = new(store, 6)
        rows.append(batch([1, 2]))
        with memstore.open(root, "r") as readers:
            reader = WholeRows(readers.open_dataset("rows", "r"))
            assert numbers_of(reader.read([1, 0])) == [2, 1]
            with pytest.raises(memstore.ReadOnlyError):
                reader.append(batch([3]))
            rows.append(batch([3]))
            assert numbers_of(reader.read([2])) == [3]


def test_another_dataset_is_told_from_that_of_a_storage(store: memstore.Store) -> None:
    data = store.create_dataset("data", {"rows": ((), torch.float32)}, capacity=5)
    with pytest.raises(memstore.StructureMismatchError, match="none that MemstoreStorage made"):
        WholeRows(data)


def test_rows_are_tensors_too_and_keep_their_batch_sizes(store: memstore.Store) -> None:
    plain = WholeRows(create_rows(store, "plain", torch.zeros(3, dtype=torch.bfloat16), 4))
    plain.append(torch.ones(2, 3, dtype=torch.bfloat16))
    assert plain.read([1, 0]).sum() == 6
    nested = WholeRows(
        create_rows(store, "nested", TensorDict({"n": TensorDict({"x": torch.zeros(2, 5)}, [2, 5])}, [2]), 4)
    )
    assert nested.value.batch_size == (4, 2) and nested.value["n"].batch_size == (4, 2, 5)


def test_writes_to_a_deleted_entry_are_refused(store: memstore.Store) -> None:
    rows = new(store, 6)
    rows.append(batch([1]))
    store.delete("rows")
    with pytest.raises(memstore.MutableEntryError, match="deleted"):
        rows.append(batch([2]))
    assert numbers_of(rows.read([0])) == [1]


def test_a_damaged_state_is_told(scratch: str) -> None:
    with memstore.open(scratch) as store:
        rows = new(store, 6)
        rows.append(batch([1]))
        rows.journal.state.staged = 99
        with pytest.raises(memstore.CorruptionError, match="99 rows are staged"):
            rows.append(batch([2]))


# --- where torchrl isn't installed, the error says what to install ----------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is not None, reason="torchrl is installed")
@pytest.mark.parametrize("name", torchrl.__all__)
def test_without_torchrl_the_error_names_it(name: str) -> None:
    with pytest.raises(memstore.MissingPackageError, match="pip install 'torchrl"):
        getattr(torchrl, name)
    assert isinstance(memstore.MissingPackageError("text"), ImportError)


def test_other_names_are_missing_as_ever() -> None:
    assert not hasattr(torchrl, "other")
