"""256 MiB of float32 put as bfloat16, again and again under one key: a cast, and the little that makes it atomic."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tests.benchmarks.peers import Peer, Value, same
from tests.benchmarks.peers.safetensors_file import SafetensorsFile
from tests.benchmarks.peers.store import Store
from tests.benchmarks.report import Role, Workload
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import KEPT, LARGE_ROUNDS, MIB, at_most, compare_puts, keep

DTYPE = torch.bfloat16


class Casting(Store):
    """As the documentation says: the put casts."""

    settings: ClassVar[str] = "put(..., dtype=torch.bfloat16)"

    def put(self, key: str, value: Any) -> None:
        self.store.put(key, value, dtype=DTYPE)


class CastBefore(Store):
    """Without that: the tensor is made anew, and then put."""

    id: ClassVar[str] = "memstore-to"
    name: ClassVar[str] = "memstore, put of to(bfloat16)"

    def put(self, key: str, value: Any) -> None:
        self.store.put(key, value.to(DTYPE))


class SafetensorsCast(SafetensorsFile):
    settings: ClassVar[str] = "save_file of to(torch.bfloat16)"

    def put(self, key: str, value: Any) -> None:
        super().put(key, {name: tensor.to(DTYPE) for name, tensor in value.items()})


class Cast(Peer):
    """torch's cast into memory that is mapped and warm. Only a put: a get of it would be nothing at all."""

    id: ClassVar[str] = "cast"
    name: ClassVar[str] = "copy_ into bfloat16"
    role: ClassVar[Role] = "limit"

    def ready(self, value: Value) -> torch.Tensor:
        assert isinstance(value, torch.Tensor)
        if getattr(self, "_target", torch.empty(0)).shape != value.shape:
            self._target = torch.ones(value.shape, dtype=DTYPE)
        return value

    def put(self, key: str, value: Any) -> None:
        self._target.copy_(value)

    def get(self, key: str) -> Any:
        raise NotImplementedError("a cast stores nothing")


PEERS = (Casting, CastBefore, SafetensorsCast, Cast)


def measure(session: Session) -> Workload:
    value = torch.randn((64 if session.quick else 256) * MIB // 4)
    size = f"{value.nbytes // MIB} MiB"
    with session.started(PEERS) as (peers, absent):
        _check(peers, value)
        series = compare_puts(
            session,
            peers,
            value,
            fresh=False,
            title=f"overwrite of {size} of float32 as bfloat16",
            rounds=min(session.rounds, LARGE_ROUNDS),
        )
        _check(peers, value)
    return Workload(
        id="cast",
        title=f"Overwrites of {size} of float32 as bfloat16",
        text=f"One float32 tensor of {size}, put again and again under one key with dtype=torch.bfloat16. memstore "
        "casts into the file of a version that nobody holds any more; the limit casts into warm memory. Without dtype= "
        "the tensor is made anew before each put.",
        series=[series],
        goals=[at_most(f"put of {size} with dtype=bfloat16", series, 1.15, Cast.name)],
        absent=absent,
    )


def _check(peers: list[Peer], value: torch.Tensor) -> None:
    """What each has is what torch's own cast makes, or the run ends here."""
    expected = value.to(DTYPE)
    for peer in peers:
        if not isinstance(peer, Cast):
            keep(peer, KEPT, value)
            if not same(peer.get(KEPT), expected):
                raise SystemExit(f"{peer.name}: what was got is not what was put, cast to {DTYPE}")
