"""Modules without memory: what recording takes, beside construction; and weights that are mapped out of a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import memstore
from memstore.deferred_init import deferred_init, materialize_module
from tests.benchmarks.measure import Contestant, spread, take_turns
from tests.benchmarks.processes import in_new_process
from tests.benchmarks.report import Figure, Goal, Series, Workload, exactly
from tests.benchmarks.session import Session

MIB = 1 << 20
LAYERS, RANKS = 24, 4
OPENINGS = 20  # the goal: as many openings of a file of the same size


def measure(session: Session) -> Workload:
    width, nbytes = (256, 64 * MIB) if session.quick else (512, 1024 * MIB)
    recording = _recording(session, width)
    path, rows = str(session.root / "deferred"), nbytes // 64 // 4096
    memstore.Snapshot.take(path, {"model": _model(rows)}, durability="process")
    mapping = _mapping(session, path, rows)
    grown, shard = in_new_process(_shard, path, rows)
    ratio = recording.figures[1].ratio
    assert ratio is not None, "to the first figure"
    opening = mapping.figures[0].value.median
    return Workload(
        id="deferred",
        title="Deferred initialisation",
        text=f"An encoder of {LAYERS} layers of width {width}: constructed, and recorded. A module of 64 layers, "
        f"{nbytes // MIB} MiB, mapped out of a snapshot, beside an opening of its file; and as one of {RANKS} ranks, "
        "which copies its shards.",
        series=[recording, mapping],
        goals=[
            Goal("recording an encoder, beside constructing it", ratio, "<=", 1.0, "x"),
            Goal(f"{nbytes // MIB} MiB out of a snapshot", mapping.figures[1].value, "<=", OPENINGS * opening, "s"),
            Goal("memory of a sharded construction", exactly(grown), "<=", shard + 200 * MIB, "B"),
        ],
        notes=[
            f"A shard is {shard / MIB:.0f} MiB. The goal for a snapshot is {OPENINGS} times what safetensors' load_file"
            " takes for its file, which it maps."
        ],
    )


def _recording(session: Session, width: int) -> Series:
    def encoder() -> torch.nn.Module:
        layers = (torch.nn.TransformerEncoderLayer(width, 8, 4 * width) for _ in range(LAYERS))
        return torch.nn.ModuleList(layers)

    contestants = [
        Contestant("construction", "limit", encoder),
        Contestant("deferred_init", "memstore", lambda: deferred_init(encoder)),
    ]
    samples = take_turns(contestants, rounds=3 if session.quick else 9)
    return _series("recording", f"an encoder of {LAYERS} layers", contestants, samples)


def _mapping(session: Session, path: str, rows: int) -> Series:
    from safetensors.torch import load_file

    file = max(Path(path).glob("*.safetensors"), key=lambda one: one.stat().st_size)
    waiting: list[Any] = []

    def map_next() -> object:
        return materialize_module(waiting.pop(), source=path)

    contestants = [
        Contestant("safetensors opens the file", "peer", lambda: load_file(file), note="without a module"),
        Contestant("materialize_module, source=", "memstore", map_next, before=lambda: waiting.append(_deferred(rows))),
    ]
    samples = take_turns(contestants, rounds=session.rounds)
    return _series("mapping", "a module out of a snapshot", contestants, samples)


def _series(id: str, title: str, contestants: list[Contestant], samples: list[Any]) -> Series:
    figures = [
        Figure(
            one.name,
            one.role,
            spread(sample.all()),
            len(sample.all()),
            ratio=sample.ratio_to(samples[0]),
            note=one.note,
        )
        for one, sample in zip(contestants, samples, strict=True)
    ]
    return Series(id, f"{title}, time", "s", figures, reference=contestants[0].name)


def _model(rows: int) -> torch.nn.Module:
    return torch.nn.ModuleList(torch.nn.Linear(1024, rows, bias=False) for _ in range(64))


def _deferred(rows: int) -> torch.nn.Module:
    return deferred_init(_model, rows)


def _shard(path: str, rows: int) -> tuple[int, int]:
    """Bytes of its own memory that a rank takes at the peak of a sharded construction, and bytes of its shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from tests.sharding.fake_world import as_rank

    with as_rank(0, RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        model = _deferred(rows)
        seen = [_anonymous()]

        def rows_of(name: str, tensor: torch.Tensor) -> Any:
            seen.append(_anonymous())
            return [Shard(0)]

        materialize_module(model, source=path, mesh=mesh, placements=rows_of)
        parameters: list[Any] = list(model.parameters())
        return max(*seen, _anonymous()) - seen[0], sum(one.to_local().nbytes for one in parameters)


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
