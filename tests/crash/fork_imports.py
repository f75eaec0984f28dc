"""Forks while another thread imports: `python -m tests.crash.fork_imports ROOT OPERATION...` in a fresh interpreter.

A thread runs the operations, one after the other. Where one of them imports something for the first time, the thread
stops in the middle of the import, and the main thread forks: the child must be able to do the same, and all else. What
was forked at is printed: the operation and the module.
"""

from __future__ import annotations

import importlib.abc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import memstore
from memstore import _threads

PATIENCE = 240  # seconds, after which a child that hangs is ended
PAUSE = 0.2  # seconds: a fork that waits for the import comes after it


def open_store(root: str) -> None:
    memstore.open(root, timeout=20.0).close()


def use_rows(root: str) -> None:
    with memstore.open(root) as store:
        memstore.read_rows(store.view("value")["w"], [1, 2])


def use_as_weights(root: str) -> None:
    with memstore.open(root) as store:
        list(memstore.iter_weights(store, "value"))


def with_store(use: Callable[[memstore.Store], object]) -> Callable[[str], None]:
    def operation(root: str) -> None:
        with memstore.open(root) as store:
            use(store)

    return operation


def export_and_attach(store: memstore.Store) -> None:
    path = f"{store.root}.{os.getpid()}.safetensors"
    store.export("value", path)
    key = f"attached {os.getpid()}"  # parent and child do this at the same time
    store.attach(key, path)
    store.get(key)
    os.unlink(path)


OPERATIONS: dict[str, Callable[[str], None]] = {
    "open": open_store,
    "put": with_store(lambda store: store.put(f"put {os.getpid()}", {"x": [1, "text"]})),
    "get": with_store(lambda store: store.get("value")["w"].sum()),
    "out": with_store(lambda store: store.get("value", out=store.get("value"))),
    "view": with_store(lambda store: store.view("value")["w"][3:5].sum()),
    "ref": with_store(lambda store: store.ref("value").get()),
    "info": with_store(lambda store: (store.info("value"), store.stats(), repr(store), store._repr_html_())),
    "upkeep": with_store(lambda store: (store.gc(), store.verify(["value"]))),
    "rows": use_rows,
    "weights": use_as_weights,
    "files": with_store(export_and_attach),
    "jagged": with_store(lambda store: store.get("jagged")),
    "tensordict": with_store(lambda store: store.get("tensordict")["x"].sum()),
}
PLAIN = ("open", "put", "get", "view")


class Pausing(importlib.abc.MetaPathFinder):
    """Stops the thread that is watched at its first import in an operation, and tells of it."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.is_armed = False
        self.module = ""
        self.reached, self.forking = threading.Event(), threading.Event()

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if self.is_armed and threading.current_thread() is self.thread:
            self.is_armed = False
            self.module = name
            self.reached.set()
            self.forking.wait()
            threading.Event().wait(PAUSE)


def in_fork(operations: list[Callable[[str], None]], root: str) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        signal.alarm(PATIENCE)
        for operation in operations:
            operation(root)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def fork_in(name: str, root: str, pausing: Pausing) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            OPERATIONS[name](root)
        except BaseException as error:
            failures.append(error)
        finally:
            pausing.is_armed = False
            pausing.reached.set()

    pausing.module = ""
    pausing.reached.clear()
    pausing.forking.clear()
    thread = pausing.thread = threading.Thread(target=run)
    pausing.is_armed = True
    thread.start()
    pausing.reached.wait()
    pausing.forking.set()
    status = in_fork([OPERATIONS[name], *map(OPERATIONS.__getitem__, PLAIN)], root)
    thread.join()
    assert not failures, failures
    print(name, pausing.module or "-", flush=True)
    assert status == 0, f"a child that was forked in {name!r}, at the import of {pausing.module!r}, ended with {status}"


def main(root: str, *names: str) -> None:
    _threads.PATIENCE = 200.0  # torch takes more than half a minute on a busy machine
    pausing = Pausing()
    sys.meta_path.insert(0, pausing)
    for name in names:
        fork_in(name, root, pausing)


if __name__ == "__main__":
    main(*sys.argv[1:])
