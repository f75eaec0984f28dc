"""Memory that CUDA devices copy into directly, and streams of their own for that."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import torch

_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


class Pinned:
    """Memory that is registered with CUDA, where that accepts it. (Where not, copies go through a buffer of CUDA's.)

    Args:
        address, size: of the memory, in bytes.
        device: one that this process uses. A thread that has chosen none would take the first, and begin to use that.
    """

    def __init__(self, address: int, size: int, device: torch.device) -> None:
        self._address, self._device = address, device
        with torch.cuda.device(device):
            self._is_registered = int(_runtime().cudaHostRegister(address, size, _FOR_ALL_DEVICES)) == 0

    def close(self) -> None:
        """Must come before the memory is unmapped."""
        if self._is_registered:
            self._is_registered = False
            with torch.cuda.device(self._device):
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
