"""Inside Monarch's actors: a script, since no test imports Monarch."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent.parent.parent


@pytest.mark.full
@pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch isn't installed")
def test_hundreds_of_endpoint_calls_of_one_actor_await_one_store(root: str) -> None:
    command = [sys.executable, "-m", "tests.aio.monarch_actor", root]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(command, cwd=SOURCES, env=environment, capture_output=True, text=True, timeout=250)
    assert "as it should be" in done.stdout, f"{done.stdout}{done.stderr}"
