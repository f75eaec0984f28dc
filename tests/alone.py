"""Runs each file of tests in a process of its own, as whoever works on it does. `make test-alone`, a part of test-full.

A file that passes only after another has imported, warmed or left something passes in a run of all of them, and fails
for whoever runs it alone. The processes are forked from one that has imported torch and pytest, but nothing of
memstore, which takes three seconds less a file than to start an interpreter.

::

    python -m tests.alone -n 3                       # all of them: the fast tests, in random order
    python -m tests.alone tests/store tests/aio
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import pytest
import tensordict  # noqa: F401 - what every file needs, and takes long

_TESTS = Path(__file__).parent
_NONE_SELECTED = 5  # pytest's exit code for a file all of whose tests are marked `full`


class _Running:
    """A file that is run by a child of this process."""

    def __init__(self, file: Path, pid: int, output: IO[bytes]) -> None:
        self.file, self.pid, self.output = file, pid, output

    def report(self) -> None:
        self.output.seek(0)
        print(f"\n--- {self.file}\n{self.output.read().decode(errors='replace')}", flush=True)


def run_alone(files: Iterable[Path], workers: int) -> list[Path]:
    """Runs each file, and prints the output of those that fail, which it returns. Returns once: children exit here."""
    running: dict[int, _Running] = {}
    failed: list[Path] = []

    def wait_for_one() -> None:
        pid, status = os.wait()
        ended = running.pop(pid)
        if os.waitstatus_to_exitcode(status) in (0, _NONE_SELECTED):
            print(".", end="", flush=True)
        else:
            failed.append(ended.file)
            ended.report()
        ended.output.close()

    for file in files:
        if len(running) == workers:
            wait_for_one()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the child has ended
        pid = os.fork()
        if pid == 0:
            sys.exit(_run(file, output))
        running[pid] = _Running(file, pid, output)
    while running:
        wait_for_one()
    return failed


def _run(file: Path, output: IO[bytes]) -> int:
    """In the child."""
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    return pytest.main(["-q", "-p", "no:cacheprovider", str(file)])


def _files_of(path: Path) -> Sequence[Path]:
    return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.alone", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("paths", nargs="*", type=Path, default=[_TESTS], help="files and folders; by default tests/")
    parser.add_argument("-n", type=int, default=2, metavar="WORKERS", help="how many at a time; by default 2")
    chosen = parser.parse_args(arguments)
    files = [file for path in chosen.paths for file in _files_of(path)]
    failed = run_alone(files, chosen.n)
    print(f"\n{len(files)} files of tests, each alone: {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed or not files else 0


if __name__ == "__main__":
    sys.exit(main())
