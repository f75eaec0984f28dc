"""What memstore/distributed/transfers/rdma.py takes of Monarch that isn't public. It has no public way to a handle's
JSON: handles are sent by pickle alone, which runs what is in it.

Where this fails, a new version of Monarch has changed them: hosts that are served with `--transport rdma` or `monarch`
send all bytes over TCP then, and say so in their logs. Either find the new names, or pin the version in pyproject.toml.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import json, monarch
from monarch.actor import this_proc
from monarch._rust_bindings.rdma import _RdmaBuffer
from monarch.rdma import RDMABuffer

this_proc()
monarch.configure(rdma_allow_tcp_fallback=True, rdma_disable_ibverbs=True)
memory = memoryview(bytearray(1 << 20))
native = vars(RDMABuffer(memory))["_buffer"]
make, arguments = native.__reduce__()[:2]
assert len(arguments) == 1 and isinstance(json.loads(arguments[0]), dict), (make, arguments)
assert type(native) is _RdmaBuffer, type(native)
other = RDMABuffer.__new__(RDMABuffer)
other._buffer = _RdmaBuffer(arguments[0])
assert other.size() == 1 << 20, other.size()
print("a handle is JSON")
"""


@pytest.mark.full
@pytest.mark.timeout(150)
@pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch isn't installed")
def test_a_handle_of_registered_memory_is_json_that_makes_one_again() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "a handle is JSON" in done.stdout, done.stdout + done.stderr
