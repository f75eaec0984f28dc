"""What all tests share: stores in fresh folders, which must be left without a leak."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tensordict  # noqa: F401 - loaded before `quick_collections`
import torch  # noqa: F401

import memstore
from memstore.engine import syscalls
from memstore.engine.root import folder
from memstore.engine.root.filesystem import TMPFS
from tests.examples import examples
from tests.huge_pages import ask_at_any_price
from tests.leaks import find_leaks
from tests.ranks.worlds import rank_server, ranks2, ranks4, world2, world4  # noqa: F401 - fixtures of several folders
from tests.small_values import lie_in_segments
from tests.support.bucket_fixtures import (  # noqa: F401 - fixtures of several folders
    s3_environment,
    s3_options,
    s3_proxied,
    s3_proxy,
    s3_server,
    url,
)
from tests.support.fork_server import ForkServer

SHM = Path("/dev/shm")

# Machines that run tests are busy: no example has a deadline of its own, the test has (pytest-timeout).
# The same examples each time, but for `make test-full`, which looks for new ones.
hypothesis.settings.register_profile(
    "memstore", deadline=None, print_blob=True, derandomize=True, max_examples=examples(100)
)
hypothesis.settings.register_profile("full", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "memstore"))

ask_at_any_price()
lie_in_segments()

# One import of torch for all the processes that tests start with the method "forkserver", not one in each.
multiprocessing.set_forkserver_preload(
    ["tensordict", "tests.small_values", "memstore.store.opening", "memstore.contents"]
)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine in a loop of its own, and in it opens and closes the stores that it is given."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for one in given.values():
                if isinstance(one, contextlib.AbstractAsyncContextManager):
                    await stack.enter_async_context(one)
            await test(**given)

    asyncio.run(run())
    return True


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[str]:
    """A path for a store, in memory where there is a /dev/shm; no folder yet. For tests that spoil what is there."""
    parent_of_all = SHM if os.access(SHM, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent_of_all, prefix="memstore-test-") as parent:
        yield f"{parent}/store"


@pytest.fixture
def root(scratch: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """As `scratch`, for tests that don't: afterwards nothing may be left open, mapped, or unaccounted for."""
    yield scratch
    _check(scratch, request)


@pytest.fixture
def disk_root(request: pytest.FixtureRequest) -> Iterator[str]:
    """A path for a store on a file system that a disk holds."""
    for parent in (tempfile.gettempdir(), "/var/tmp", os.getcwd()):
        if os.access(parent, os.W_OK) and syscalls.filesystem_type(parent) != TMPFS:
            break
    else:
        pytest.skip("no folder here is on a disk: the temporary ones and the working directory are on tmpfs")
    path = tempfile.mkdtemp(dir=parent, prefix="memstore-test-")
    yield f"{path}/store"
    try:
        _check(f"{path}/store", request)
    finally:
        shutil.rmtree(path)


@pytest.fixture
def store(root: str) -> Iterator[memstore.Store]:
    with memstore.open(root, timeout=10.0) as opened:
        yield opened


@pytest.fixture
def disk_store(disk_root: str) -> Iterator[memstore.Store]:
    with memstore.open(disk_root, durability="disk", timeout=10.0) as opened:
        yield opened


@pytest.fixture
def reads() -> Callable[[], Any]:
    """`with reads() as count: ...` and then `count()`: the bytes read within."""

    @contextmanager
    def counted() -> Iterator[Callable[[], int]]:
        before = memstore.bytes_read()
        yield lambda: memstore.bytes_read() - before

    return counted


@pytest.fixture
def opener(root: str) -> Iterator[Callable[..., memstore.Store]]:
    """`memstore.open(root, ...)`; what was opened is closed afterwards."""
    opened: list[memstore.Store] = []

    def open_store(mode: str = "a", **options: object) -> memstore.Store:
        opened.append(memstore.open(root, mode, **{"timeout": 10.0, **options}))  # type: ignore[arg-type]
        return opened[-1]

    yield open_store
    for one in opened:
        one.close()


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Says the seed of the order, which pytest-randomly does not do in a quiet run. --randomly-seed=... repeats it."""
    options, reporter = session.config.option, session.config.pluginmanager.get_plugin("terminalreporter")
    seed = getattr(options, "randomly_seed", "default")  # "default": pytest-randomly is not installed, or is off
    if seed != "default" and reporter is not None and reporter.verbosity < 0:
        reporter.write_line(f"in random order: --randomly-seed={seed}")


_passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


def _check(path: str, request: pytest.FixtureRequest) -> None:
    """After a test that passed: one that failed is held, with its values, by its traceback."""
    if request.node.stash.get(_passed, False) and os.path.exists(f"{path}/{folder.SETTINGS}"):
        deadline = time.monotonic() + 10
        while True:  # a thread that ends just now may hold the store for a moment more
            gc.collect()
            leaks = find_leaks(path)
            if not leaks or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert leaks == []


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """What is imported by now is never garbage: a collection then takes milliseconds, not a third of a second."""
    gc.collect()
    gc.freeze()


# --- processes that fork ----------------------------------------------------------------------------------------------
# It imports torch, which takes seconds: the tests of several folders share it.

_FOR_WORKERS = (
    "tests.small_values",
    *(f"tests.crash.{name}" for name in ("workers", "blockers", "forks", "journal", "shards")),
    "memstore.datasets",
    "memstore.replay",
    "tests.replay.workers",
    "tests.documents.reader",
)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """For workers that are there to be killed, or that begin with nothing of this process."""
    with ForkServer(preload=_FOR_WORKERS) as started:
        yield started
