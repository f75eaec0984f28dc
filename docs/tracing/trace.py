"""Traces one put and one get as they run, and writes the calls into docs/internals.md as indented lists.

    python docs/tracing/trace.py            prints the lists
    python docs/tracing/trace.py --write    writes them between the marks of the page

A line is `number. file: function`, indented by how deep the call lies. The number is that of the step within which it
is called: comments such as `# 2. Claim` mark the steps in the code. What a function calls, if that is one function
alone, follows behind `>`. Neighbours that call nothing share a line, and a call that comes again in the same place
stands once. Finalizers are left out, and so are reads of properties and lambdas, whose calls stand one level higher.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import memstore

PACKAGE = Path(memstore.__file__).parent
PAGE = Path(__file__).parents[1] / "internals.md"
SMALL, LARGE = 256, 50_000  # elements: 1 KiB, which lies in its record, and 200 KB, which has a segment
_STEP = re.compile(r"^\s*# (\d+)\. ")
_INDENT = "  "
_WIDTH = 110  # columns


@dataclass
class Call:
    """A call of a function of memstore's, and what it has called.

    Attributes:
        step: the number that the comments of its caller give it; "" where there are none.
    """

    file: str
    name: str
    step: str = ""
    calls: list[Call] = field(default_factory=list["Call"])


@cache
def _steps(code: CodeType) -> dict[int, str]:
    """Returns, by line of a function, the number of the step that begins there."""
    lines, start = inspect.getsourcelines(code)
    return {start + i: match[1] for i, line in enumerate(lines) if (match := _STEP.match(line))}


def step_at(code: CodeType, line: int) -> str:
    """Returns the number of the step that a line of a function belongs to."""
    return next((number for start, number in reversed(_steps(code).items()) if start <= line), "")


def trace(call: Callable[[], object]) -> Call:
    """Runs a call four times, and traces the last one: the ones before warm caches. Returns its calls, below a root."""
    root = Call("", "")
    open_calls: list[Call] = [root]
    known: dict[FrameType, Call] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE not in path.parents:
            return
        if event == "call" and (name := _name_of(frame)) is not None:
            caller = frame.f_back
            step = step_at(caller.f_code, caller.f_lineno) if caller in known else ""
            made = Call(path.relative_to(PACKAGE).as_posix(), name, step)
            open_calls[-1].calls.append(made)
            open_calls.append(made)
            known[frame] = made
        elif event == "return" and known.pop(frame, None) is not None:
            open_calls.pop()

    for _ in range(3):
        call()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return root


def _name_of(frame: FrameType) -> str | None:
    """Returns the name of a function, with its class where it is a method. None: it isn't told."""
    code = frame.f_code
    if code.co_name.startswith("<"):
        return None
    owner = frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None
    for one in type(owner).__mro__ if owner is not None else ():
        member = vars(one).get(code.co_name)
        if isinstance(member, property):
            if getattr(member.fget, "__code__", None) is code:
                return None
            member = member.fset
        if inspect.isfunction(member) and inspect.unwrap(member).__code__ is code:
            return f"{one.__name__}.{code.co_name}"
    return code.co_name


def lines_of(calls: list[Call], depth: int = 0) -> list[str]:
    """Writes calls as indented lines."""
    calls = [one for one in calls if not one.name.endswith("__del__")]  # of what an earlier call has left
    lines: list[str] = []
    told: set[str] = set()
    last: Call | None = None  # the neighbour that the next one may share a line with
    for one in calls:
        chain = [one]
        while len(chain[-1].calls) == 1 and not chain[-1].calls[0].step:
            chain.append(chain[-1].calls[0])
        number = f"{one.step}. " if one.step else ""
        text, deeper = f"{_INDENT * depth}{number}{one.file}: {one.name}", depth
        for before, following in pairwise(chain):
            more = following.name if before.file == following.file else f"{following.file}: {following.name}"
            if len(text.rsplit("\n", 1)[-1]) + len(more) + 3 <= _WIDTH:
                text += f" > {more}"
            else:
                deeper += 1
                text += f"\n{_INDENT * deeper}{following.file}: {following.name}"
        inner = lines_of(chain[-1].calls, deeper + 1)
        whole = "\n".join([text, *inner])
        if whole in told:
            continue
        told.add(whole)
        if last is not None and not inner and len(chain) == 1 and last.step == one.step:
            more = f", {one.name}" if last.file == one.file else f"; {one.file}: {one.name}"
            if len(lines[-1] + more) <= _WIDTH:
                lines[-1], last = lines[-1] + more, one
                continue
        lines += [*text.split("\n"), *inner]
        last = one if len(chain) == 1 and not inner else None
    return lines


def traced() -> dict[str, list[str]]:
    """Traces the calls of the page. Returns their lines, by the names of their marks."""
    small, large = torch.zeros(SMALL), torch.zeros(LARGE)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, memstore.open(f"{folder}/store") as store:
        return {
            "put": lines_of(trace(lambda: store.put("policy", large)).calls),
            "get": lines_of(trace(lambda: store.get("policy")).calls),
            "small put": lines_of(trace(lambda: store.put("step", small)).calls),
        }


def written(page: str, found: dict[str, list[str]]) -> str:
    """Returns the page with new lists between its marks."""
    for name, lines in found.items():
        block = f"<!-- not run: it is a list of calls -->\n```text\n{chr(10).join(lines)}\n```\n"
        start, end = f"<!-- trace: {name} -->\n", "<!-- end of the trace -->"
        page = re.sub(f"{start}.*?{end}", lambda _, new=f"{start}{block}{end}": new, page, count=1, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(), traced()))
    else:
        for name, lines in traced().items():
            print(f"--- {name} ---", *lines, "", sep="\n")
