"""A torch.multiprocessing queue: tensors go through shared memory, one file descriptor each, and are gone once got.

A SimpleQueue, since its put returns when the value is in the pipe; Queue's returns before anything was sent.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.multiprocessing as mp

from tests.benchmarks.peers import Peer, Value

LONGEST_WAIT = 60.0


class TorchQueue(Peer):
    id: ClassVar[str] = "queue"
    name: ClassVar[str] = "torch.multiprocessing"
    settings: ClassVar[str] = "SimpleQueue; a value is handed over once, to one process"
    overwrites: ClassVar[bool] = False

    def setup(self) -> None:
        context = mp.get_context("spawn")
        self._outward, self._inward = context.SimpleQueue(), context.SimpleQueue()
        self._child = context.Process(target=_answer, args=(self._outward, self._inward), daemon=True)
        self._child.start()

    def ready(self, value: Value) -> Value:
        """A copy: the queue moves the tensors it is given to shared memory, where the receiver may write to them."""
        return value.clone() if isinstance(value, torch.Tensor) else {n: t.clone() for n, t in value.items()}

    def put(self, key: str, value: Any) -> None:
        self._outward.put((key, value))

    def before_get(self, key: str) -> None:
        """Has the child send back a copy of what it was last sent under the key, and waits until it is in the pipe."""
        self._outward.put((key, None))
        if not self._inward._reader.poll(LONGEST_WAIT):  # type: ignore[attr-defined]
            raise TimeoutError(f"the queue's child sent nothing in {LONGEST_WAIT} s")

    def get(self, key: str) -> Any:
        return self._inward.get()

    def close(self) -> None:
        if hasattr(self, "_child"):
            self._outward.put(None)
            self._child.join(LONGEST_WAIT)
            if self._child.is_alive():
                self._child.kill()


def _answer(inward: Any, outward: Any) -> None:
    """Keeps the last value sent under each key; a None asks for it."""
    kept: dict[str, Any] = {}
    while (message := inward.get()) is not None:
        key, value = message
        if value is not None:
            kept[key] = value
            continue
        value = kept[key]
        outward.put(value.clone() if isinstance(value, torch.Tensor) else {n: t.clone() for n, t in value.items()})
