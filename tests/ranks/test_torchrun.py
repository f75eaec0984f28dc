"""Ranks that torchrun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import memstore

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.full
def test_ranks_of_torchrun_need_nothing_but_a_root(root: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "tests/ranks/script.py", root],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    with memstore.open(root) as store:
        version = store.version("run")
        assert {Path(f"{root}.{rank}").read_text() for rank in range(4)} == {str(version)}
        assert len(store.info("run").files) == 4
