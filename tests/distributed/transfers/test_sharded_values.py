"""A value in segments of several hosts: what lies here is mapped, and of the rest the boxes come that are needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch

import memstore
from memstore import TensorShard, contents
from memstore.distributed.rules import Member
from memstore.distributed.transfers import Transfers
from memstore.engine import MappedEntry, PinOptions, Record, encode_extents, need_cluster
from memstore.errors import HomeUnavailableError
from memstore.rows import read_rows
from memstore.view import view
from tests.damage import sharded_stores
from tests.distributed.transfers.wires import PlainLinks, Serving, sent_bytes, serving
from tests.inside import root_of
from tests.support.equality import is_same


class Hosts:
    """Three: each has put the part of its rank, of one value, and the first one reads it.

    Attributes:
        sent: bytes that went out, one number for each time.
        record: of the value.
    """

    def __init__(self, root: str, stack: ExitStack) -> None:
        self.sent: list[int] = []
        self.stores = [
            stack.enter_context(memstore.open(root if not rank else f"{root}{rank}", timeout=10.0, checksum=True))
            for rank in range(3)
        ]
        self.serving: list[Serving] = [stack.enter_context(serving(store)) for store in self.stores]
        roots = [root_of(store) for store in self.stores]
        records: list[Record] = []
        for store, root_there in zip(self.stores, roots, strict=True):
            sharded_stores.put(store, "key")  # all stores alike, so that a part of each is one of the value
            found = root_there.catalog.read(b"key")
            assert found is not None
            records.append(found)
        extents = [record.segments[rank] for rank, record in enumerate(records)]
        self.hosts = tuple(root_there.member_id() for root_there in roots)
        self.record = msgspec.structs.replace(records[0], parts=encode_extents(extents), hosts=self.hosts)
        self.root = roots[0]
        need_cluster(self.root, time.monotonic() + 20)
        self.transfers = Transfers(self.root, PlainLinks(), self.find)
        stack.callback(self.forget)

    def find(self, member: bytes) -> Member:
        return self.serving[self.hosts.index(member)].member

    def forget(self) -> None:
        self.transfers.close()
        del self.root, self.transfers, self.stores, self.serving

    def hold(self, *, lazily: bool = True) -> MappedEntry:
        held = self.transfers.hold(b"key", self.record, time.monotonic() + 20, lazily=lazily)
        assert held is not None
        return held

    def read(self, *, lazily: bool = True, verify: bool = False, **options: Any) -> Any:
        wanted = contents.ReadOptions(**options)
        return contents.read(self.root, "key", self.hold(lazily=lazily), wanted, verify=verify, allow_pickle=False)

    def view(self, *, verify: bool = False) -> Any:
        return view(self.root, "key", self.hold(), PinOptions("r+", 20.0, verify, False))


@pytest.fixture
def hosts(root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with ExitStack() as stack:
        made = Hosts(root, stack)
        made.sent = sent_bytes(monkeypatch)
        yield made


@pytest.mark.parametrize("lazily", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_a_whole_value_is_put_together(hosts: Hosts, lazily: bool, verify: bool) -> None:
    assert is_same(hosts.read(lazily=lazily, verify=verify), sharded_stores.whole())


@pytest.mark.parametrize("verify", [True, False])
def test_a_rank_gets_its_boxes_and_no_more(hosts: Hosts, verify: bool) -> None:
    whole = sharded_stores.whole()
    rows = TensorShard(torch.zeros(4, 50), (12, 50), (6, 0))  # the last two of rank 1, the first two of rank 2
    out = hosts.read(out={"rows": rows}, verify=verify)
    assert torch.equal(out["rows"].local, whole["rows"][6:10])
    expected = 2 * (4 if verify else 2) * 200
    assert expected <= sum(hosts.sent) <= expected + 2 * 64
    hosts.sent.clear()
    own = TensorShard(torch.zeros(4, 50), (12, 50), (0, 0))
    assert torch.equal(hosts.read(like={"rows": own})["rows"].local, whole["rows"][:4])
    assert hosts.sent == []


def test_a_view_moves_what_is_read(hosts: Hosts) -> None:
    whole = sharded_stores.whole()
    found = hosts.view()
    assert hosts.sent == []
    assert torch.equal(found["rows"][5].clone(), whole["rows"][5])
    assert 200 <= sum(hosts.sent) <= 264
    assert torch.equal(found["columns"][7:9].clone(), whole["columns"][7:9])
    assert is_same({name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in found.items()}, whole)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "index", [[1, 7, -1], torch.tensor([[5, 6], [0, 11]]), (slice(2, 9), [3, 4]), ([0, 9], [1, 49])]
)
def test_points_of_boxes_are_read(hosts: Hosts, index: Any, verify: bool) -> None:
    assert torch.equal(hosts.view(verify=verify)["rows"][index], sharded_stores.whole()["rows"][index])


def test_rows_of_boxes_move_alone(hosts: Hosts) -> None:
    rows = torch.tensor([0, 5, 6])
    made = read_rows({"rows": hosts.view()["rows"]}, rows)
    assert torch.equal(made["rows"], sharded_stores.whole()["rows"][rows])
    assert sum(hosts.sent) <= 2 * 200 + 2 * 64


def test_a_host_that_is_away_is_named(hosts: Hosts) -> None:
    hosts.serving[2].close_listener()
    with pytest.raises(HomeUnavailableError, match=hosts.serving[2].member.address):
        hosts.transfers.hold(b"key", hosts.record, time.monotonic() + 0.7)
    own = TensorShard(torch.zeros(4, 50), (12, 50), (0, 0))
    assert torch.equal(hosts.read(like={"rows": own})["rows"].local, sharded_stores.whole()["rows"][:4])
