"""What torch keeps for each thread and a call depends on, taken along to the thread that makes the call.

- Inference mode and grad mode: rows that are read under inference mode are inference tensors.
- The current CUDA device and stream: what is copied to a device is ordered as the awaiting task has it.
- The mode that keeps what autograd has saved, where a get writes over it.

Other modes and transforms (FakeTensorMode, `torch.device` as a context, `torch.func`) are put aside by memstore's calls
anyway, see `modes.py`; a thread of ours has none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from memstore import modes

T = TypeVar("T")

_inference: Callable[[], bool] = torch.is_inference_mode_enabled
_grad: Callable[[], bool] = torch.is_grad_enabled


class TorchState:
    """Of the thread that makes it. `run` calls a function with it, in any thread."""

    __slots__ = ("_grad", "_inference", "_modes", "_stream")

    def __init__(self) -> None:
        self._inference, self._grad = _inference(), _grad()
        self._modes = modes.kept_modes() if modes.count_dispatch_modes() else ()
        self._stream: Any = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(self, function: Callable[[], T]) -> T:
        if self._grad and not self._inference and not self._modes and self._stream is None:
            return function()
        with ExitStack() as states:
            states.enter_context(torch.inference_mode(self._inference))
            states.enter_context(torch.set_grad_enabled(self._grad))
            if self._stream is not None:
                states.enter_context(torch.cuda.stream(self._stream))  # and its device
            states.enter_context(modes.keeping(self._modes))
            return function()
