"""The suite takes its stores from the backend that is tested, in processes that a test starts, too."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import memstore
from tests.children import in_child
from tests.store.backends import Embedded, open_store, testing


class Noting(Embedded):
    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []

    def open(self, root: str, mode: Any = "a", **options: Any) -> memstore.Store:
        self.opened.append((root, mode))
        return super().open(root, mode, **options)


def test_stores_are_opened_by_the_backend_that_is_tested(root: str) -> None:
    backend = Noting()
    with testing(backend):
        open_store(root).close()
        assert in_child(_open_and_tell, root, backend) == [(root, "a"), (root, "r")]
    open_store(root).close()
    assert backend.opened == [(root, "a")]


def _open_and_tell(root: str, backend: Noting) -> list[tuple[str, str]]:
    open_store(root, "r").close()
    return backend.opened


def test_only_tests_of_the_embedded_store_open_it_past_the_backend() -> None:
    found = {path.name for path in Path(__file__).parent.glob("*.py") if opens_itself(path.read_text())}
    # The model is marked as a whole; the parameters of `memstore.open` are a contract of its own, and mode "w" is that
    # of a folder. In test_filling.py it is the source of checkpoints; files of a history are looked at, and the trainer
    # that is followed is one of this host.
    assert found == {
        "backends.py",
        "two_stores.py",
        "test_anew.py",
        "test_contract.py",
        "test_filling.py",
        "test_following.py",
        "test_history.py",
    }


def opens_itself(text: str) -> bool:
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    opens = any(ast.unparse(call.func) == "memstore.open" and call.args for call in calls)
    return opens and "\npytestmark = pytest.mark.embedded\n" not in text


def test_one_that_does_is_found() -> None:
    assert opens_itself("def test_it(root):\n    with memstore.open(root) as store: ...")
    assert not opens_itself("\npytestmark = pytest.mark.embedded\n\ndef test_it(root):\n    memstore.open(root)")
