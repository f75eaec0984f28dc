"""Where the files of others lie, in these tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leaks import mapped_files, open_files


@pytest.fixture
def folder(root: str, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder beside the store. Afterwards no file of it may be open or mapped."""
    found = Path(root).parent / "files"
    found.mkdir()
    yield found
    gc.collect()
    if request.node.stash.get(passed, False):  # one that failed is held by its traceback
        assert [*mapped_files(str(found)), *open_files(str(found))] == []


passed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[passed] = report.passed
    return report
