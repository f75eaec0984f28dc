"""Calls in new processes, for what can only be measured in one: memory, imports, first calls."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from typing import Any

LONGEST_RUN = 120.0


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` returns in a spawned process. `function` is a module's own, its result pickles."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LONGEST_RUN):
            raise TimeoutError(f"{function.__name__} in a new process: nothing in {LONGEST_RUN} s")
        return ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{function.__name__} in a new process failed, exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def _answer(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))
    pipe.close()


def printed_by(code: str, *arguments: str) -> str:
    """What a new interpreter prints that runs `code`: nothing is imported there but what `code` imports."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=LONGEST_RUN
    )
    if done.returncode:
        raise RuntimeError(f"a new interpreter failed: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()
