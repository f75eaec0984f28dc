"""What the workers of crash tests run: functions of (channel, ...), by name, in processes that may be killed."""

from __future__ import annotations

import gc
import os
import signal
from multiprocessing.connection import Connection

import torch

import memstore
from tests.crash.leftovers import held_locks, leftovers, shared_mappings
from tests.crash.operations import OPERATIONS, Operation
from tests.crash.values import stamp_of, stamped
from tests.inside import root_of
from tests.support import faults


def steps_of(channel: Connection, path: str, name: str) -> None:
    """Sends the names of an operation's steps, and performs it."""
    store, operation, prepared = _prepare(path, name)
    channel.send(faults.record(lambda: operation.run(store, prepared)))


def die_at(channel: Connection, path: str, name: str, number: int, after: bool) -> None:
    """Performs an operation, and dies at one of its steps."""
    store, operation, prepared = _prepare(path, name)
    with faults.at_step(number, faults.die, after=after):
        operation.run(store, prepared)


def _prepare(path: str, name: str) -> tuple[memstore.Store, Operation, object]:
    gc.disable()  # finalizers make system calls too: the steps would come in another order
    store, operation = memstore.open(path), OPERATIONS[name]
    return store, operation, operation.prepare(store)


def steps_of_open(channel: Connection, path: str, durability: str) -> None:
    gc.disable()
    channel.send(faults.record(lambda: memstore.open(path, durability=durability)))


def die_in_open(channel: Connection, path: str, durability: str, number: int, after: bool) -> None:
    gc.disable()
    with faults.at_step(number, faults.die, after=after):
        memstore.open(path, durability=durability)


def open_once(channel: Connection, path: str) -> None:
    """Opens a store, in a process that knows nothing of it, and ends at once."""
    memstore.open(path).close()
    os._exit(0)


def perform(channel: Connection, path: str, name: str) -> None:
    """Performs an operation when told to, and ends at once."""
    store, operation, prepared = _prepare(path, name)
    channel.send("ready")
    channel.recv()
    operation.run(store, prepared)
    os._exit(0)


def hold(channel: Connection, path: str, key: str) -> None:
    """Holds a value and a ref until it is killed."""
    store = memstore.open(path)
    held = store.get(key), store.ref(key)
    channel.send(stamp_of(held[0]))
    channel.recv()


def hold_until_told(channel: Connection, path: str, key: str) -> None:
    """Holds a value, and nothing else. Sends its stamp at first, and at each word but "end"."""
    store = memstore.open(path)
    held = store.get(key)
    channel.send(stamp_of(held))
    while channel.recv() != "end":
        channel.send(stamp_of(held))


def die_reading(channel: Connection, path: str) -> None:
    """Dies in the middle of a read of the catalog."""
    root = root_of(memstore.open(path))
    with root.guard:
        root.catalog.view(lambda transaction: (transaction.counters(), faults.die()))


# --- writers and readers that run on --------------------------------------------------------------------------------


def write_on(channel: Connection, path: str, key: str, nbytes: int, stamp: int) -> None:
    """Puts values with growing stamps, and sends each stamp before its put and after."""
    store = memstore.open(path)
    value = torch.empty(nbytes // 8, dtype=torch.int64)
    while True:
        value.fill_(stamp)
        channel.send(("begun", stamp))
        store.put(key, value)
        channel.send(("done", stamp))
        stamp += 1


def read_on(channel: Connection, path: str, key: str) -> None:
    """Reads a key over and over, and checks that it is whole and never goes back in time.

    Told "rest", it lets go of what it holds, sends how often it has read what, and goes on at the next word.
    """
    store = memstore.open(path)
    last = count = 0
    held: torch.Tensor | None = None
    while True:
        value = store.get(key)
        stamp = stamp_of(value, every=1 if count % 16 == 0 else 4093)
        assert stamp >= last, f"read {stamp} after {last}"
        if held is not None:
            assert stamp_of(held, every=4093) == last, "a value that was held has changed"
        held, last, count = value, stamp, count + 1
        del value
        if channel.poll():
            held = None
            if channel.recv() == "end":
                return
            channel.send((count, last))
            channel.recv()


# --- signals ----------------------------------------------------------------------------------------------------------


def be_interrupted(channel: Connection, path: str, name: str, enough: int) -> None:
    """Performs an operation over and over while signals come in, each of which is raised as KeyboardInterrupt.

    After each interrupt it checks that the operation was done wholly or not at all, and that nothing is locked. Says
    when it had enough of them; told to end, sends how often it was which, and what is left over.
    """
    armed = False

    def handler(*_: object) -> None:
        nonlocal armed
        if armed:  # in the operation, and once each time: the checks are not to be interrupted
            armed = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    store, operation = memstore.open(path), OPERATIONS[name]
    outcomes = {"old": 0, "new": 0}
    channel.send("ready")
    while not channel.poll():
        operation.reset(store)
        prepared = operation.prepare(store)
        interrupted = True
        try:
            armed = True
            operation.run(store, prepared)
            armed = interrupted = False
        except KeyboardInterrupt:
            pass
        del prepared
        if interrupted:
            assert held_locks(store) == []
        outcome = operation.outcome(store)
        if interrupted:
            outcomes[outcome] += 1
            if sum(outcomes.values()) == enough:
                channel.send("enough")
        else:
            assert outcome == "new"
    operation.reset(store)
    gc.collect()
    store.gc()
    channel.send((outcomes, leftovers(store) + shared_mappings(store)))


def use_in_handler(channel: Connection, path: str, nbytes: int) -> None:
    """Puts and gets, and so does a signal's handler. Says when that both did and was refused; then sends how often."""
    store = memstore.open(path)
    store.put("k", stamped(1, nbytes))
    counts = {"done": 0, "refused": 0}

    def handler(*_: object) -> None:
        stamp_of(store.get("k"))
        assert "nothing" not in store
        try:
            store.put("handler", stamped(2, nbytes))
            counts["done"] += 1
        except memstore.ContentionError:
            counts["refused"] += 1

    signal.signal(signal.SIGUSR1, handler)
    channel.send("ready")
    stamp, had_both = 1, False
    while not channel.poll():
        stamp += 1
        store.put("k", stamped(stamp, nbytes))
        assert stamp_of(store.get("k")) == stamp
        if not had_both and min(counts.values()):
            had_both = True
            channel.send("enough")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    gc.collect()
    store.gc()
    channel.send((counts, held_locks(store) + leftovers(store)))
