"""Points of a call where its process may be killed, or its thread interrupted: each instruction, or those that count.

Only what memstore does itself counts: instructions of `memstore/replay` and of the mutexes and words below it.
"""

from __future__ import annotations

import dis
import gc
import os
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from tests.crash.forks import in_fork

_FOLDERS = ("/memstore/replay/", "/memstore/engine/sync/", "/memstore/engine/protocols/mutable")
_SIGNALS_AFTER = ("CALL", "RESUME", "JUMP_BACKWARD", "INSTRUMENTED")  # where CPython calls the handlers of signals


def _is_checked(code: CodeType, last: int, following: int) -> bool:
    """Whether CPython looks for signals between two instructions. It raises in the first, a tracer in the second: so
    what one of them has in a `try`, and the other not, is left out.
    """
    if not dis.opname[code.co_code[last]].startswith(_SIGNALS_AFTER):
        return False
    ranges: Any = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return all((each.start <= last < each.end) == (each.start <= following < each.end) for each in ranges)


class _Points:
    """Counts instructions, and calls `at` before that with the number `point`, from 0."""

    def __init__(self, point: int, at: Callable[[], None], *, signals: bool) -> None:
        self._point, self._at, self._signals = point, at, signals
        self._last: dict[FrameType, int] = {}
        self.count = 0

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name == "__del__" or not any(folder in frame.f_code.co_filename for folder in _FOLDERS):
            return None  # what a finalizer raises, its caller never sees
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            last = self._last.get(frame, 0)
            self._last[frame] = frame.f_lasti
            if not self._signals or _is_checked(frame.f_code, last, frame.f_lasti):
                self._pass()
        elif event == "return":
            self._last.pop(frame, None)
            if self._signals:
                self._pass()  # raised here, it is raised by the call
        return self.trace

    def _pass(self) -> None:
        self.count += 1
        if self.count == self._point + 1:
            self._at()

    def run(self, action: Callable[[], object]) -> None:
        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()
        sys._getframe().f_trace_opcodes = True  # in Python 3.12 no frame has opcodes traced if none asked for it before
        sys.settrace(self.trace)
        try:
            action()
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()


def count(action: Callable[[], object], *, signals: bool = False) -> int:
    """How many points a call has; `signals`: those where a signal's handler may raise."""
    points = _Points(-2, lambda: None, signals=signals)
    points.run(action)
    assert points.count > 20, "this tests nothing"
    return points.count


def interrupt(action: Callable[[], object], point: int) -> bool:
    """Calls `action`, and raises KeyboardInterrupt in it. False if it had fewer points."""

    def raise_interrupt() -> None:
        raise KeyboardInterrupt

    try:
        _Points(point, raise_interrupt, signals=True).run(action)
    except KeyboardInterrupt:
        return True
    return False


def fork_and(at: Callable[[], None], action: Callable[[], object], point: int) -> int:
    """Forks a child that calls `action`, and `at` in it. Returns its pid."""
    return in_fork(lambda: _Points(point, at, signals=False).run(action), 60)


def kill(action: Callable[[], object], point: int) -> bool:
    """Calls `action` in a forked child, which is killed there. False if it had fewer points."""
    pid = fork_and(lambda: os.kill(os.getpid(), signal.SIGKILL), action, point)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0
