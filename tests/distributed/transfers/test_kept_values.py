"""What is looked at lazily stays on its host, whatever is put there, until nobody looks at it any more."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memstore.distributed.transfers import sending
from memstore.distributed.transfers.messages import GONE, HEAD, LENGTH, PinSegments, Segment, encode
from memstore.distributed.transfers.receiving import Stream, ask_to_pin
from memstore.engine import PinOptions
from memstore.errors import HomeUnavailableError, VersionGoneError
from memstore.view import view
from tests.children import Child, Wire
from tests.distributed.client.hosts import await_
from tests.distributed.transfers.hosts import Hosts, two_hosts
from tests.distributed.transfers.wires import extent_of
from tests.inside import root_of
from tests.patience import give_back_until

ROWS = 5000


@pytest.fixture
def hosts(root: str) -> Iterator[Hosts]:
    with two_hosts(root) as made:
        yield made


def lazy(hosts: Hosts, key: str, seconds: float = 20.0) -> Any:
    held = hosts.transfers.hold(key.encode(), hosts.record(key), time.monotonic() + seconds, lazily=True)
    assert held is not None
    return view(root_of(hosts.here), key, held, PinOptions("r+", 20.0, False, False))


def files(hosts: Hosts) -> list[str]:
    return os.listdir(f"{hosts.there.root}/segments")


def replace_it(hosts: Hosts) -> None:
    """So often that its file would be taken for another put, or be removed."""
    for number in range(4):
        hosts.there.put("key", torch.full((ROWS,), number))
    hosts.there.delete("key")
    hosts.there.gc()


def drop_all(hosts: Hosts) -> None:
    give_back_until(hosts.there, lambda: not files(hosts))


def test_a_view_stays_readable_when_its_version_is_replaced(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(ROWS))
    found = lazy(hosts, "key")
    replace_it(hosts)
    assert found[:10].sum() == 45
    assert found.sum() == sum(range(ROWS))
    assert len(files(hosts)) == 1
    del found
    gc.collect()
    drop_all(hosts)


def test_two_views_of_a_version_keep_it_until_both_are_dropped(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(ROWS))
    first, second = lazy(hosts, "key"), lazy(hosts, "key")
    replace_it(hosts)
    del first
    gc.collect()
    replace_it(hosts)
    assert second.sum() == sum(range(ROWS))
    del second
    gc.collect()
    drop_all(hosts)


def test_what_was_replaced_while_the_connection_was_broken_is_said_to_be_gone(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(ROWS))
    found = lazy(hosts, "key")
    assert found[:10].sum() == 45
    hosts.served.end_streams()
    await_(lambda: not len(hosts.served.senders.pinned))
    hosts.there.delete("key")
    drop_all(hosts)
    with pytest.raises(VersionGoneError, match=r"'key'.*let go of it.*get it whole"):
        found.sum()
    assert found[:10].sum() == 45, "what has come stays"


def test_after_a_broken_connection_it_is_kept_again(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(ROWS))
    hosts.there.put("other", torch.arange(ROWS))
    found, other = lazy(hosts, "key"), lazy(hosts, "other")
    hosts.served.end_streams()
    await_(lambda: not len(hosts.served.senders.pinned))
    assert found[:10].sum() == 45  # who reads something finds it out
    replace_it(hosts)
    hosts.there.delete("other")
    hosts.there.gc()
    assert found.sum() == other.sum() == sum(range(ROWS))


def test_a_process_that_dies_lets_go(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(ROWS))

    def look(wire: Wire) -> None:
        found = lazy(hosts, "key")
        wire.send(int(found[3]))
        wire.receive()

    with Child(look) as child:
        assert child.receive() == 3
        hosts.there.delete("key")
        hosts.there.gc()
        assert len(files(hosts)) == 1
        child.kill()
        drop_all(hosts)


def test_a_forked_child_asks_for_itself(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(ROWS))
    found = [lazy(hosts, "key")]

    def look(wire: Wire) -> None:
        wire.send(int(found[0][3]))  # its own stream, from here on
        wire.receive()
        wire.send(int(found[0].sum()))

    with Child(look) as child:
        assert child.receive() == 3
        found.clear()
        gc.collect()
        replace_it(hosts)
        child.send()
        assert child.receive() == sum(range(ROWS))


def test_views_that_are_made_and_dropped_by_threads_leave_nothing(hosts: Hosts) -> None:
    keys = [f"key{number}" for number in range(4)]
    for key in keys:
        hosts.there.put(key, torch.arange(ROWS))
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            for number in range(25):
                found = lazy(hosts, keys[(first + number) % 4])
                if int(found[number]) != number:
                    wrong.append(found)
                del found
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    await_(lambda: not len(hosts.served.senders.pinned))


def test_a_host_that_keeps_no_more_is_looked_at_all_the_same(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.there.put("key", torch.arange(ROWS))
    hosts.there.put("other", torch.arange(ROWS))
    monkeypatch.setattr(sending, "MOST_PINNED_SEGMENTS", 1)
    first, second = lazy(hosts, "key"), lazy(hosts, "other")
    replace_it(hosts)
    assert first.sum() == second.sum() == sum(range(ROWS))
    second = lazy(hosts, "other")
    hosts.there.delete("other")
    give_back_until(hosts.there, lambda: len(files(hosts)) == 1)
    with pytest.raises(VersionGoneError):
        second.sum()


def test_a_host_that_is_away_is_named_at_the_deadline(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(ROWS))
    hosts.served.close_listener()
    started = time.monotonic()
    found = lazy(hosts, "key", seconds=0.7)
    with pytest.raises(HomeUnavailableError, match=f"^'key': .*{hosts.served.member.address}") as caught:
        found.sum()
    assert caught.value.key == "key"
    assert time.monotonic() - started < 10


def test_an_ordinary_stream_has_room_beside_those_that_keep(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(ROWS))
    extent = extent_of(hosts.there, "key")
    streams = [
        Stream(socket.create_connection(("127.0.0.1", hosts.served.port)), hosts.served.member) for _ in range(3)
    ]
    assert all(ask_to_pin(stream, [extent], time.monotonic() + 20) for stream in streams)
    assert len(hosts.served.senders.pinned) == 3
    for stream in streams:
        stream.close()
    await_(lambda: not len(hosts.served.senders.pinned))


def test_what_is_not_there_is_not_kept(hosts: Hosts) -> None:
    hosts.there.put("key", torch.arange(ROWS))
    extent = extent_of(hosts.there, "key")
    wanted = Segment(extent.segment, extent.put_id + 7, extent.size, extent.start)
    text = encode(PinSegments((wanted,)))
    with socket.create_connection(("127.0.0.1", hosts.served.port), timeout=20) as wire:
        wire.sendall(LENGTH.pack(len(text)) + text)
        assert HEAD.unpack(wire.recv(HEAD.size, socket.MSG_WAITALL)) == (GONE, 0)
    assert not len(hosts.served.senders.pinned)


def test_a_stream_for_which_there_is_no_thread_is_closed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        ours, theirs = socket.socketpair()
        hosts.served.senders.serve(theirs)
    assert not len(hosts.served.senders) and ours.recv(1) == b""
    ours.close()
