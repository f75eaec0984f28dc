"""A fork in the middle of another thread's import: the child imports the same, and doesn't wait for ever."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import memstore
from memstore import _threads
from tests.children import in_child
from tests.crash import fork_imports


@pytest.fixture
def filled(root: str) -> str:
    with memstore.open(root) as store:
        store.put("value", {"w": torch.ones(300, 40)})
        store.put("jagged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
        store.put("tensordict", TensorDict({"x": torch.ones(3, 2000)}, [3]))
    return root


def fork_in(root: str, *names: str) -> dict[str, str]:
    """Forks at the first import of each operation, in a fresh interpreter. Returns what was imported, "-": nothing."""
    command = [sys.executable, "-m", "tests.crash.fork_imports", root, *names]
    folder = Path(__file__).parent.parent.parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.full
def test_a_child_that_was_forked_during_an_opening_or_a_first_call(filled: str) -> None:
    found = fork_in(filled, "open", "put", "get", "view")
    assert found.pop("open").startswith("memstore.")
    assert found == {"put": "-", "get": "-", "view": "torch.distributed.tensor"}, "this is imported in a hot path"


@pytest.mark.full
def test_a_child_that_was_forked_during_any_first_call(filled: str) -> None:
    found = fork_in(filled, *fork_imports.OPERATIONS)
    assert "tensordict" in found["tensordict"] and found["files"].startswith("memstore.formats"), found


@pytest.mark.full
@pytest.mark.parametrize("name", ["tensordict", "view", "files", "rows", "get"])
def test_a_child_that_was_forked_during_the_opening_of_another_thread_and_does_all_else_first(
    filled: str, name: str
) -> None:
    fork_in(filled, name)


def test_a_fork_waits_for_an_import() -> None:
    inside, over = threading.Event(), threading.Event()

    def import_slowly() -> None:
        with _threads.between_forks():
            inside.set()
            over.wait(0.3)
            ended.append(time.monotonic())

    ended: list[float] = []
    thread = threading.Thread(target=import_slowly)
    thread.start()
    inside.wait()
    assert in_child(_imported) is True
    assert ended, "the fork came in the middle"
    thread.join()


def test_hooks_that_come_while_a_fork_waits_are_called_all() -> None:
    """A module that is imported registers some. `os` would call those for after the fork alone."""
    called: list[str] = []
    hooks = _threads.Hooks(*(functools.partial(called.append, name) for name in ("before", "parent", "child")))
    inside = threading.Event()

    def import_slowly() -> None:
        with _threads.between_forks():
            inside.set()
            threading.Event().wait(0.2)
            _threads.around_forks(hooks)

    thread = threading.Thread(target=import_slowly)
    thread.start()
    inside.wait()
    try:
        assert in_child(called.copy) == ["before", "child"]
        assert called == ["before", "parent"]
    finally:
        thread.join()
        _threads._hooks.remove(hooks)


def _imported() -> bool:
    with _threads.between_forks():
        return True


def test_an_import_may_fork() -> None:
    with _threads.between_forks():
        assert in_child(_imported)
    assert in_child(_imported)


def test_an_import_and_a_fork_that_wait_for_one_another_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would wait for ever: the import for a lock that the fork wants first, say by a finalizer."""
    monkeypatch.setattr(_threads, "PATIENCE", 0.1)
    inside, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with _threads.between_forks():
            inside.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    assert in_child(_imported)
    with _threads.between_forks():
        forked.set()
    thread.join()
    assert in_child(_imported)
