"""The benchmark of TorchStore's calls: what is missing is listed, and the script does what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.peers.torchstore_calls import CHECKOUT, MemstoreCalls, TorchStoreCalls
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.torchstore import kinds, measure


def test_torchstore_is_listed_as_not_installed_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CHECKOUT, raising=False)
    assert CHECKOUT in (TorchStoreCalls.missing() or "")
    monkeypatch.setenv(CHECKOUT, str(tmp_path))
    assert "no checkout" in (TorchStoreCalls.missing() or "")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_call(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECKOUT, raising=False)
    Path(scratch).mkdir()
    found = measure(Session(Path(scratch), quick=True))
    assert len(found.series) == sum(len(kind.calls) for kind in kinds(True)) and not found.goals
    assert [one.name for one in found.absent] == [TorchStoreCalls.name]
    assert all(figure.name == MemstoreCalls.name for series in found.series for figure in series.figures)
