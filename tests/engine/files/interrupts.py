"""Interrupts at each point of a function, one after the other, where signals from outside would meet some by chance."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted(action: Callable[[], None], point: int) -> bool:
    """Calls `action`, and raises KeyboardInterrupt before its instruction number `point`. False if it has fewer."""
    numbers = itertools.count()

    def tracer(frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode" and next(numbers) == point:
            raise KeyboardInterrupt
        return tracer

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # what others hang into a collection, as hypothesis does, is none of the action's points
    sys._getframe().f_trace_opcodes = True  # in Python 3.12 no frame has opcodes traced if none asked for it before
    sys.settrace(tracer)
    try:
        action()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
