"""Histories: what the clients of a store did and found, and whether one store could have answered so.

    recorder = Recorder("history/client-3.jsonl")       # in each client, a file of its own
    with recorder.put("key", 42) as outcome:            # each put has a value that no other has
        outcome.version = store.put("key", torch.full((1000,), 42))
    with recorder.get("key") as outcome:
        outcome.value = the_one_value_of(store.get("key"))

    check(read_history(Path("history").iterdir()))      # afterwards; raises NotLinearizableError

A store is linearizable a key: each operation seems to happen at one moment between its start and its end, once. An
operation whose outcome is not known (its client was killed, or got `UnknownOutcomeError`) happens at one moment after
its start, or never.

operation         what one client did once
linearizability   check: looks for the moments; raises where there are none
search            how it looks for them
recorder          Recorder writes operations to a file, as they start and end; read_history reads the files
"""

from memstore.testing.history.linearizability import NotLinearizableError, check
from memstore.testing.history.operation import Operation
from memstore.testing.history.recorder import Outcome, Recorder, read_history

__all__ = ["NotLinearizableError", "Operation", "Outcome", "Recorder", "check", "read_history"]


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})  # completion offers what users call
