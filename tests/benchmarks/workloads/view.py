"""Views of 300 leaves: what it costs to get one, and to slice all its leaves, when nothing is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

import memstore
from tests.benchmarks.measure import Contestant, Samples, spread, take_turns
from tests.benchmarks.peers import Peer, Value
from tests.benchmarks.peers.limits import PlainFile
from tests.benchmarks.peers.memmap import Memmap
from tests.benchmarks.peers.safetensors_file import SafetensorsFile
from tests.benchmarks.peers.store import Store, StoreOfTensorDicts
from tests.benchmarks.report import Figure, Goal, Role, Series, Spread, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import KEPT, check, compare_gets, within

LEAVES, ROWS = 300, 64
SLICE = slice(3, 7)


class StoreView(Store):
    id: ClassVar[str] = "memstore-view"
    name: ClassVar[str] = "memstore, view"

    def get(self, key: str) -> Any:
        return self.store.view(key)


class StoreViewOfTensorDict(StoreView, StoreOfTensorDicts):
    id: ClassVar[str] = "memstore-view-td"
    name: ClassVar[str] = "memstore, view of a TensorDict"


class SafetensorsOpen(SafetensorsFile):
    """Its lazy slices. `check` reads them."""

    id: ClassVar[str] = "safetensors-open"
    name: ClassVar[str] = "safetensors, safe_open and get_slice"
    settings: ClassVar[str] = "a get_slice for each tensor"

    def get(self, key: str) -> Any:
        from safetensors import safe_open

        with safe_open(self.root / key, "pt") as file:
            return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no dict


def measure(session: Session) -> Workload:
    value: Value = {f"layers.{i}.weight": torch.randn(ROWS, ROWS) for i in range(LEAVES)}
    kinds = (Store, StoreView, StoreViewOfTensorDict, Memmap, SafetensorsOpen, PlainFile)
    with session.started(kinds) as (peers, absent):
        readable = [peer for peer in peers if not isinstance(peer, SafetensorsOpen)]
        check(readable, value)
        view = compare_gets(session, peers, value, title=f"view of {LEAVES} leaves")
        sliced = _sliced(session, peers)
        check(readable, value)
    return Workload(
        id="view",
        title=f"A view of {LEAVES} leaves",
        text=f"{LEAVES} tensors of {ROWS}x{ROWS} float32 (4.7 MiB): a view of them, beside gets that map them; and a "
        f"slice of {SLICE.stop - SLICE.start} rows of each leaf, of a view that stays open. Nothing is read.",
        series=[view, sliced],
        goals=[
            *(
                within(f"view of {LEAVES} leaves, {what}", view, 1.5e-3, name=kind.name)
                for what, kind in (("dict", StoreView), ("TensorDict", StoreViewOfTensorDict))
            ),
            *(
                Goal(f"a slice, a leaf of {figure.name}", figure.value, "<=", 5e-6, "s")
                for figure in sliced.figures
                if figure.role == "memstore"
            ),
        ],
        absent=absent,
    )


def _sliced(session: Session, peers: list[Peer]) -> Series:
    contestants: list[Contestant] = []
    for peer in peers:
        if isinstance(peer, StoreView):
            view = peer.get(KEPT)
            if not isinstance(view, dict):
                view.batch_size = [ROWS]
            contestants.append(Contestant(f"a {type(view).__name__} of lazy leaves", "memstore", _slices(view)))
    loaded = {f"layers.{i}.weight": torch.randn(ROWS, ROWS) for i in range(LEAVES)}
    both: tuple[tuple[str, Role, Any], ...] = (
        ("a dict of tensors", "limit", loaded),
        ("a TensorDict of tensors", "limit", TensorDict(dict(loaded), batch_size=[ROWS])),
    )
    contestants += [Contestant(name, role, _slices(value)) for name, role, value in both]
    before = memstore.bytes_read()
    samples = take_turns(contestants, rounds=session.rounds)
    if memstore.bytes_read() != before:
        raise SystemExit(f"slices of a view read {memstore.bytes_read() - before} bytes")
    figures = [
        Figure(one.name, one.role, _of_a_leaf(sample), len(sample.all()), ratio=sample.ratio_to(samples[0]))
        for one, sample in zip(contestants, samples, strict=True)
    ]
    return Series("sliced", "a slice of each leaf, time a leaf", "s", figures, reference=contestants[0].name)


def _slices(value: Any) -> Callable[[], object]:
    if isinstance(value, dict):
        return lambda: [leaf[SLICE] for leaf in value.values()]
    return lambda: value[SLICE]


def _of_a_leaf(sample: Samples) -> Spread:
    return spread([seconds / LEAVES for seconds in sample.all()])
