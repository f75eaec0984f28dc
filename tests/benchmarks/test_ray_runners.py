"""The script behind the figures of docs/coming-from/ray.md: each way hands over the weights of its round."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_runners_have_the_weights_of_each_round(root: str) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.scripts.ray_runners", "--mib=1", "--rounds=2", f"--root={root}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    rows = [line.split(" | ") for line in found.stdout.splitlines() if line.startswith("| `")]
    page = (ROOT / "docs/coming-from/ray.md").read_text()
    assert len(rows) == 4 and all(f"{way} | " in page for way, _, _ in rows), "the page has the script's rows"
    assert not Path(root).exists()
