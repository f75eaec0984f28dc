"""What the documents show runs as printed, for a newcomer who has installed what the page names, and nothing else."""

from __future__ import annotations

import ast
import doctest
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.documents import reader
from tests.documents.pages import (
    FENCE,
    KINDS,
    PAGES,
    ROOT,
    SHM,
    installed_by,
    is_missing,
    modules_of,
    relative,
    snippets,
)
from tests.support.fork_server import ForkServer

HERE = Path(__file__).parent
RUNNING = [page for page in PAGES if any(snippet.not_run is None for snippet in snippets(page))]
# Many programs, or Monarch, start: they are read in fresh interpreters only.
LONG = {"docs/command-line.md", "docs/convert.md", "docs/rdma.md"}
IN_CHECKOUT = {"docs/testing.md"}  # their readers have tests/ too
# torchmetrics, of Lightning, imports these if they are installed, as the tests' extras are here.
LOOKED_FOR = {"docs/lightning.md": ("matplotlib", "scipy")}
COLUMNS = 54  # of code, where two blocks stand side by side: docs/site/static/memstore.css


@dataclass
class Reading:
    """Of a page by a newcomer, in a folder of its own, with `/dev/shm` of its own."""

    page: list[dict[str, str]]
    folder: str
    environment: dict[str, str]

    @property
    def output(self) -> str:
        with open(f"{self.folder}.output") as file:
            return file.read()

    def in_workers(
        self, fork_server: ForkServer, page: list[dict[str, str]] | None = None, *, once: bool = False
    ) -> int:
        """Returns the exit code. With `page`, reads that one instead. Unless `once`, it is read a second time."""
        arguments = (page or self.page, once, self.folder, self.environment, f"{self.folder}.output")
        with fork_server.start(reader.read_in_worker, *arguments) as worker:
            while worker.channel.poll(250):
                try:
                    snippet = worker.channel.recv()
                except EOFError:
                    break
                worker.send(self.in_workers(fork_server, [snippet], once=True))
            return worker.wait()

    def in_fresh_interpreters(self) -> int:
        with open(f"{self.folder}.output", "w") as file:
            return subprocess.run(
                [sys.executable, HERE / "reader.py"],
                input=json.dumps(self.page),
                cwd=self.folder,
                env=self.environment,
                stdout=file,
                stderr=file,
                text=True,
                timeout=250,
                check=False,
            ).returncode


def skip_unless_installed(page: Path) -> None:
    """Pages on other libraries run in environments of their own (`make test-torchrl`)."""
    for name in (name for snippet in snippets(page) for name in installed_by(snippet)):
        if is_missing(name):
            pytest.skip(f"{relative(page)} needs {name}, which isn't installed")


def reading(page: Path, scratch: str) -> Reading:
    skip_unless_installed(page)
    os.makedirs(f"{scratch}/here")
    os.makedirs(f"{scratch}/shm")
    named = [name for snippet in snippets(page) for name in installed_by(snippet)]
    named += [name for name in LOOKED_FOR.get(relative(page), ()) if find_spec(name)]
    typed = [
        {"place": one.place, "kind": one.kind, "code": as_typed_here(one.code, scratch)}
        for one in snippets(page)
        if one.not_run is None
    ]
    modules = modules_of(["memstore", *named]) | ({"tests"} if relative(page) in IN_CHECKOUT else set())
    environment = {
        **os.environ,
        "INSTALLED": " ".join(sorted(modules)),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{HERE / 'plain_install'}:{ROOT}",
    }
    return Reading(typed, f"{scratch}/here", environment)


def as_typed_here(code: str, scratch: str) -> str:
    """With a `/dev/shm` of its own, and an address of its own of those at which a host reaches itself."""
    parts = (1 + part % 250 for part in hashlib.sha256(scratch.encode()).digest())
    own = f"tcp://127.{next(parts)}.{next(parts)}.{next(parts)}:"
    return code.replace("/dev/shm/", f"{scratch}/shm/").replace("tcp://127.0.0.1:", own)


@pytest.mark.parametrize("page", [page for page in RUNNING if relative(page) not in LONG], ids=relative)
def test_a_page_runs_as_a_newcomer_copies_it(page: Path, scratch: str, fork_server: ForkServer) -> None:
    one = reading(page, scratch)
    assert one.in_workers(fork_server, once=True) == 0, one.output


@pytest.mark.full
@pytest.mark.parametrize("page", RUNNING, ids=relative)
def test_a_page_runs_in_fresh_interpreters(page: Path, scratch: str) -> None:
    one = reading(page, scratch)
    assert one.in_fresh_interpreters() == 0, one.output


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_what_is_not_run_says_why(page: Path) -> None:
    for snippet in snippets(page):
        if snippet.not_run is None:
            assert snippet.language in KINDS, (
                f"{snippet.place}: mark it with <!-- not run: REASON -->, or say what it is"
            )
        else:
            assert len(snippet.not_run) > 10, f"{snippet.place}: the mark gives no reason"
    assert page.read_text().count("\n```") == 2 * len(snippets(page)), "a fence that this test doesn't see"


@pytest.mark.parametrize("page", RUNNING, ids=relative)
def test_what_a_page_needs_is_installed_before_its_first_snippet(page: Path) -> None:
    started = False
    for snippet in snippets(page):
        assert not (started and installed_by(snippet)), snippet.place
        started |= snippet.not_run is None


@pytest.mark.parametrize("page", [page for page in PAGES if "two-columns" in page.read_text()], ids=relative)
def test_code_in_two_columns_fits_into_them(page: Path) -> None:
    """What is wider is cut off, at every width of the window."""
    for columns in re.findall(r'<div class="two-columns">.*?</div></div>', page.read_text(), re.DOTALL):
        for snippet in FENCE.finditer(columns):
            assert [line for line in snippet[3].splitlines() if len(line) > COLUMNS] == []


def test_no_two_pages_use_one_folder() -> None:
    """So that none meets what another has left, with settings of its own."""
    owners: dict[str, str] = {}
    for page in PAGES:
        for snippet in snippets(page):
            for folder in SHM.findall(snippet.code):
                assert owners.setdefault(folder, relative(page)) == relative(page), (
                    f"{snippet.place}: /dev/shm/{folder}"
                )
    assert len(owners) > 3, "this tests nothing"


OPENED = re.compile(r"""open\(\s*"/dev/shm/([\w-]+)[^"]*"(, "w")?""")
CONTINUED = {  # stores that a page means to find again
    "recipes-restart": "a trainer continues",
    "start-order": "destroyed by whoever starts the processes",
    "start-order-again": "removed by the page",
    **dict.fromkeys(("host-a", "host-b", "rdma-a", "rdma-b", "team", "monarch"), "served: no host begins it anew"),
}


def test_a_page_begins_without_the_values_of_an_earlier_run() -> None:
    opened: dict[str, tuple[str, str]] = {}  # the first opening of each store: where, and whether it begins anew
    for snippet in (snippet for page in RUNNING for snippet in snippets(page) if snippet.not_run is None):
        for folder, mode in OPENED.findall(snippet.code):
            opened.setdefault(folder, (snippet.place, mode))
    assert {folder: place for folder, (place, mode) in opened.items() if not mode and folder not in CONTINUED} == {}
    assert set(CONTINUED) <= set(opened), "a name that no page opens"


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("```python\nimport hypothesis\n```\n", "No module named 'hypothesis'"),
        ("```python\n# another process\nimport hypothesis\n```\n", "No module named 'hypothesis'"),
        ("```sh\npython -c 'import hypothesis'\n```\n", "No module named 'hypothesis'"),
        ("```python\nprint(1 + 1)    # 3\n```\n", "but it is:\n2"),
        ("```python\nfor n in range(2):\n    print(n)\nprint(3)\n```\n", "SyntaxError"),  # a prompt needs an empty line
        ("```python\nopen('x', 'x')\n```\n", "FileExistsError"),  # when it is read again
        ("```console\n$ echo 1\n2\n```\n", "but it is:\n1"),
        ("```sh\nfalse\ntrue\n```\n", "page.md:1 fails as printed"),
    ],
)
@pytest.mark.parametrize("is_fresh", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_page_that_fails_is_found(
    page: str, says: str, is_fresh: bool, scratch: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    (tmp_path / "page.md").write_text(page)
    one = reading(tmp_path / "page.md", scratch)
    code = one.in_fresh_interpreters() if is_fresh else one.in_workers(fork_server)
    assert code != 0 and says in one.output, one.output


def test_a_page_may_use_what_it_names(scratch: str, tmp_path: Path, fork_server: ForkServer) -> None:
    install = "<!-- not run: it installs -->\n```sh\npip install hypothesis    # for this page\n```\n"
    (tmp_path / "page.md").write_text(f"{install}```python\nimport hypothesis, sortedcontainers\n```\n")
    one = reading(tmp_path / "page.md", scratch)
    assert one.in_workers(fork_server, once=True) == 0, one.output


EXAMPLES = [path for path in sorted((ROOT / "memstore").rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=relative)
def test_examples_of_docstrings_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module = import_module(relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name, text in docstrings_in(path):  # doctest leaves out what names another module as its own
        runner.run(doctest.DocTestParser().get_doctest(text, dict(vars(module)), name, str(path), 0))
    assert runner.tries > 0 and runner.failures == 0


def docstrings_in(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None and ">>> " in text:
                yield getattr(node, "name", path.stem), text
