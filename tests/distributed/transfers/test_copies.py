"""A value of another host is copied to this one once, and read there by all of its processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memstore.distributed.links.handshake import check_member
from memstore.distributed.transfers import copies
from memstore.distributed.transfers.copies import one_fetcher
from memstore.engine import hold
from memstore.errors import CorruptionError, HomeUnavailableError, LinkRefusedError
from tests.children import Child, Wire
from tests.distributed.transfers.hosts import Hosts, two_hosts
from tests.distributed.transfers.wires import PlainLinks, sent_bytes
from tests.inside import root_of


@pytest.fixture
def hosts(root: str) -> Iterator[Hosts]:
    with two_hosts(root) as made:
        yield made


VALUE: dict[str, Any] = {"a": torch.arange(5000), "b": [torch.ones(3, 4), "text"], "c": torch.zeros(0)}


def test_a_copy_is_read_as_the_value_itself(hosts: Hosts) -> None:
    hosts.there.put("key", VALUE)
    found = hosts.get("key", verify=True)
    assert torch.equal(found["a"], VALUE["a"]) and found["b"][1] == "text"
    assert hosts.copies() == ["key"]
    held = hosts.hold("key")
    assert held is not None and held.record.hosts is None
    assert held.record.version == hosts.record("key").version


def test_a_key_that_is_copied_needs_nobody(hosts: Hosts) -> None:
    hosts.there.put("key", VALUE)
    hosts.get("key")
    streams = hosts.served.streams
    hosts.served.senders.close()
    assert torch.equal(hosts.get("key")["a"], VALUE["a"])
    assert hosts.served.streams == streams


def test_large_objects_come_along(hosts: Hosts) -> None:
    value: dict[str, Any] = {"t": torch.arange(2000), "words": ["word" * 10 + str(i) for i in range(1000)]}
    hosts.there.put("key", value)
    assert hosts.record("key").objects_checksum is not None
    found = hosts.get("key", verify=True)
    assert found["words"] == value["words"] and torch.equal(found["t"], value["t"])


@pytest.mark.parametrize("size", [1 << 12, 1 << 20, 9 << 20])
def test_sizes_with_the_header_and_apart(hosts: Hosts, size: int) -> None:
    hosts.there.put("key", torch.arange(size // 8))
    assert torch.equal(hosts.get("key", verify=True), torch.arange(size // 8))
    assert hosts.copies() == ["key"]


def test_a_newer_version_takes_the_place_of_a_copy(hosts: Hosts) -> None:
    hosts.there.put("key", torch.zeros(5000))
    old = hosts.get("key")
    hosts.there.put("key", torch.ones(5000))
    assert hosts.get("key").sum() == 5000
    assert hosts.copies() == ["key"] and old.sum() == 0
    live = hosts.here.stats().live_bytes
    assert live < 2 * 5000 * 4, "the older copy is retired"


def test_a_version_that_is_gone_is_said_to_be(hosts: Hosts) -> None:
    hosts.there.put("key", torch.zeros(5000))
    record = hosts.record("key")
    hosts.there.delete("key")
    hosts.there.gc()
    assert hosts.transfers.hold(b"key", record, time.monotonic() + 20) is None
    assert hosts.transfers.hold(b"key", record, time.monotonic() + 20, lazily=True) is None
    assert hosts.copies() == [] and hosts.here.stats().filling_bytes == 0


def test_eight_readers_cost_one_transfer(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = sent_bytes(monkeypatch)
    size = 8 << 20
    hosts.there.put("key", torch.arange(size // 8))

    def read(wire: Wire) -> int:
        wire.receive()
        return int(hosts.get("key").sum())

    children = [Child(read) for _ in range(8)]
    for child in children:
        child.send()
    assert {child.receive() for child in children} == {sum(range(size // 8))}
    for child in children:
        child.kill()
    assert size < sum(sent) < size + 20_000


def test_threads_of_one_process_cost_one_transfer(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(1 << 18))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(hosts.get("key"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(torch.equal(one, found[0]) for one in found)
    assert hosts.served.streams == 2, "one for the header, and one for the data"


def test_a_fetcher_that_is_killed_wedges_nobody(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(1 << 18))
    record = hosts.record("key")

    def fetch_and_stop(wire: Wire) -> None:
        def stop(*_: Any) -> bool:
            wire.send("has its turn")
            time.sleep(600)
            return False

        copies.read_ranges = stop
        hosts.transfers.hold(b"key", record, time.monotonic() + 600)

    with Child(fetch_and_stop) as child:
        child.receive()
        waiting: list[Any] = []
        thread = threading.Thread(target=lambda: waiting.append(hosts.get("key")))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive(), "it is the other's turn"
        child.kill()
        thread.join()
    assert torch.equal(waiting[0], torch.arange(1 << 18))
    assert hosts.copies() == ["key"]


def test_a_process_that_is_killed_in_a_transfer_leaves_what_a_sweep_takes(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(1 << 20))
    record = hosts.record("key")
    hosts.get("key")  # so that the file is there, and used again
    hosts.here.gc()

    def fetch_and_stop(wire: Wire) -> None:
        read_ranges = copies.read_ranges
        calls: list[Any] = []

        def stop(*arguments: Any) -> bool:
            calls.append(arguments)
            if len(calls) == 2:
                wire.send("filling")
                time.sleep(600)
            return read_ranges(*arguments)

        copies.read_ranges = stop
        hosts.transfers.hold(b"key", record, time.monotonic() + 600)

    if hosts.copies():
        copies.drop_copy(root_of(hosts.here), b"key", copies.places_of(record), time.monotonic() + 20)
    with Child(fetch_and_stop) as child:
        child.receive()
        child.kill()
    hosts.here.gc()
    assert hosts.here.stats().filling_bytes == 0
    assert torch.equal(hosts.get("key"), torch.arange(1 << 20))


def test_a_full_store_reads_into_memory(root: str) -> None:
    with two_hosts(root, 6 << 20) as hosts:
        hosts.here.put("mine", torch.zeros(5 << 20, dtype=torch.uint8))
        hosts.there.put("key", torch.arange(1 << 18))
        held = hosts.hold("key")
        assert held is not None and held.record.hosts is not None
        assert torch.equal(hosts.value("key", held), torch.arange(1 << 18))
        assert hosts.copies() == [] and hosts.here.get("mine").sum() == 0


def test_copies_that_nobody_uses_are_dropped_beyond_half_of_the_capacity(root: str) -> None:
    with two_hosts(root, 8 << 20) as hosts:
        for name in "abc":
            hosts.there.put(name, torch.zeros(1 << 20, dtype=torch.uint8))
            held = hosts.hold(name)
            assert held is not None
            path = f"{hosts.here.root}/segments/{held.record.segment:016x}.safetensors"
            os.utime(path, (0, {"a": 200, "b": 100, "c": 300}[name]))
        assert hosts.copies() == ["a", "b", "c"]
        hosts.there.put("d", torch.zeros(1 << 20, dtype=torch.uint8))
        assert hosts.hold("d") is not None
        assert hosts.copies() == ["a", "c", "d"], "b was not used for longest"


def test_a_use_is_noted_now_and_then(hosts: Hosts) -> None:
    hosts.there.put("key", torch.zeros(5000))
    held = hosts.hold("key")
    assert held is not None
    path = f"{hosts.here.root}/segments/{held.record.segment:016x}.safetensors"
    os.utime(path, (0, 100))
    hosts.hold("key")
    noted = os.stat(path).st_mtime_ns
    assert noted > 100e9
    hosts.hold("key")
    assert os.stat(path).st_mtime_ns == noted


def test_a_reader_that_may_not_write_reads_into_memory(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(5000))
    held = hosts.transfers.hold(b"key", hosts.record("key"), time.monotonic() + 20, may_lock=False)
    assert held is not None
    assert torch.equal(hosts.value("key", held), torch.arange(5000))
    assert hosts.copies() == []


def test_a_copy_is_verified_as_any_value(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(5000))
    held = hosts.hold("key")
    assert held is not None and held.mapping is not None
    path = f"{hosts.here.root}/segments/{held.record.segment:016x}.safetensors"
    with open(path, "r+b") as file:
        file.seek(held.record.start + 100)
        file.write(b"\xff\xff")
    with pytest.raises(CorruptionError, match="checksum"):
        hosts.value("key", held, verify=True)


def test_a_header_that_says_otherwise_is_refused(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(5000))
    hosts.there.put("other", torch.arange(5001))
    record = hosts.record("other")
    with pytest.raises(CorruptionError, match="differ"):
        hosts.transfers.hold(b"key", record, time.monotonic() + 20)
    assert hosts.copies() == [] and hosts.here.stats().filling_bytes == 0


def test_a_host_that_is_away_is_an_error_within_the_timeout(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(5000))
    record = hosts.record("key")
    hosts.served.senders.close()
    with pytest.raises(HomeUnavailableError, match="^'key': .* at ") as caught:
        hosts.transfers.hold(b"key", record, time.monotonic() + 0.7)
    assert caught.value.key == "key"
    assert hosts.here.stats().filling_bytes == 0


def test_bytes_of_a_host_that_another_root_has_replaced_are_gone(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks has not heard yet that it was removed, and looks the key up again; another secret stays an error."""

    def refused(_: object, address: str, member: bytes, deadline: float) -> None:
        check_member(address, b"x" * 16, member)

    def forbidden(*_: object) -> None:
        raise LinkRefusedError("another secret")

    hosts.there.put("key", VALUE)
    monkeypatch.setattr(PlainLinks, "stream", refused)
    assert hosts.hold("key") is None
    monkeypatch.setattr(PlainLinks, "stream", forbidden)
    with pytest.raises(LinkRefusedError, match="another secret"):
        hosts.hold("key")


def test_a_store_without_copies_is_read_as_ever(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(5000))
    hosts.get("key")
    hosts.here.put("key", torch.ones(10))
    (held,) = hold(root_of(hosts.here), [b"key"], time.monotonic() + 20, may_lock=True)
    assert held is not None and hosts.here.get("key").sum() == 10
    assert hosts.here.verify().ok


def test_a_forked_child_keeps_no_turn_of_its_parent(hosts: Hosts) -> None:
    root = root_of(hosts.here)

    def take_it(wire: Wire) -> None:
        is_taken, is_over = threading.Event(), threading.Event()

        def hold() -> None:
            with one_fetcher(root, b"name", "fetches", time.monotonic() + 20):
                is_taken.set()
                is_over.wait(60)

        threading.Thread(target=hold, daemon=True).start()
        is_taken.wait(20)
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        wire.send(child)
        wire.receive()

    with Child(take_it) as holder:
        child = holder.receive()
        try:
            holder.kill()
            with one_fetcher(root, b"name", "fetches", time.monotonic() + 20):
                pass
        finally:
            os.kill(child, signal.SIGKILL)
