"""Memory that CUDA devices copy into directly, and streams of their own for that."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import torch


class Pinned:
    """Memory that is registered with CUDA, where that accepts it. (Where not, copies go through a buffer of CUDA's.)"""

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._is_registered = int(_runtime().cudaHostRegister(address, size, 0)) == 0

    def close(self) -> None:
        """Must come before the memory is unmapped."""
        if self._is_registered:
            self._is_registered = False
            _runtime().cudaHostUnregister(self._address)


def _runtime() -> Any:
    cuda: Any = torch.cuda
    return cuda.cudart()


@contextlib.contextmanager
def own_streams(devices: Iterable[torch.device]) -> Generator[None]:
    """Inside it, the current stream of each CUDA device is a new one, which first waits for what was queued before."""
    with contextlib.ExitStack() as stack:
        for device in devices:
            before = torch.cuda.current_stream(device)
            stream = torch.cuda.Stream(device)
            stream.wait_stream(before)
            stack.enter_context(torch.cuda.stream(stream))
        yield
