"""A look at the whole catalog, in a child process: a damaged LMDB file can end whoever reads it.

The child is a fresh interpreter that imports only the engine, and opens the catalog read-only. It walks all tables
(`inspection.py`), checks each row by itself and with those that it names, and reports on a pipe. A child that dies by
what LMDB does on damaged pages, or hangs in it, is damage too. One that could not be started, or that somebody else
ended (SIGKILL: no memory), says nothing of the catalog.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from memstore.errors import lack_of

SILENCE = 60.0  # seconds without a word from the child: it hangs
_TIME_TO_END = 5.0  # seconds for the child, after its last word
_SIGNALS_OF_DAMAGE = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
_HERE = os.path.dirname(os.path.abspath(__file__))
_DOORS = {"memstore.engine": os.path.dirname(_HERE), "memstore.engine.repair": _HERE}
# The child goes in past these doors: they would import all of the engine, which takes as long again as what it needs.
_PROGRAM = """
import json, sys, types
sys.path[:], doors, arguments = map(json.loads, sys.argv[1:])
for name, folder in doors.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from memstore.engine.repair.inspection import report
report(*arguments)
"""

Row = Callable[[str, bytes, bytes], None]  # called with table, key, value


class Damage(msgspec.Struct, frozen=True, array_like=True):
    """`key` is that of the entry, if the row is of one; `segment` is 0 where none is concerned."""

    detail: str
    key: bytes | None = None
    segment: int = 0
    is_record: bool = False  # the entry's own row


@dataclass(slots=True)
class Survey:
    """What was found.

    Attributes:
        damage: rows that don't fit their checksums, or one another.
        broken: why the tables could not be read to their end; empty if they could.
        refused: why nobody could look, through no fault of the tables; empty if somebody could.
        lack: the errno of what was lacking for it; 0 if it was something else, or isn't known.
        keys, nbytes: of the entries and their values.
    """

    damage: list[Damage] = field(default_factory=list[Damage])
    broken: str = ""
    refused: str = ""
    lack: int = 0
    keys: int = 0
    nbytes: int = 0

    @property
    def is_sound(self) -> bool:
        return not self.broken and not self.refused and not self.damage


def survey(folder: str, *, locked: bool, on_row: Row | None = None) -> Survey:
    """Has a child look at the catalog in `folder`. `locked` False: nobody else uses it, and lock.mdb isn't touched.

    `on_row` gets each row that fits its checksum. Raises nothing.
    """
    found = Survey()
    arguments = list(map(str, sys.path)), _DOORS, [folder, locked, on_row is not None]
    command = [sys.executable, "-c", _PROGRAM, *map(json.dumps, arguments)]
    quiet = subprocess.DEVNULL
    try:
        child = subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
    except (OSError, ValueError) as error:
        found.refused = f"no process could be started to look at it: {error}"
        found.lack = (lack_of(error) or (0, ""))[0]
        return found
    assert child.stdout is not None
    receiver = _Receiver(found, on_row)
    with child, child.stdout as pipe:
        try:
            receiver.listen(pipe.fileno())
            child.wait(_TIME_TO_END)
        except TimeoutError:
            receiver.blame(f"a process that read it said nothing for {SILENCE:.0f} seconds")
        except subprocess.TimeoutExpired:
            pass
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            found.refused = f"a process that read it sent what can't be read: {error}"
        finally:
            child.kill()
        code = child.wait()
    if not receiver.is_done and not found.broken and not found.refused:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        receiver.blame(f"a process that read it was ended by {how}", innocent=-code not in _SIGNALS_OF_DAMAGE)
    return found


class _Receiver:
    """Takes what the child writes, as it comes."""

    def __init__(self, found: Survey, on_row: Row | None) -> None:
        self._found, self._on_row = found, on_row
        self._greeted = self.is_done = False

    def listen(self, fd: int) -> None:
        for kind, *words in _frames(fd):
            if kind == "row" and self._on_row is not None:
                self._on_row(*words)
            elif kind == "damage":
                self._found.damage.append(Damage(*words))
            elif kind == "hello":
                self._greeted = True
            elif kind in ("broken", "refused", "end"):
                self.is_done = True
                if kind == "broken":
                    self._found.broken = str(words[0])
                elif kind == "refused":
                    self._found.refused, self._found.lack = str(words[0]), int(words[1])
                else:
                    self._found.keys, self._found.nbytes = map(int, words)
                return

    def blame(self, what: str, *, innocent: bool = False) -> None:
        """The catalog, if the child had come to it, and unless it is `innocent`."""
        if self._greeted and not innocent:
            self._found.broken = what
        else:
            self._found.refused = what


def _frames(fd: int) -> Iterator[list[Any]]:
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    received = bytearray()
    while True:
        if not poll.poll(SILENCE * 1000):
            raise TimeoutError
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            return
        received += chunk
        start = 0
        while len(received) >= start + 4:
            end = start + 4 + int.from_bytes(received[start : start + 4], "little")
            if len(received) < end:
                break
            yield msgspec.msgpack.decode(memoryview(received)[start + 4 : end], type=list[Any])
            start = end
        del received[:start]
