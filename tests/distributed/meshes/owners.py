"""Processes that import Monarch, and own meshes: each a fresh interpreter, since pytest's must not import it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.serving.agents import eventually, is_alive
from tests.support.hosts import Host

needs_monarch = pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch isn't installed")

SOURCES = Path(__file__).parents[3]
FAKED = Path(__file__).parent / "faked"
WORKER = """if True:
    import sys
    from monarch.actor import run_worker_loop_forever
    run_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
"""


def environment(**more: str) -> dict[str, str]:
    """Of this process, without what would tell `serve` of a secret, a port or an address."""
    taken = {name: value for name, value in os.environ.items() if not name.startswith("MEMSTORE_")}
    return {**taken, "PYTHONPATH": str(SOURCES), **more}


class Owner:
    """A process that runs functions. Use it in a `with`, which kills it, and what Monarch has started for it.

    Args:
        variables: its environment.
        host: where it runs; None: here.
        errors: a file for what it, and its processes, print.
    """

    def __init__(self, variables: Mapping[str, str], errors: Path, host: Host | None = None) -> None:
        start: Any = subprocess.Popen if host is None else host.popen
        self._errors = errors
        with open(errors, "ab") as output:
            self.process: subprocess.Popen[bytes] = start(
                [sys.executable, "-m", "tests.distributed.meshes.owner_process"],
                env=dict(variables),
                cwd=SOURCES,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """What a function of `actions` returns there. Raises what it raises."""
        self.begin(name, *arguments, **named)
        return self.end()

    def begin(self, name: str, *arguments: Any, **named: Any) -> None:
        assert self.process.stdin is not None
        pickle.dump((name, arguments, named), self.process.stdin)
        self.process.stdin.flush()

    def end(self) -> Any:
        assert self.process.stdout is not None
        try:
            is_raised, result = pickle.load(self.process.stdout)
        except EOFError:
            code = self.process.wait(60)
            raise RuntimeError(f"it ended with code {code}: {self._errors.read_text()[-4000:]}") from None
        if is_raised:
            raise result
        return result

    def kill(self) -> None:
        """With SIGKILL, and nothing that it has started."""
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> None:
        """And its session: what Monarch has started for it."""
        session = self.process.pid
        self.kill()
        for pid in processes_of(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not processes_of(session), "Monarch's processes end")

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def processes_of(session: int) -> list[int]:
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) == session and is_alive(int(path.name)):
                found.append(int(path.name))
    return found


def start_worker(host: Host, address: str, errors: Path, before: Sequence[str] = (), **more: str) -> Any:
    """A process of Monarch that makes the host one of a mesh, as a job's scheduler starts it."""
    with open(errors, "ab") as output:
        return host.popen(
            [*before, sys.executable, "-c", WORKER, address],
            env=environment(**more),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
