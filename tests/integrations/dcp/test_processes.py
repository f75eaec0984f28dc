"""What is staged may be sent to other processes; torch's process saves it, and goes on after a save that failed."""

from __future__ import annotations

import pytest

from tests.integrations.dcp import processes_on_ranks
from tests.ranks.launcher import Ranks

FULL = pytest.mark.full


@pytest.mark.parametrize("stager", ["memstore", "torch"])
@pytest.mark.parametrize("how", ["FSDP2", "TP", *(pytest.param(one, marks=FULL) for one in ("HSDP", "FSDP2 and TP"))])
def test_what_is_staged_of_a_model_that_is_spread_can_be_sent(ranks4: Ranks, how: str, stager: str) -> None:
    assert all(ranks4.run(processes_on_ranks.sent, how, stager))


@pytest.mark.full
@pytest.mark.parametrize("stager", ["memstore", "torch"])
@pytest.mark.parametrize("how", ["none", "FSDP2", "HSDP", "TP", "FSDP2 and TP"])
def test_a_process_of_torch_saves_a_model_that_is_spread(
    ranks4: Ranks, scratch: str, key: str | None, how: str, stager: str
) -> None:
    assert ranks4.run(processes_on_ranks.save_by_process, scratch, key, how, stager) == [[True] * 3] * 4
