"""Training by other frameworks: a run that is killed, and goes on, has the weights of one that isn't killed.

`make test-frameworks` has the frameworks in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import memstore
from tests.integrations.frameworks.runs import STEPS

ROOT = Path(__file__).parents[3]
NEEDS = {
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "accelerate_state": ("accelerate",),
    "trainer": ("transformers", "accelerate"),
    "torchtitan": ("torchtitan",),
}
PUBLISHES = {"lightning", "trainer"}

pytestmark = pytest.mark.timeout(1800)


def run(name: str, folder: Path, stop: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.integrations.frameworks.runs", name, str(folder), str(stop)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)


@pytest.mark.parametrize("name", NEEDS)
def test_a_killed_run_goes_on_to_the_same_weights(name: str, tmp_path: Path) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: `make test-frameworks` has it in an environment of its own")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = run(name, whole, 0)
    assert expected.returncode == 0, expected.stderr
    died = run(name, killed, STEPS // 2 + 2)  # after two checkpoints at least, of which the last may not be whole
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert any(killed.iterdir())
    ended = run(name, killed, 0)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == expected.stdout and expected.stdout.strip()
    if name in PUBLISHES:
        with memstore.open(f"{killed}/store", "r") as store:
            assert store.info("policy").leaves and store.version("policy") >= STEPS // 2 // 2
