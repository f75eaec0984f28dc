"""Workers that hold locks, wait, or are interrupted while they wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

import memstore
from memstore.engine import index as entries
from memstore.engine.syscalls import PAGE
from tests.crash.leftovers import claimed_at
from tests.crash.values import SMALL, stamp_of, stamped
from tests.inside import root_of
from tests.support import faults

NEVER = 3600.0  # seconds, not one, after which a wait looks by itself: only a wake ends it, on a busy machine too
PROMPTLY = 0.4  # seconds
OPENING = 0.3  # seconds that an opening waits
TRIES = 20  # a busy machine is late now and then, but not each time


def hold_mutex(channel: Connection, path: str) -> None:
    """Holds the store's mutex until told otherwise. There is a key "held", and a version of it that can be swept."""
    store = memstore.open(path)
    store.put("held", stamped(0, SMALL))
    pinned = store.get("held")
    store.put("held", stamped(1, SMALL))
    del pinned

    def hold() -> None:
        channel.send("held")
        channel.recv()

    root_of(store).mutex.run(hold, time.monotonic() + 60)
    channel.send("released")
    channel.recv()


def hold_folder(channel: Connection, path: str) -> None:
    """Holds the lock on the store's folder, as one does who is opening it, until told otherwise."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    channel.send("held")
    channel.recv()


def stop_in_put(channel: Connection, path: str, nbytes: int, where: str) -> None:
    """Stops itself while it puts "k": "filling", or "committing" under the mutex, inside its last transaction."""
    store = memstore.open(path)
    for _ in range(8):  # from then on, one is like the other: both files have the huge pages that they get
        store.put("k", stamped(0, nbytes))
    names = faults.record(lambda: store.put("k", stamped(0, nbytes)))
    commits = [number for number, name in enumerate(names, 1) if name == faults.COMMIT]
    publishing = max(number for number in commits if number < names.index("futex_wake"))
    number = publishing if where == "committing" else claimed_at(names) + 2
    with faults.at_step(number, lambda: os.kill(os.getpid(), signal.SIGSTOP)):
        channel.send(store.put("k", stamped(1, nbytes)))
    channel.recv()


def live_beside_stopped_owners(channel: Connection, path: str) -> None:
    """Two threads wait for mutexes that stopped processes hold: in the opening of one store, and in a put to another.

    Sends what they raised, and whether all else was done meanwhile: forks, and a third store's opening, use and close.
    """
    waiting = memstore.open(f"{path}1")
    channel.send("opened")
    channel.recv()
    for timeout in (1.0, 5.0, 25.0):  # on a busy machine all else may take longer than they wait
        with ThreadPoolExecutor(2) as pool:
            waits = [
                pool.submit(memstore.open, f"{path}0", timeout=timeout),
                pool.submit(waiting.put, "k", stamped(1, SMALL), timeout=timeout),
            ]
            while waiting_for_mutexes() < 2 and not any(wait.done() for wait in waits):
                time.sleep(0.001)
            _do_all_else(f"{path}2", f"{path}3")
            done_meanwhile = waiting_for_mutexes() == 2
            errors = [str(wait.exception()) for wait in waits]
        if done_meanwhile:
            break
    channel.send((errors, done_meanwhile))


def _do_all_else(path: str, other: str) -> None:
    store = memstore.open(path)
    store.put("k", stamped(1, SMALL))
    pid = os.fork()
    if not pid:
        status = 1
        with contextlib.suppress(BaseException):
            signal.alarm(60)
            assert stamp_of(store.get("k")) == 1
            store.put("child", stamped(1, SMALL))
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert stamp_of(store.get("child")) == 1
    with memstore.open(other) as another:
        another.put("k", stamped(2, SMALL))
    store.close()


def be_interrupted_in_put(channel: Connection, path: str) -> None:
    """Is interrupted while it waits for the mutex to put. Sends how many seconds later it noticed, at best."""
    store = memstore.open(path, timeout=60.0)
    channel.send("opened")
    channel.recv()
    least = float("inf")
    for _ in range(TRIES):
        least = min(least, _interrupt(store, lambda: store.put("k", torch.zeros(8))))
        if least < PROMPTLY:
            break
    channel.send(least)


def be_interrupted_in_wait(channel: Connection, path: str) -> None:
    """Is interrupted while it waits for a version. Sends how many seconds later it noticed."""
    entries.LOOK_EVERY = NEVER
    store = memstore.open(path)
    channel.send(_interrupt(store, lambda: store.wait("k", timeout=float("inf"))))


def _interrupt(store: memstore.Store, call: Callable[[], object]) -> float:
    sent: list[float] = []

    def send() -> None:
        while not sleepers(store):
            time.sleep(0.001)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    raise AssertionError("no KeyboardInterrupt")


def open_and_retry(channel: Connection, path: str) -> None:
    """Opens a store whose mutex is held, in vain, whenever it is told to; and for good when told so.

    Sends what it raised each time, and how many seconds that took; in the end the version that it put.
    """
    word = "try"
    while word == "try":
        started = time.monotonic()
        try:
            memstore.open(path, timeout=OPENING)
        except memstore.StoreTimeoutError as error:
            channel.send((str(error), time.monotonic() - started))
        word = channel.recv()
    with memstore.open(path, timeout=60.0) as store:
        channel.send(store.put("k", torch.zeros(8)))


def wait_for(channel: Connection, path: str, key: str, newer_than: int, threads: int, options: dict[str, Any]) -> None:
    """Waits for a key in some threads. Sends "waiting" when all of them sleep, then what each got."""
    if not options.pop("looks_again", False):
        entries.LOOK_EVERY = NEVER
    store = memstore.open(path, options.pop("mode", "a"))

    def wait() -> int | str:
        try:
            return store.wait(key, newer_than=newer_than, **options)
        except memstore.MemstoreError as error:
            return type(error).__name__

    with ThreadPoolExecutor(threads) as pool:
        waits = [pool.submit(wait) for _ in range(threads)]
        while sleepers(store) < threads:
            time.sleep(0.001)
        channel.send("waiting")
        channel.send([one.result() for one in waits])


def waiting_for_mutexes() -> int:
    """How many threads of this process sleep in the lock page of some store, as the kernel has it."""
    with open("/proc/self/maps") as file:
        pages = [line.split("-")[0] for line in file if line.rstrip("\n").endswith("/lock")]
    found = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/syscall") as file:
            fields = file.read().split()
        found += len(fields) > 1 and int(fields[1], 16) // PAGE * PAGE in {int(page, 16) for page in pages}
    return found


def sleepers(store: memstore.Store) -> int:
    """How many threads of this process sleep on the store's doorbell or its mutex, as the kernel has it."""
    root = root_of(store)
    pages = [root.doorbell.address // PAGE, root.mutex.address // PAGE]
    found = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/syscall") as file:
            fields = file.read().split()
        found += len(fields) > 1 and int(fields[1], 16) // PAGE in pages
    return found
