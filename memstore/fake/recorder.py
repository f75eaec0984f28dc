"""The interface by which modes tell of what is done with fake tensors, and ask for it: `deferred_init` has one.

For each operator that makes or changes storages of fake tensors:

1. `begin` is called before it runs on meta tensors: then arguments are still what they were.
2. `commit` after it, with the storages that are new and those that were written.

Where meta tensors can't tell what an operator returns, `compute` runs it on values between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from memstore.fake.marks import Mark, Ref


class History(Protocol):
    """What was done with one storage."""

    def recorder(self) -> Recorder:
        """A recorder for operators outside of the mode in which it was made."""
        ...


class Recorder(Protocol):
    """Records operators on fake tensors, and runs them on values."""

    def new_history(self) -> History: ...

    def begin(self, operator: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """An event, which isn't recorded yet.

        Args:
            args, options: of the operator, with refs instead of fake tensors.
        """
        ...

    def commit(self, event: Any, made: Sequence[tuple[int, Ref]], written: Sequence[Mark]) -> None:
        """Records an event.

        Args:
            made: the number, among the tensors that are returned, of each that has a new storage.
            written: the storages that it changes.
        """
        ...

    def compute(self, event: Any) -> Any:
        """Runs the event's operator on values, as of now, and returns what it returns."""
        ...

    def run_real(self, event: Any) -> Any:
        """Runs the operator of an event without fake tensors, with the random numbers that it is to get."""
        ...

    def values(self, ref: Ref) -> torch.Tensor:
        """The values of a fake tensor, as of now, in memory of their own."""
        ...
