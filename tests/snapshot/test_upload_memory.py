"""The memory that an upload takes beside the tensors: at most the budget and 64 MiB. A sink takes what is put."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.sink import SinkServer

MIB = 1 << 20

# The peak of the process that puts, in KiB, above what it had before. A first take has warmed what is made once.
PROGRAM = """
import sys, torch
from memstore import Snapshot, StateDict
from tests.support.buckets import options_for

def kib(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))

url, kind, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = options_for(url)
if kind == "columns":  # lie otherwise in memory: each is copied before it is put
    state = {f"t{i}": torch.zeros(1 << 10, 4 << 10).t() for i in range(24)}
elif kind == "small":  # are put together
    state = {f"t{i}": torch.zeros(7 << 10) for i in range(14 << 10)}
else:
    state = {f"t{i}": torch.zeros(32 << 20) for i in range(3)}
for tensor in state.values():
    tensor.fill_(1.0)
warm = {"state": StateDict({"x": torch.zeros(100).t(), **{f"t{i}": torch.ones(8 << 10) for i in range(20)}})}
Snapshot.take("s3://bucket/warm", warm, storage_options=options)
app_state = {"state": StateDict(state)}
before = kib("VmRSS:")
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")
Snapshot.take("s3://bucket/run", app_state, storage_options=options, memory_budget_bytes=budget)
print(kib("VmHWM:") - before)
"""


@pytest.fixture
def sink() -> Iterator[SinkServer]:
    server = SinkServer()
    yield server
    server.close()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["columns", "small", "large"])
def test_an_upload_takes_no_more_memory_than_its_budget(kind: str, sink: SinkServer) -> None:
    """Of 384 MiB, with a budget of 128."""
    command = [sys.executable, "-c", PROGRAM, sink.url, kind, str(128 * MIB)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert int(done.stdout) * 1024 <= (128 + 64) * MIB, f"{int(done.stdout) >> 10} MiB"
