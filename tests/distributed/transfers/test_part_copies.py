"""Parts of sharded values that lie on other hosts: each page comes once a host, for all of its processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import torch

import memstore
from memstore import TensorShard, contents
from memstore.distributed.catalog import look
from memstore.distributed.rules import Member
from memstore.distributed.transfers import Transfers, copies, sending
from memstore.engine import MappedEntry, PinOptions, Record, encode_extents, need_cluster
from memstore.errors import HomeUnavailableError, VersionGoneError
from memstore.rows import read_rows
from memstore.view import view
from tests.distributed.transfers.wires import PlainLinks, Serving, sent_bytes, serving
from tests.inside import root_of

ROWS, COLUMNS = 1024, 256  # of a part: 1 MiB
PART = ROWS * COLUMNS * 4
ALL = torch.arange(2 * ROWS * COLUMNS, dtype=torch.int32).view(2 * ROWS, COLUMNS)


class Readers:
    """Two processes of one host, as two `Transfers` of one root; another host has both parts of a value.

    Attributes:
        sent: bytes that went out, one number for each time.
    """

    def __init__(self, root: str, stack: ExitStack, capacity: int | None = None) -> None:
        self.sent: list[int] = []
        self.there = stack.enter_context(memstore.open(f"{root}-there", checksum=True))
        self.here = stack.enter_context(memstore.open(root, timeout=10.0, capacity=capacity))
        self.served: Serving = stack.enter_context(serving(self.there))
        self.root, self.host = root_of(self.here), root_of(self.there).member_id()
        need_cluster(self.root, time.monotonic() + 20)
        self.transfers = [Transfers(self.root, PlainLinks(), self.find) for _ in range(2)]
        stack.callback(self.forget)
        self.put(0)

    def put(self, add: int) -> None:
        for rank in range(2):
            rows = (ALL[rank * ROWS : (rank + 1) * ROWS] + add).contiguous()
            shard = TensorShard(rows, ALL.shape, (rank * ROWS, 0))
            self.there.put_sharded("key", {"w": shard}, attempt=str(add), rank=rank, world_size=2, wait=rank == 1)
        found = root_of(self.there).catalog.read(b"key")
        assert found is not None
        hosts = (self.host,) * 2
        self.record: Record = msgspec.structs.replace(found, parts=encode_extents(found.segments), hosts=hosts)

    def find(self, member: bytes) -> Member | None:
        return self.served.member if member == self.host else None

    def forget(self) -> None:
        for transfers in self.transfers:
            transfers.close()
        del self.root, self.transfers, self.there, self.here, self.served

    def hold(self, process: int, *, lazily: bool = True, seconds: float = 20) -> MappedEntry:
        held = self.transfers[process].hold(b"key", self.record, time.monotonic() + seconds, lazily=lazily)
        assert held is not None
        return held

    def get(self, process: int, *, lazily: bool = False, **options: Any) -> torch.Tensor:
        held = self.hold(process, lazily=lazily)
        wanted = contents.ReadOptions(**options)
        found: Any = contents.read(self.root, "key", held, wanted, verify=True, allow_pickle=False)
        return found["w"]

    def view(self, process: int, *, seconds: float = 20) -> Any:
        return view(self.root, "key", self.hold(process, seconds=seconds), PinOptions("r+", 20.0, False, False))["w"]

    def count(self) -> int:
        """Bytes since the last time."""
        total = sum(self.sent)
        self.sent.clear()
        return total

    def rows(self) -> dict[bytes, copies.Copy]:
        return dict(look(self.root, lambda tables: tables.copies(b"", 100), time.monotonic() + 20))


@pytest.fixture
def readers(root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Readers]:
    with ExitStack() as stack:
        made = Readers(root, stack)
        made.sent = sent_bytes(monkeypatch)
        yield made


def test_the_second_process_fetches_nothing(readers: Readers) -> None:
    assert torch.equal(readers.get(0), ALL)
    assert 2 * PART <= readers.count() < 2.02 * PART
    assert torch.equal(readers.get(1), ALL) and torch.equal(readers.view(1).clone(), ALL)
    rows = torch.tensor([3, 900, 1500])
    assert torch.equal(read_rows({"w": readers.view(1)}, rows)["w"], ALL[rows]), "short rows are taken of what is here"
    assert readers.count() == 0


def test_boxes_that_overlap_come_once_and_nothing_else_comes(readers: Readers) -> None:
    """The second one lacks a quarter of what it wants."""
    for process, (first, last) in enumerate([(512, 1536), (768, 1792)]):
        like = {"w": TensorShard(torch.zeros(last - first, COLUMNS, dtype=torch.int32), ALL.shape, (first, 0))}
        held = readers.hold(process)
        options = contents.ReadOptions(like=like)
        found: Any = contents.read(readers.root, "key", held, options, verify=False, allow_pickle=False)
        assert torch.equal(found["w"].local, ALL[first:last])
        expected = (1024, 256)[process] * COLUMNS * 4
        assert expected <= readers.count() < 1.05 * expected


def test_two_at_once_fetch_each_page_once(readers: Readers) -> None:
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda one=one: found.append(readers.get(one))) for one in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and all(torch.equal(one, ALL) for one in found)
    assert readers.count() < 2.02 * PART


def test_what_one_process_writes_into_its_value_nobody_else_sees(readers: Readers) -> None:
    mine = readers.get(0)
    mine.fill_(-1)
    assert torch.equal(readers.get(1), ALL)


def test_pages_that_did_not_come_whole_come_again(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host says behind the bytes that they were another put's: no page is marked."""
    with monkeypatch.context() as patched:
        patched.setattr(sending, "end_of_answer", lambda root, found, named: sending.TORN)
        assert readers.transfers[0].hold(b"key", readers.record, time.monotonic() + 20) is None
    assert readers.count() > PART
    assert torch.equal(readers.get(1), ALL)


def test_a_host_that_is_away_is_named_and_what_is_here_can_be_read(readers: Readers) -> None:
    found = readers.view(0, seconds=0.5)
    assert torch.equal(found[:ROWS].clone(), ALL[:ROWS])
    readers.served.close_listener()
    assert torch.equal(found[:ROWS].clone(), ALL[:ROWS])
    with pytest.raises(HomeUnavailableError, match=readers.served.member.address):
        found[ROWS:].clone()


def test_a_process_that_is_killed_as_it_fetches_leaves_its_pages_to_the_next(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.fork()
    if not pid:
        try:
            monkeypatch.setattr(copies._Part, "mark", lambda part, pages: os._exit(9))
            readers.get(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert len(readers.rows()) == 2, "both copies are there, and no page of them"
    assert torch.equal(readers.get(1), ALL)


def test_a_new_version_takes_the_place_of_the_copies(readers: Readers) -> None:
    old = readers.view(0)
    assert torch.equal(readers.get(0), ALL)
    before = readers.rows()
    readers.put(5)
    assert torch.equal(readers.get(1), ALL + 5)
    after = readers.rows()
    assert before.keys() == after.keys() and len(after) == 2
    assert all(before[key].places != after[key].places for key in after)
    assert torch.equal(old.clone(), ALL), "who holds the old one goes on to read it"


def test_a_version_that_is_gone_says_so(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    found = readers.view(0)
    monkeypatch.setattr(sending, "map_segments", lambda root, named: None)
    with pytest.raises(VersionGoneError):
        found.clone()


def test_a_store_without_room_reads_into_its_own_memory(root: str) -> None:
    with ExitStack() as stack:
        small = Readers(f"{root}-small", stack, capacity=1 << 20)
        assert torch.equal(small.get(0), ALL) and small.rows() == {}


def test_a_reader_that_may_not_change_its_store_copies_nothing(readers: Readers) -> None:
    held = readers.transfers[0].hold(b"key", readers.record, time.monotonic() + 20, may_lock=False)
    assert held is not None and readers.rows() == {}


def test_few_bytes_of_a_part_that_is_large_for_the_store_make_no_copy(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_CHEAP_SHARE", 1 << 40)
    found = readers.view(0)
    assert torch.equal(found[10:20].clone(), ALL[10:20]) and readers.rows() == {}
    assert torch.equal(readers.get(1), ALL) and len(readers.rows()) == 2
    readers.count()
    assert torch.equal(found[10:20].clone(), ALL[10:20]) and readers.count() == 0, "they are its own"


def test_verify_and_repair_leave_copies_alone(readers: Readers) -> None:
    assert torch.equal(readers.get(0), ALL)
    readers.here.verify()
    readers.here.gc()
    assert torch.equal(readers.get(1), ALL)
