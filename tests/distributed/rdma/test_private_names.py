"""What memstore takes of Monarch that isn't public. Where a test fails, a new version of Monarch has changed it: either
find the new names, or pin the version in pyproject.toml. Until then:

- `transfers/rdma.py` takes handles of registered memory as JSON, since Monarch's own way, pickle, runs what is in it:
  hosts that are served with `--transport rdma` or `monarch` send all bytes over TCP, and say so in their logs.
- `meshes/index_actor.py` takes back orders that couldn't be delivered: a host of a mesh that has died ends the process
  of the script that serves it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

HANDLES = """
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

UNDELIVERED = """
import inspect
from monarch.actor import Actor
from memstore.distributed.meshes.index_actor import Overseer

assert list(inspect.signature(Actor._handle_undeliverable_message).parameters) == ["self", "message"]
assert Actor._handle_undeliverable_message(None, None) is False  # not taken back, unless a class says so
assert Overseer._handle_undeliverable_message(None, None) is True
print("orders can be taken back")
"""

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(150),
    pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch isn't installed"),
]


def test_a_handle_of_registered_memory_is_json_that_makes_one_again() -> None:
    assert "a handle is JSON" in _run(HANDLES)


def test_an_actor_may_take_back_what_could_not_be_delivered() -> None:
    assert "orders can be taken back" in _run(UNDELIVERED)


def _run(program: str) -> str:
    """What the program prints, in an interpreter of its own, which Monarch's threads end with."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr
