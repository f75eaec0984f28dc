"""A job's store, as `initialize` makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import memstore.integrations.torchstore as ts
from memstore.integrations.torchstore.folders import ROOT_VARIABLE


@pytest.fixture
def job(scratch: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The folder of a job, with the default store in it."""
    monkeypatch.setenv(ROOT_VARIABLE, scratch)
    asyncio.run(ts.initialize())
    yield scratch
    asyncio.run(ts.shutdown())
