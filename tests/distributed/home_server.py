"""A process that serves the stores of tests: each becomes a member of a cluster whose other host is the home of all.

It ends with the process that started it. `HomeServer` is the other end; children of any kind may ask it, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from memstore.distributed.transfers import sending
from tests.distributed.homes import Home, join

_SOURCES = Path(__file__).parent.parent.parent


class HomeServer:
    """Starts the process. Close it, or let this process end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="memstore-test-")
        self.address = f"{self._folder.name}/socket"
        environment = {**os.environ, "PYTHONPATH": str(_SOURCES)}
        command = [sys.executable, "-m", "tests.distributed.home_server", self.address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def close(self) -> None:
        self._process.communicate()
        self._folder.cleanup()


def ask(address: str, what: str, *paths: str) -> int:
    """`serve`: the stores at these paths, one cluster, of which the last is the only home. `stop`: none.

    Returns the bytes of values that its hosts have sent so far.
    """
    with Client(address, "AF_UNIX") as connection:
        connection.send((what, *paths))
        error, sent = connection.recv()
    if error is not None:
        raise RuntimeError(error)
    return sent


class _Served:
    def __init__(self) -> None:
        self._stacks: dict[str, ExitStack] = {}
        self.sent = 0
        self._send_all, sending.send_all = sending.send_all, self._count

    def _count(self, stream: Any, parts: Sequence[memoryview]) -> None:
        self.sent += sum(map(len, parts))
        self._send_all(stream, parts)

    def look(self) -> None:
        """Changes nothing: whoever asks wants what was sent."""

    def serve(self, *paths: str) -> None:
        if paths[0] not in self._stacks:
            with ExitStack() as stack:
                homes = [stack.enter_context(Home(path, is_owner=path == paths[-1])) for path in paths]
                if homes[0].look(lambda tables: tables.standing()) is None:
                    join(homes)
                self._stacks[paths[0]] = stack.pop_all()

    def stop(self) -> None:
        while self._stacks:
            self._stacks.popitem()[1].close()


def _main(address: str) -> None:
    served = _Served()
    with Listener(address, "AF_UNIX") as listener:
        print("ready", flush=True)
        while True:
            with listener.accept() as connection:
                what, *paths = connection.recv()
                error = None
                try:
                    getattr(served, what)(*paths)
                except Exception as failure:  # whoever asked is told
                    error = repr(failure)
                connection.send((error, served.sent))


def _end_with_the_parent() -> None:
    import threading

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    _end_with_the_parent()
    _main(sys.argv[1])
