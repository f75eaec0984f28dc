"""Whoever offers TorchStore's calls: memstore's module, and TorchStore itself, from a checkout of its main branch.

Each has a process of its own, since a process in which Monarch runs must not be forked.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, ClassVar

from tests.benchmarks.peers import Peer, needs
from tests.benchmarks.report import Role

PATIENCE = 300.0  # seconds
CHECKOUT = "TORCHSTORE_CHECKOUT"
_ROOT = Path(__file__).parents[3]
_SCRIPT = _ROOT / "tests/benchmarks/scripts/torchstore_script.py"


class Calls(Peer):
    """Runs `torchstore_script` with a module."""

    module: ClassVar[str]

    @classmethod
    def paths(cls) -> list[str]:
        """What the process imports from, beside what this one does."""
        return []

    def setup(self) -> None:
        ours, theirs = Pipe()
        self._channel = ours
        command = [sys.executable, str(_SCRIPT), self.module, str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), *self.paths()]), **self.variables()}
        with open(self.root / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        theirs.close()
        if self._hear() != "ready":
            raise RuntimeError(f"{self.name} did not start")

    def variables(self) -> dict[str, str]:
        return {}

    def take(self, *order: Any) -> Sequence[int]:
        """ns of each of some calls: see `torchstore_script.Order`."""
        self._channel.send(order)
        found = self._hear()
        if isinstance(found, str):
            raise RuntimeError(f"{self.name}: {found}")
        return found

    def _hear(self) -> Any:
        try:
            if not self._channel.poll(PATIENCE):
                raise TimeoutError(f"{self.name} said nothing in {PATIENCE:g} s")
            return self._channel.recv()
        except EOFError:
            tail = (self.root / "log").read_text(errors="replace")[-1500:]
            raise RuntimeError(f"{self.name} ended: {tail}") from None

    def close(self) -> None:
        if not hasattr(self, "_process"):
            return
        with contextlib.suppress(OSError, EOFError):
            self._channel.send(None)
            self._channel.poll(30.0)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()


class MemstoreCalls(Calls):
    id: ClassVar[str] = "memstore"
    name: ClassVar[str] = "memstore"
    role: ClassVar[Role] = "memstore"
    settings: ClassVar[str] = "memstore.integrations.torchstore"
    module: ClassVar[str] = "memstore.integrations.torchstore"

    def variables(self) -> dict[str, str]:
        return {"MEMSTORE_TORCHSTORE_ROOT": str(self.root / "job")}


class TorchStoreCalls(Calls):
    id: ClassVar[str] = "torchstore"
    name: ClassVar[str] = "TorchStore"
    settings: ClassVar[str] = "LocalRankStrategy, a volume for each of 4 ranks, shared memory"
    module: ClassVar[str] = "torchstore"

    @classmethod
    def missing(cls) -> str | None:
        checkout = os.environ.get(CHECKOUT)
        if not checkout:
            return f"not installed: a checkout of its main branch, which {CHECKOUT} names"
        if not Path(checkout, "torchstore", "__init__.py").is_file():
            return f"not installed: {CHECKOUT} names {checkout}, and that is no checkout"
        return needs("monarch", "pygtrie", "portpicker")

    @classmethod
    def paths(cls) -> list[str]:
        return [os.environ[CHECKOUT], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
