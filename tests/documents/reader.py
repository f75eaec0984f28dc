"""Reads a page as a newcomer does: types its snippets into an interpreter, one after another. Run as a process.

That is a fresh one, or a worker of a fork server, which has torch imported already: else that takes most of the time.
What runs in another process, or in a shell, runs while the interpreter lives, at the point where the page has it. Then
the page is read once more from its start in a new namespace, on what the first reading left; and what belongs into
another process comes last, as for those who try it when they are through with the page.
"""

from __future__ import annotations

import code
import contextlib
import doctest
import io
import json
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

Snippet = dict[str, str]

PRINTED = re.compile(r"^\s*print\(.*\)\s+# (.*)$")  # the comment behind a print is what it prints; ... is anything
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Interpreter(code.InteractiveConsole):
    """A prompt at which the first error ends the session."""

    def showtraceback(self) -> NoReturn:
        raise

    def showsyntaxerror(self, filename: str | None = None, **_: object) -> NoReturn:
        raise

    def type(self, lines: list[str]) -> None:
        """Types lines, and an empty one behind them; compares what each statement prints with what is said of it."""
        statement: list[str] = []
        for line in [*lines, ""]:
            statement.append(line)
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                unfinished = self.push(line)
            if not unfinished:
                said = [match[1] for match in map(PRINTED.match, statement) if match]
                compare("\n".join(said), shown.getvalue())
                statement = []
        if statement:
            raise SyntaxError(f"this never ends: {statement}")


def compare(said: str, shown: str) -> None:
    if said and not doctest.OutputChecker().check_output(f"{said}\n", shown, FLAGS):
        raise AssertionError(f"the page says that this is shown:\n{said}\nbut it is:\n{shown}")


def in_a_fresh_process(snippet: Snippet) -> None:
    subprocess.run([sys.executable, __file__, "once"], input=json.dumps([snippet]), text=True, check=True, timeout=120)


def in_a_shell(text: str) -> None:
    """Lines of commands; or a session: `$ ` before each command, and below it what it shows."""
    if not text.startswith("$ "):
        subprocess.run(["bash", "-ec", text], check=True, timeout=120)
        return
    for part in text.removeprefix("$ ").split("\n$ "):
        command, _, said = part.partition("\n")
        run = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, text=True, check=True, timeout=120)
        compare(said.rstrip(), run.stdout)


def read(snippets: list[Snippet], in_another_process: Callable[[Snippet], None]) -> None:
    interpreter = Interpreter({"__name__": "__main__"})
    for snippet in snippets:
        try:
            if snippet["kind"] == "python":
                interpreter.type(snippet["code"].splitlines())
            elif snippet["kind"] == "another process":
                in_another_process({**snippet, "kind": "python"})
            else:
                in_a_shell(snippet["code"])
        except BaseException as error:
            raise RuntimeError(f"{snippet['place']} fails as printed") from error


def without_figures(snippet: Snippet) -> Snippet:
    """Versions go on when a page is read again: what is printed is compared the first time."""
    return {**snippet, "code": re.sub(r"(\bprint\(.*\))\s+# .*", r"\1", snippet["code"])}


def read_page(page: list[Snippet], *, once: bool, in_another_process: Callable[[Snippet], None]) -> None:
    sys.displayhook = repr  # a statement's value is shown at a prompt, but by no print
    sys.path[0] = ""  # as at a prompt: the folder in which the reader is
    read(page, in_another_process)
    if not once:
        for kind in ("python", "another process"):
            again = [without_figures(snippet) for snippet in page if snippet["kind"] == kind]
            read(again, in_another_process)


def read_in_worker(
    channel: Connection, page: list[Snippet], once: bool, folder: str, environment: dict[str, str], output: str
) -> None:
    """In a worker: it asks whoever started it for another one for each snippet of another process."""

    def in_another_worker(snippet: Snippet) -> None:
        channel.send(snippet)
        if channel.recv() != 0:
            raise RuntimeError("the other process failed")

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open(output, "a") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    plain = runpy.run_path(str(Path(__file__).parent / "plain_install/sitecustomize.py"))
    for name in [name for name in sys.modules if name.partition(".")[0] not in {*plain["INSTALLED"], "__main__"}]:
        del sys.modules[name]
    try:
        read_page(page, once=once, in_another_process=in_another_worker)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    read_page(json.load(sys.stdin), once=sys.argv[1:] == ["once"], in_another_process=in_a_fresh_process)
