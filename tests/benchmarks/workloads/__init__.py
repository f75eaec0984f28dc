"""What is measured. Each module has `measure(session) -> Workload`, its goals and the peers it is compared with."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from tests.benchmarks.report import Workload
from tests.benchmarks.session import Session

# In the order of the report.
WORKLOADS = {
    "small": "put and get of a 1 KiB tensor",
    "dict300": "put and get of a state_dict of 300 tensors",
    "large-get": "get of a large tensor: the call alone, until summed, and by size",
    "put-by-size": "first put of a tensor, by size",
    "wake": "wait() in another process: from the put to the wake",
    "memory": "what held gets and a large put add to a process",
    "start": "import, open and the first get of a new process",
}


def load(id: str) -> Callable[[Session], Workload]:
    """A workload's `measure`; imported when asked for, so that `--list` needs nothing installed."""
    return importlib.import_module(f"tests.benchmarks.workloads.{id.replace('-', '_')}").measure
