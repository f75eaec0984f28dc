"""What runs each file of tests alone finds a file that relies on another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.archives import ROOT


@pytest.mark.full
def test_a_file_that_relies_on_another_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text("import sys\ndef test_leaves(): sys.left = 1\n")
    (tmp_path / "test_relies.py").write_text("import sys\ndef test_relies(): assert sys.left\n")
    alone = [sys.executable, "-m", "tests.alone", "-n", "2"]
    done = subprocess.run([*alone, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "2 files of tests, each alone: 1 failed" in done.stdout
    assert done.stdout.rstrip().endswith("test_relies.py") and "no attribute 'left'" in done.stdout
    (tmp_path / "test_relies.py").unlink()
    assert subprocess.run([*alone, str(tmp_path)], cwd=ROOT, capture_output=True).returncode == 0
