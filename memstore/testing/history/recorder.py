"""Operations, written to a file as they start and as they end: a client that is killed leaves one that never ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from memstore.errors import (
    KeyNotFoundError,
    MemstoreError,
    StoreTimeoutError,
    UnknownOutcomeError,
    VersionConflictError,
)
from memstore.testing.history.operation import UNKNOWN, Kind, Operation


@dataclass(slots=True)
class Outcome:
    """What came of an operation. Set its attributes in the `with` of the recorder.

    Attributes:
        value: as `Operation` has it.
        version: as `Operation` has it.
    """

    value: int | str | None = None
    version: int | None = None


class Recorder:
    """Records what one client does. Not thread-safe: each thread is a client.

    Each method is a context manager: make the call in its `with`, and set what came of it in the `Outcome` that the
    `with` gives. An error that is raised in the `with` is passed on, and says what became of the operation. After an
    UnknownOutcomeError, or an error that isn't memstore's, it may have happened. KeyNotFoundError and
    VersionConflictError say what they found. After any other error of memstore nothing happened.

    Args:
        path: a new file of this client's.
        client: its name in messages; else the file's.
        clock: seconds, the same for all clients: by default the machine's, since its start, also on hosts of tests.
    """

    def __init__(
        self, path: str | os.PathLike[str], client: str | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._clock = clock
        self._count = 0
        self._client = client or Path(path).stem

    @contextmanager
    def put(self, key: str, value: int | str, *, expect_version: int | None = None) -> Generator[Outcome]:
        """Records a put. `value` stands for what is put: no other put of the key has it. Set `version`."""
        with self._record("put", key, value=value, expect_version=expect_version) as outcome:
            yield outcome

    @contextmanager
    def get(self, key: str) -> Generator[Outcome]:
        """Records a get. Set `value`, `version`, or both; set `version` to 0 if the key doesn't exist."""
        with self._record("get", key) as outcome:
            yield outcome

    @contextmanager
    def delete(self, key: str, *, expect_version: int | None = None) -> Generator[Outcome]:
        """Records a delete. Set nothing; set `version` to 0 if the key didn't exist and the call raised no error."""
        with self._record("delete", key, expect_version=expect_version) as outcome:
            yield outcome

    @contextmanager
    def wait(self, key: str, *, newer_than: int = 0) -> Generator[Outcome]:
        """Records a wait. Set `version`. A StoreTimeoutError says that for a moment there was nothing newer."""
        with self._record("wait", key, newer_than=newer_than) as outcome:
            yield outcome

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _record(self, kind: Kind, key: str, **fields: Any) -> Generator[Outcome]:
        number = self._count = self._count + 1
        told = {name: value for name, value in fields.items() if value is not None}
        self._write(
            {"number": number, "client": self._client, "kind": kind, "key": key, "start": self._clock(), **told}
        )
        outcome = Outcome()
        try:
            yield outcome
        except KeyNotFoundError:
            self._end(number, {"version": 0} if kind != "put" else {"failed": True})
            raise
        except VersionConflictError as error:
            self._end(number, {"kind": "get", "version": error.found, "value": None, "expect_version": None})
            raise
        except UnknownOutcomeError:
            raise
        except StoreTimeoutError:
            self._end(number, {} if kind == "wait" else {"failed": True})
            raise
        except MemstoreError:
            self._end(number, {"failed": True})
            raise
        filled = {"version": outcome.version, "value": outcome.value}
        self._end(number, {name: value for name, value in filled.items() if value is not None})

    def _end(self, number: int, outcome: dict[str, Any]) -> None:
        self._write({"number": number, "end": self._clock(), **outcome})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, msgspec.json.encode(line) + b"\n")  # whole, or not at all


def read_history(paths: Iterable[str | os.PathLike[str]]) -> list[Operation]:
    """The operations of all clients, but for those that failed.

    Raises:
        ValueError: a file is no recorder's.
    """
    return [operation for path in paths for operation in _read(Path(path))]


def _read(path: Path) -> list[Operation]:
    found: dict[int, dict[str, Any]] = {}
    try:
        for line in msgspec.json.Decoder(dict[str, Any]).decode_lines(path.read_bytes()):
            found.setdefault(line.pop("number"), {"end": UNKNOWN}).update(line)
        happened = [fields for fields in found.values() if not fields.pop("failed", False)]
        return msgspec.convert(happened, list[Operation])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by a Recorder: {error}") from error
