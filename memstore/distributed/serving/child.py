"""An index process, as its agent sees it: forked, heard, told to end, reaped.

It is a fork, and no fresh interpreter, which would import for a third of a second what the agent has already: other
hosts wait for it after a kill. An agent may fork: it has one thread, no catalog is open there, and it has neither
numpy nor torch nor monarch.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from memstore._threads import between_forks
from memstore.distributed.links import Hello
from memstore.distributed.serving.news import Kind, Lines, News
from memstore.distributed.serving.options import Options, Start
from memstore.distributed.serving.signals import OF_AGENTS, Stop
from memstore.distributed.serving.watchdog import Watchdog, look_every

_END_WITHIN = 10.0  # seconds after SIGTERM; then it is killed
_FAILED = 1  # exit code


class IndexChild:
    """A fork of this process that runs the index process. Use it in a `with`, which leaves none behind.

    It has this process's files, and so keeps the agent's lock as long as it lives.

    Args:
        hello: versions of what is installed.

    Attributes:
        pid: its process id.
    """

    def __init__(self, options: Options, incarnation: int, hello: Hello) -> None:
        with between_forks():  # late: only agents need it
            from memstore.distributed.serving.index_process import main

        self._hang_after, self._has_hung = options.hang_after, False
        self._reader, writer = os.pipe()
        pulse = look_every(options.hang_after)
        start = Start(options, os.getpid(), incarnation, writer, pulse, hello.torch, hello.monarch)
        self._started = time.monotonic()
        self._code: int | None = None
        self._is_told_to_end = False
        try:
            self.pid = _fork(lambda: main(start))
        except BaseException:
            os.close(self._reader)
            raise
        finally:
            os.close(writer)

    def told(self, stop: Stop) -> Iterator[News]:
        """What it tells, until it has ended. It is killed when it hangs.

        From `stop` on it is told to end, and killed if it doesn't.
        """
        lines, deadline = Lines(self._reader), None
        watchdog = Watchdog(self._hang_after, time.monotonic())
        while True:
            if stop.is_set and deadline is None:
                deadline = time.monotonic() + _END_WITHIN
                self._is_told_to_end = True
                os.kill(self.pid, signal.SIGTERM)
            wait = watchdog.look_every if deadline is None else max(deadline - time.monotonic(), 0.0)
            files = [self._reader] if deadline is not None else [self._reader, stop.fileno()]
            ready, _, _ = select.select(files, [], [], wait)
            if self._reader in ready:
                news = lines.read()
                if news is None:  # the process has ended: it alone had the pipe's other end
                    break
                watchdog.hear(time.monotonic())
                yield from (one for one in news if one.kind is not Kind.ALIVE)
            elif deadline is None:
                if watchdog.is_over(time.monotonic()):
                    self._has_hung = True
                    os.kill(self.pid, signal.SIGKILL)
                    break
            elif time.monotonic() >= deadline:
                os.kill(self.pid, signal.SIGKILL)
                break
        self._reap()

    def ended_well(self) -> bool:
        """It was told to end, by us or by another host."""
        return self._code == 0 or self._is_told_to_end

    def how_it_ended(self) -> str:
        if self._has_hung:
            return f"has answered nothing for {self._hang_after:g} s, and was killed"
        code = self._reap()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def age(self) -> float:
        return time.monotonic() - self._started

    def __enter__(self) -> IndexChild:
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()
        os.close(self._reader)

    def _reap(self) -> int:
        """Waits for its end. Returns its exit code, or minus the signal that ended it."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _fork(program: Callable[[], None]) -> int:
    """Runs `program` in a fork of this process. Returns its pid.

    The fork takes no signal that this process has handlers for: the program unblocks them when it has its own.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_AGENTS)
    try:
        pid = os.fork()
        if pid == 0:
            _become(program)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become(program: Callable[[], None]) -> NoReturn:
    try:
        os.setsid()  # a Ctrl-C in the terminal is the agent's to pass on
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        program()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(_FAILED)
