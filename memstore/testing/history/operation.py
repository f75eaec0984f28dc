"""What one client did once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["put", "get", "delete", "wait"]
UNKNOWN = float("inf")  # an end: the operation may have happened, or may happen yet


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on one key, and what came of it.

    Attributes:
        kind: a "get" is whatever tells of a value, a version, or that there is none; a "put" or "delete" that was
            refused for its `expect_version` is a "get" of the version that was found.
        key: of the store.
        start: when it was called: seconds of a clock that all clients share.
        end: when it returned; UNKNOWN: it did not, or its outcome is not known.
        value: what a put put, and no other put of the key; what a get found; None: not looked at.
        version: given to a put; found by a get or wait, where 0 means no such key; 0 of a delete: there was nothing.
            None: not told; of a wait that ended: nothing newer came.
        expect_version: of puts and deletes, as in `Store.put`; 0: no such key.
        newer_than: of waits.
        client: who did it, for messages.
    """

    kind: Kind
    key: str
    start: float
    end: float
    value: int | str | None = None
    version: int | None = None
    expect_version: int | None = None
    newer_than: int = 0
    client: str = ""

    @property
    def is_known(self) -> bool:
        return self.end != UNKNOWN

    @property
    def changes(self) -> bool:
        """Whether it changes the key, where it happens."""
        return self.kind == "put" or (self.kind == "delete" and self.version != 0)

    def __str__(self) -> str:
        told = [
            f"{name} {value!r}"
            for name, value in (("value", self.value), ("version", self.version))
            if value is not None
        ]
        if self.expect_version is not None:
            told.append(f"expecting version {self.expect_version}")
        if self.kind == "wait":
            told.append(f"newer than {self.newer_than}")
        who = f"{self.kind} {self.key!r} by {self.client or 'a client'}"
        end = f"to {self.end:.6f}" if self.is_known else "with an unknown outcome"
        return f"{who} from {self.start:.6f} {end}: {', '.join(told) or 'done'}"
