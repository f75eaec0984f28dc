"""What a person sees: a command in a pseudo-terminal, and the screen that it leaves."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from memstore.cli import main, render

_STEP = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b])", re.DOTALL)


class Seen(NamedTuple):
    """What a command wrote, how it ended, and the lines of the screen afterwards."""

    text: str
    code: int
    screen: list[str]


def in_terminal(
    *arguments: str,
    size: tuple[int, int] = (80, 24),
    environment: Mapping[str, str] | None = None,
    interrupt: str | None = None,
) -> Seen:
    """Runs a command in a fork of this process, which has torch, in a terminal of `size` columns and lines.

    Once it has written `interrupt`, it gets a Ctrl-C each second: Python drops one that comes within a finalizer.
    """
    pid, fd = pty.fork()
    if pid == 0:
        _run(arguments, size, environment or {})
    written, deadline, again = b"", time.monotonic() + 120, 0.0
    while time.monotonic() < deadline:
        if select.select([fd], [], [], 0.1)[0]:
            try:
                part = os.read(fd, 1 << 16)
            except OSError:  # the terminal's end
                break
            if not part:
                break
            written += part
        if interrupt is not None and time.monotonic() > again and interrupt in written.decode(errors="replace"):
            os.kill(pid, signal.SIGINT)
            again = time.monotonic() + 1.0
    else:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(fd)
    text = written.decode(errors="replace")
    return Seen(text, os.waitstatus_to_exitcode(status), screen_of(text, *size))


def _run(arguments: tuple[str, ...], size: tuple[int, int], environment: Mapping[str, str]) -> None:
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, children too
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            os.environ.pop(name, None)
        os.environ.update({"TERM": "xterm-256color", **environment})
        encoding = environment.get("PYTHONIOENCODING", "utf-8")
        sys.stdin, sys.stdout, sys.stderr = (
            open(0, closefd=False),  # noqa: SIM115
            open(1, "w", buffering=1, encoding=encoding, closefd=False),  # noqa: SIM115
            open(2, "w", buffering=1, encoding=encoding, closefd=False),  # noqa: SIM115
        )
        torch.set_num_threads(1)  # a fork has none of the others
        render.console, render.errors = render.consoles()
        sys.argv = ["memstore", *arguments]
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def screen_of(text: str, columns: int, lines: int) -> list[str]:
    """The lines that a terminal shows in the end. It knows what `rich` writes."""
    rows: list[list[str]] = [[]]
    y = x = top = 0
    for parameters, command, is_return, is_newline, char in _STEP.findall(text):
        count = int(parameters) if parameters.isdecimal() else 1
        if is_return or command == "G":
            x = 0
        elif is_newline:
            y += 1
        elif command == "A":
            y = max(y - count, top)
        elif command == "B":
            y += count
        elif command == "K":
            rows[y] = [] if parameters == "2" else rows[y][:x]
        elif char:
            if x == columns:
                x, y = 0, y + 1
            rows += [[] for _ in range(y + 1 - len(rows))]
            rows[y] += [" "] * (x + 1 - len(rows[y]))
            rows[y][x] = char
            x += 1
        rows += [[] for _ in range(y + 1 - len(rows))]
        top = max(top, y + 1 - lines)
    return ["".join(row).rstrip() for row in rows[top:]]
