"""Workers that fork, send values to other processes, or end in untidy ways. Each raises where something is wrong."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset

import memstore
from tests.crash.blockers import sleepers
from tests.crash.leftovers import claimed_at, leftovers
from tests.crash.values import INLINE, LARGE, SMALL, stamp_at, stamp_of, stamped
from tests.inside import root_of
from tests.support import faults

SIZES = {"inline": INLINE, "small": SMALL, "large": LARGE}
PATIENCE = 30  # seconds, after which a child that hangs is ended


def in_fork(action: Callable[[], object], seconds: int = PATIENCE) -> int:
    """Forks a child that calls `action` and ends at once. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(seconds)
        action()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def reap(pid: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, f"a forked child ended with {status}"


@contextmanager
def busy(store: memstore.Store) -> Iterator[None]:
    """Three threads put, get and wait meanwhile."""
    over = threading.Event()
    failures: list[BaseException] = []

    def repeat(action: Callable[[int], object]) -> None:
        count = 0
        try:
            while not over.is_set():
                count += 1
                action(count)
        except BaseException as error:
            failures.append(error)

    def put(count: int) -> None:
        name = list(SIZES)[count % len(SIZES)]
        store.put(f"busy/{name}", stamped(count, SIZES[name]))

    def get(count: int) -> None:
        for name in SIZES:
            stamp_at(store, f"busy/{name}")

    def wait(count: int) -> None:
        store.wait("busy/inline", newer_than=store.put("busy/inline", stamped(count, INLINE)) - 1)

    threads = [threading.Thread(target=repeat, args=(action,)) for action in (put, get, wait)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
        assert not failures, failures


def use(store: memstore.Store, key: str) -> None:
    """What a forked child may do: everything."""
    for name, nbytes in SIZES.items():
        stamp_at(store, f"busy/{name}")
        version = store.put(f"{key}/{name}", stamped(3, nbytes))
        assert stamp_at(store, f"{key}/{name}") == 3
        assert store.wait(f"{key}/{name}", newer_than=version - 1) == version
        store.delete(f"{key}/{name}")


def fork_while_busy(channel: Connection, path: str, count: int) -> None:
    """Forks while other threads use the store: each child uses it too."""
    store = memstore.open(path, timeout=20.0)
    with busy(store):
        for number in range(count):
            reap(in_fork(lambda number=number: use(store, f"child{number}")))
        reap(in_fork(lambda: reap(in_fork(lambda: use(store, "grandchild")))))
        pids = [in_fork(lambda number=number: use(store, f"sibling{number}")) for number in range(4)]
        for pid in pids:
            reap(pid)
    _check_clean(store)


def kill_children_while_busy(channel: Connection, path: str, steps: int) -> None:
    """Forks while other threads use the store: each child dies at another step of a put."""
    store = memstore.open(path, timeout=20.0)

    def die(step: int) -> None:
        with faults.at_step(step, faults.die):
            store.put("killed", stamped(4, SMALL))
        os.kill(os.getpid(), signal.SIGKILL)

    with busy(store):
        for step in range(1, steps + 1):
            pid = in_fork(lambda step=step: die(step))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            assert stamp_at(store, "killed") in (None, 4)
            store.put("killed", stamped(4, SMALL))
    _check_clean(store)


def fork_at_steps(channel: Connection, path: str, nbytes: int) -> None:
    """Forks at each step of a put that another thread makes, and uses the store in the child. Sends the steps.

    The first time round in a new file, the second time in a retired one.
    """
    store = memstore.open(path, timeout=20.0)
    gc.disable()

    def prepare(reuse: bool) -> None:
        store.put("k", stamped(1, nbytes))
        store.gc()
        if reuse:
            store.put("spare", stamped(1, nbytes))
            store.delete("spare")

    for reuse in (False, True):
        prepare(reuse)
        names = faults.record(lambda: store.put("k", stamped(1, nbytes)))
        for number in range(1, len(names) + 1):
            prepare(reuse)
            reap(fork_at_step(number, lambda: store.put("k", stamped(2, nbytes)), lambda: _meet(store, nbytes)))
            assert stamp_at(store, "k") in (2, 3)
        channel.send(names)
    _check_clean(store)


def fork_at_step(number: int, call: Callable[[], object], meet: Callable[[], object]) -> int:
    """Forks a child that calls `meet`, when a thread has come to a step of a call. Returns its pid, after the call."""
    reached, forked = threading.Event(), threading.Event()

    def pause() -> None:
        reached.set()
        forked.wait(0.1)  # a fork waits for who opens a file or reads the catalog: it comes after that

    def run() -> None:
        try:
            with faults.at_step(number, pause):
                call()
        finally:
            reached.set()

    thread = threading.Thread(target=run)
    thread.start()
    reached.wait()
    pid = in_fork(meet)
    forked.set()
    thread.join()
    return pid


def _meet(store: memstore.Store, nbytes: int) -> None:
    assert stamp_at(store, "k") in (1, 2)
    store.put("child", stamped(3, nbytes))
    store.put("k", stamped(3, nbytes))
    assert stamp_at(store, "k") in (2, 3)


def die_and_leave_a_child(channel: Connection, path: str, nbytes: int, step: str, reuse: bool) -> None:
    """Dies while it fills, before a step, and leaves a child that was forked then. It ends with the channel."""
    store = memstore.open(path, timeout=20.0)
    gc.disable()

    def prepare() -> None:
        store.put("k", stamped(1, nbytes))
        if not reuse:
            store.gc()

    for _ in range(3):  # the first put of a new store recovers
        prepare()
    names = faults.record(lambda: store.put("k", stamped(1, nbytes)))
    claimed = claimed_at(names)
    assert (claimed == 0 or names.index("write_at") < claimed) is reuse, "a claim of a retired file erases its put id"
    number = names.index(step, claimed) + 1
    prepare()
    reached = threading.Event()

    def pause() -> None:
        reached.set()
        threading.Event().wait()

    def put() -> None:
        with faults.at_step(number, pause):
            store.put("k", stamped(2, nbytes))

    threading.Thread(target=put, daemon=True).start()
    reached.wait()

    def live_on() -> None:
        channel.send("forked")
        with contextlib.suppress(EOFError):
            channel.recv()

    in_fork(live_on)
    threading.Event().wait()


def fork_while_filling(channel: Connection, path: str, nbytes: int) -> None:
    """Forks a child that does nothing, while another thread fills; then overwrites what that put."""
    store = memstore.open(path, timeout=20.0)
    gc.disable()
    for _ in range(8):  # from then on, one put is like the other
        store.put("k", stamped(1, nbytes))
    names = faults.record(lambda: store.put("k", stamped(1, nbytes)))
    filling = names.index("write_at", claimed_at(names)) + 1
    reached, forked = threading.Event(), threading.Event()

    def put() -> None:
        with faults.at_step(filling, lambda: (reached.set(), forked.wait())):
            store.put("k", stamped(2, nbytes))

    thread = threading.Thread(target=put)
    thread.start()
    reached.wait()
    theirs, ours = os.pipe()

    def live_on() -> None:
        os.close(ours)
        os.read(theirs, 1)

    pid = in_fork(live_on)
    forked.set()
    thread.join()
    for stamp in range(3, 9):
        store.put("k", stamped(stamp, nbytes))
        assert stamp_at(store, "k") == stamp
    _check_clean(store)
    os.close(ours)
    reap(pid)


def fork_in_c_at_steps(channel: Connection, path: str, count: int, nbytes: int) -> None:
    """Forks at steps of a put_many as C code does, and any start of a subprocess until its exec: with no handler.

    Such a child has all files of its parent open, and with them their locks; others must not notice.
    """
    store = memstore.open(path, timeout=20.0)
    gc.disable()
    keys = [str(number) for number in range(count)]
    fork = ctypes.PyDLL(None).fork

    def put(stamp: int) -> None:
        store.put_many({key: stamped(stamp, nbytes) for key in keys})

    for _ in range(8):  # from then on, one is like the other
        put(1)
    names = faults.record(lambda: put(1))
    for number in range(1, len(names) + 1, max(1, len(names) // 16)):
        theirs, ours = os.pipe()
        pids: list[int] = []

        def live_on(theirs: int = theirs, ours: int = ours, pids: list[int] = pids) -> None:
            pids.append(fork())
            if not pids[0]:
                os.close(ours)
                os.read(theirs, 1)
                os._exit(0)

        with faults.at_step(number, live_on, after=True):
            put(number + 1)
        found = {key: stamp_of(value) for key, value in store.get_many(keys).items()}
        assert found == dict.fromkeys(keys, number + 1), f"with a child forked after {names[number - 1]}"
        put(1)
        for end in (ours, theirs):
            os.close(end)
        for pid in pids:
            reap(pid)
    _check_clean(store)


def fork_with_held_values(channel: Connection, path: str) -> None:
    """Values that the parent holds are the child's too, and each writes to its own."""
    store = memstore.open(path)
    for name, nbytes in SIZES.items():
        store.put(name, stamped(1, nbytes))
    held = store.get_many(SIZES)
    aliases = {name: value.numpy() for name, value in held.items()}
    for name, nbytes in SIZES.items():
        store.put(name, stamped(2, nbytes))
    ours, theirs = os.pipe()

    def child() -> None:
        os.close(theirs)
        os.read(ours, 1)  # the parent has written to its own
        for name in SIZES:
            assert stamp_of(held[name]) == 1
            held[name].fill_(7)
            assert aliases[name][0] == 7
            assert stamp_at(store, name) == 2

    pid = in_fork(child)
    os.close(ours)
    for value in held.values():
        value[0] = 9
    assert leftovers(store) != [], "nothing pins what is held"
    aliases.clear()
    held_here = {name: (int(value[0]), stamp_of(value[1:])) for name, value in held.items()}
    held.clear()
    del value
    gc.collect()
    store.gc()
    assert leftovers(store) != [], "the child holds nothing"
    os.close(theirs)
    reap(pid)
    assert held_here == dict.fromkeys(SIZES, (9, 1))
    _check_clean(store)


def _check_clean(store: memstore.Store) -> None:
    gc.collect()
    store.gc()
    assert leftovers(store) == []
    assert root_of(store).mutex.owner() == 0
    assert store.put("last", stamped(1, SMALL)) > 0


# --- values on the way to other processes -----------------------------------------------------------------------------


class Rows(Dataset[torch.Tensor]):
    """Each item is a key of a store."""

    def __init__(self, store: memstore.Store, count: int) -> None:
        self.store, self.count = store, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        value: torch.Tensor = self.store.get(str(index))
        return value


def as_they_are(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Collates nothing: the leaves themselves go through the loader's queue."""
    return batch


def load(channel: Connection, path: str, context: str) -> None:
    """Reads a store through a DataLoader with workers."""
    store = memstore.open(path)
    count = 24
    for index in range(count):
        store.put(str(index), stamped(index, list(SIZES.values())[index % 2]))
    for collate in (None, as_they_are):
        chosen = None if collate else [index for index in range(count) if index % 2]
        loader = DataLoader(
            Rows(store, count),
            batch_size=4 if chosen is None else None,
            sampler=chosen,
            num_workers=2,
            multiprocessing_context=context,
            collate_fn=collate,
        )
        found = [stamp_of(row) for batch in loader for row in (batch if isinstance(batch, list) else [batch])]
        assert found == (list(range(count)) if chosen is None else chosen), found
    _check_clean(store)


def exchange(channel: Connection, path: str, context: str) -> None:
    """Sends a store, refs and leaves to a new process, which sends leaves back."""
    store = memstore.open(path)
    for name, nbytes in SIZES.items():
        store.put(name, stamped(1, nbytes))
    held = store.get_many(SIZES)
    aliases = {name: value.numpy() for name, value in held.items()}
    refs = {name: store.ref(name) for name in SIZES}
    started = multiprocessing.get_context(context)
    there, back = started.Queue(), started.Queue()
    in_files = [name for name in SIZES if name != "inline"]  # inline values are ordinary tensors, which torch shares
    process = started.Process(target=answer, args=(store, refs, there, back))
    process.start()
    for name, nbytes in SIZES.items():
        store.put(name, stamped(2, nbytes))
    there.put(held)
    for name in SIZES:
        answered = back.get(timeout=200)
        assert {key: stamp_of(value) for key, value in answered.items()} == {"queue": 1, "ref": 1, "new": 2}, name
        if name in in_files:
            answered["queue"].fill_(5)
    del answered
    there.put("done")
    process.join(200)
    assert process.exitcode == 0, process.exitcode
    for name in in_files:
        assert stamp_of(held[name]) == 1
        assert (aliases[name] == 1).all()


def answer(store: memstore.Store, refs: dict[str, memstore.Ref], there: Any, back: Any) -> None:
    sent = there.get(timeout=200)
    for name in SIZES:
        assert stamp_of(sent[name]) == 1
        back.put({"queue": sent[name], "ref": refs[name].get(), "new": store.get(name)})
    assert there.get(timeout=200) == "done"  # torch's tensors live on in the queue as long as their sender does


def pass_leaves(channel: Connection, path: str, context: str) -> None:
    """Gives leaves to a new process as its arguments."""
    store = memstore.open(path)
    sizes = {str(number): SMALL for number in range(8)}
    for stamp, (name, nbytes) in enumerate(sizes.items()):
        store.put(name, stamped(stamp, nbytes))
    held = store.get_many(sizes)
    process = multiprocessing.get_context(context).Process(target=check_leaves, args=(held,))
    process.start()
    process.join(200)
    assert process.exitcode == 0, process.exitcode
    assert [stamp_of(value) for value in held.values()] == list(range(8))


def check_leaves(held: dict[str, torch.Tensor]) -> None:
    assert [stamp_of(value) for value in held.values()] == list(range(8))


# --- ends -------------------------------------------------------------------------------------------------------------


class Reader:
    """Touches its tensor when it goes."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.alias = value, value.numpy()
        self.circle = self

    def __del__(self) -> None:
        if not int(self.value[-1]) == int(self.alias[-1]) == 1:
            os.write(2, b"the value has gone\n")


KEPT: list[object] = []  # in a module's globals, which go last


def end_untidily(channel: Connection, path: str, output: str) -> None:
    """Ends with all kinds of things alive and open. What it writes to stderr goes to `output`."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    store = memstore.open(path)
    for name, nbytes in SIZES.items():
        store.put(name, stamped(1, nbytes))
        KEPT.append(store.get(name))
        KEPT.append(store.get(name).numpy())
        KEPT.append(Reader(store.get(name)))
        KEPT.append(store.ref(name))
    KEPT.append(store)
    KEPT.append(KEPT)
    gc.disable()  # a collection in one of the threads could run torch in it; what goes at the end goes all the same
    threading.Thread(target=store.wait, args=("nothing",), kwargs={"timeout": float("inf")}, daemon=True).start()
    is_busy = threading.Event()
    threading.Thread(target=_delete_for_ever, args=(store, is_busy), daemon=True).start()
    is_busy.wait()
    while not sleepers(store):
        time.sleep(0.001)


def _delete_for_ever(store: memstore.Store, is_busy: threading.Event) -> None:
    """Without torch: it ends the process, by an abort, if the interpreter ends while a daemon thread is in its C++.

    (With a put and a get here, 4 ends of 100 were aborts: "terminate called without an active exception".)
    """
    while True:
        store.delete("nothing", missing_ok=True)
        store.version("small")
        is_busy.set()
