"""Figures of a store and of this process's calls, for Prometheus, OpenTelemetry, TensorBoard and W&B.

    print(memstore.metrics.prometheus(store))             # what is in the store, and this process's calls

    memstore.metrics.count_calls()                        # before stores are opened: counts calls, bytes and seconds
    memstore.metrics.trace_calls()                        # a span for each call; the extra `otel`

    log = memstore.metrics.ScalarLogger(store, writer)    # a SummaryWriter, a run of W&B, or a function
    log(step)                                             # in the training loop

text          one look at a store: its catalog, its folder, /proc, its hosts, the steps of checkpoints; its text for
              Prometheus
calls         counters and spans of this process's calls; figures by name, for TensorBoard and W&B

What isn't asked for costs nothing: a look reads what is there anyway, and calls are counted or traced only after
`count_calls` or `trace_calls`. Imports no torch.
"""

from __future__ import annotations

from memstore.metrics.calls import CallCount, ScalarLogger, calls, count_calls, scalars, stop_calls, trace_calls
from memstore.metrics.text import prometheus

__all__ = ["CallCount", "ScalarLogger", "calls", "count_calls", "prometheus", "scalars", "stop_calls", "trace_calls"]
