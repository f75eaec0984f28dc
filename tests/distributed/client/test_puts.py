"""Puts and deletes of keys whose home is elsewhere: what is changed where, and what an error leaves."""

from __future__ import annotations

import errno
import pickle
import threading
import time
from typing import Any

import msgspec
import pytest
import torch

import memstore
from memstore.distributed import catalog
from memstore.distributed.catalog import CatalogTables
from memstore.distributed.client import elsewhere
from memstore.distributed.links import CLIENT, Links, hello_of_this_process
from memstore.distributed.rules import Client, Pause
from memstore.distributed.rules import client as rules_client
from memstore.distributed.rules.messages import Commit, Committed, Failed, Lookup, Open, Request, Resolve
from memstore.distributed.rules.roster import leave
from memstore.engine import Participant, deadline_after
from memstore.engine.catalog.tables import Transaction
from memstore.errors import CrossHostError
from tests.children import in_child
from tests.distributed.client.hosts import Cluster, await_, cluster_of, hand_over
from tests.distributed.homes import Home, claim
from tests.inside import root_of

BIG = 5000  # floats: more than a record has room for


def big(number: float) -> torch.Tensor:
    return torch.full((BIG,), float(number))


def wrong_versions() -> list[tuple[Any, type[Exception]]]:
    return [(-1, ValueError), (2**63, ValueError), (2**70, ValueError), (1.5, TypeError), (True, TypeError)]


def no_numbers() -> list[Any]:
    return [1.5, "1", None]


def segments(store: memstore.Store) -> dict[int, int]:
    """Of a host: its live and filling segments, with their states; without the file that is kept for the next put."""
    root = root_of(store)
    rows = root.catalog.view(lambda transaction: dict(transaction.segments()))
    kept = root.next_put.file.segment if root.next_put.file is not None else 0
    return {segment: row.state for segment, row in rows.items() if row.state in (1, 2) and segment != kept}


def lent(home: Home) -> int:
    return len(home.look(lambda tables: tables.all_lent(0, 100)))


def test_the_record_is_at_the_home_and_the_bytes_are_where_they_were_put(pair: Cluster) -> None:
    here, there = pair.stores
    version = here.put("k", big(1))
    assert here.version("k") == there.version("k") == version
    assert (len(segments(here)), len(segments(there)), lent(pair.homes[0])) == (1, 0, 1)
    assert torch.equal(here.get("k"), big(1))
    assert root_of(here).catalog.read(b"k") is None


def test_a_put_is_one_message(pair: Cluster) -> None:
    here, home = pair.stores[0], pair.homes[1]
    here.put("k", 1)
    home.asked.clear()
    here.put("k", 2)
    here.put("k", big(3), expect_version=here.version("k"))
    assert [type(one) for one in home.asked if not isinstance(one, Lookup)] == [Commit, Commit]


def test_of_a_value_without_a_segment_this_host_keeps_a_small_one_in_one_transaction(scratch: str) -> None:
    for number in range(2):
        memstore.open(f"{scratch}-{number}", inline_limit=1 << 16).close()
    with cluster_of(scratch, False, True) as homes:
        here = homes.stores[0]
        root = root_of(here)

        def moment() -> int:
            return root.catalog.view(lambda transaction: transaction.moment)

        def kept() -> list[bytes]:
            return [key for key, _ in catalog.look(root, lambda tables: tables.all_backups(b"", 9), deadline_after(9))]

        here.put("large", torch.zeros(5_000))
        here.put("k", 1)
        began = moment()
        here.put("k", 2)
        assert (moment(), kept()) == (began + 1, [b"k"])
        here.put("large", torch.ones(5_000))
        assert moment() == began + 1
        here.delete("k")
        assert kept() == []


def test_who_lends_a_segment_claims_a_file_for_the_next_put(pair: Cluster) -> None:
    here = pair.stores[0]
    root = root_of(here)

    def retired() -> int:
        return root.catalog.view(Transaction.counters).retired

    for number in range(4):
        here.put("ab"[number % 2], big(number))
    await_(lambda: retired() >= 2 * 4 * BIG)  # the home has told what was replaced
    here.put("a", big(4))
    kept = root.next_put.file
    assert kept is not None
    here.put("b", big(5))
    entry = pair.homes[1].look(lambda tables: tables.record(b"b"))
    assert entry is not None
    assert [(place.segment, place.put_id) for place in entry.places] == [(kept.segment, kept.put_id)]
    assert torch.equal(here.get("b"), big(5))
    here.gc()
    counters = root.catalog.view(Transaction.counters)
    assert root.next_put.file is None and counters.filling == 0


def test_what_was_replaced_is_given_back_where_it_lies(pair: Cluster) -> None:
    here, there = pair.stores
    for store in (here, there, here):
        store.put("k", big(1))
    await_(lambda: (len(segments(here)), len(segments(there)), lent(pair.homes[0])) == (1, 0, 1))
    there.put("k", 0)
    await_(lambda: not segments(here))
    assert there.get("k") == 0


def test_a_key_whose_home_is_here_costs_no_message_and_lives_while_nobody_answers(homes: Cluster) -> None:
    store, key = homes.stores[0], homes.key_at(0)
    store.put(key, 0)
    for home in homes.homes:
        home.silent = True
        home.asked.clear()
    for number in range(3):
        store.put(key, big(number))
        store.put(homes.key_at(0, "small"), number)
        assert torch.equal(store.get(key), big(number))
        assert store.wait(key, timeout=0) == store.version(key)
    assert store.delete(key)
    assert store.get(key, None) is None
    assert not [one for home in homes.homes for one in home.asked]


def test_versions_grow_and_conflicts_say_so(pair: Cluster) -> None:
    here, there = pair.stores
    first = here.put("k", big(1), expect_version=0)
    second = there.put("k", big(2), expect_version=first)
    assert second > first
    with pytest.raises(memstore.VersionConflictError) as caught:
        here.put("k", big(3), expect_version=first)
    assert (caught.value.key, caught.value.expected, caught.value.found) == ("k", first, second)
    assert "'k' is at version" in str(caught.value)
    with pytest.raises(memstore.VersionConflictError, match="doesn't exist"):
        here.put("other", 1, expect_version=7)
    await_(lambda: not segments(here) and not lent(pair.homes[0]))  # what was filled in vain is given back


def test_a_batch_is_one_moment_at_one_home(pair: Cluster) -> None:
    here, there = pair.stores
    versions = here.put_many({"a": 1, "b": big(2), "c": big(3)})
    assert versions == {key: there.version(key) for key in "abc"}
    assert [torch.as_tensor(one).sum().item() for one in here.get_many(list("abc")).values()] == [1, 2 * BIG, 3 * BIG]
    with pytest.raises(memstore.VersionConflictError):
        here.put_many({"a": 7, "b": 8}, expect_versions={"b": 1})
    assert here.get("a") == 1
    assert here.delete_many(["a", "b", "x"], missing_ok=True) == 2
    with pytest.raises(memstore.KeyNotFoundError, match="no key 'a'"):
        here.delete_many(["c", "a"])
    assert list(here) == ["c"]


def test_keys_of_several_owners_are_refused_before_anything_is_copied(
    homes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys = homes.stores[0], [homes.key_at(0), homes.key_at(1)]
    store.put(homes.key_at(1, "first"), 0)  # it knows who owns that group
    before = segments(store)
    store.put(keys[0], 0)
    with monkeypatch.context() as patch:
        patch.setattr("memstore.engine.protocols.put.fill_segment", None)  # nothing is copied
        with pytest.raises(memstore.errors.CrossHostError, match="belong to one host"):
            store.put_many({key: big(1) for key in keys})
    with pytest.raises(memstore.errors.CrossHostError):
        store.delete_many(keys, missing_ok=True)
    assert segments(store) == before
    versions = store.put_many({key: big(1) for key in keys}, atomic=False)
    assert list(versions) == keys and all(homes.stores[1].version(key) == versions[key] for key in keys)
    with pytest.raises(memstore.errors.CrossHostError):
        store.get_many([keys[0], homes.key_at(1, "missing")])
    assert store.delete_many(keys, atomic=False) == 2


def test_more_than_a_message_takes_is_refused_before_anything_is_lent(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = pair.stores[0]
    here.put("k", 1)
    with monkeypatch.context() as patch:
        patch.setattr(rules_client, "CALL_BYTES_LIMIT", 2000)
        with pytest.raises(memstore.errors.CrossHostError, match="'a' on: .*make several calls"):
            here.put_many({"a": big(1), "b": big(2), "c": big(3)})
    assert (segments(here), lent(pair.homes[0])) == ({}, 0)
    assert here.put_many({"a": big(1), "b": big(2), "c": big(3)}).keys() == {"a", "b", "c"}


def test_a_silent_home_is_an_error_within_the_timeout_that_names_it(pair: Cluster) -> None:
    here, home = pair.stores[0], pair.homes[1]
    here.put("k", 1)
    home.silent = True
    started = time.monotonic()
    with pytest.raises(memstore.UnknownOutcomeError, match=f"{home.member.address}.*nobody knows"):
        here.put("k", big(2), timeout=0.5)
    with pytest.raises(memstore.errors.HomeUnavailableError, match=home.member.address) as caught:
        here.get("k", timeout=0.5)
    assert caught.value.key == "k" and isinstance(caught.value, TimeoutError)
    assert time.monotonic() - started < 10
    home.silent = False
    assert here.put("k", 3, timeout=10) == here.version("k")


def test_a_home_that_is_gone_before_a_session_is_there_leaves_nothing(pair: Cluster) -> None:
    here, home = pair.stores[0], pair.homes[1]
    home.silent = True
    with pytest.raises(memstore.errors.HomeUnavailableError, match="nothing was changed"):
        here.put("k", big(2), timeout=0.5)
    assert not segments(here)
    assert all(isinstance(one, Open) for one in home.asked)


def test_a_put_that_could_not_be_sent_was_not_made(pair: Cluster) -> None:
    """Its process has a session, and the home is gone: nothing listens there."""
    here, home = pair.stores[0], pair.homes[1]
    here.put("k", 1)
    home.close()
    with pytest.raises(memstore.errors.HomeUnavailableError):  # over what is no connection any more
        here.get("k", timeout=0.5)
    before = segments(here)
    with pytest.raises(memstore.errors.HomeUnavailableError, match="nothing was changed") as caught:
        here.put("k", big(2), timeout=0.5)
    assert "refused" in str(caught.value)
    with pytest.raises(memstore.errors.HomeUnavailableError, match="nothing was changed"):
        here.delete("k", timeout=0.5)
    assert (segments(here), lent(pair.homes[0])) == (before, 0)


def test_what_was_lent_for_a_call_that_never_ended_is_given_back_or_kept(pair: Cluster) -> None:
    here, home = pair.stores[0], pair.homes[1]
    here.put("k", 1)
    home.silent = True
    with pytest.raises(memstore.UnknownOutcomeError):
        here.put("k", big(2), timeout=0.5)
    home.silent = False
    is_made = isinstance(here.get("k"), torch.Tensor)
    await_(lambda: lent(pair.homes[0]) == int(is_made))


def test_a_home_that_comes_back_answers_the_calls_that_went_on(pair: Cluster, scratch: str) -> None:
    here, home = pair.stores[0], pair.homes[1]
    here.put("k", 1)
    home.close()
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(here.put("k", big(2), timeout=30)))
    thread.start()
    with Home(f"{scratch}-1", home.member.address) as again:
        thread.join()
        assert done == [here.version("k")]
        assert torch.equal(here.get("k"), big(2))
        assert again.asked


def test_an_interrupted_put_leaves_its_lane_to_others(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here = pair.stores[0]
    here.put("k", 1)
    send = Links.send

    def interrupted(links: Links, address: str, member: bytes | None, message: bytes, deadline: float) -> bytes | None:
        answer = send(links, address, member, message, deadline)
        if threading.current_thread() is threading.main_thread():  # else the host does its duties
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Links, "send", interrupted)
        for number in range(260):  # more than there are lanes
            with pytest.raises(KeyboardInterrupt):
                here.put("k", number)
    assert here.get("k") == 259
    here.put("k", big(1))
    assert torch.equal(here.get("k"), big(1))


def test_a_file_that_was_lent_is_not_filled_again(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit has resolved the call of a client that was stopped for longer than its put's time."""
    here, send = pair.stores[0], Links.send
    here.put("k", 1)

    def late(links: Links, address: str, member: bytes | None, message: bytes, deadline: float) -> bytes | None:
        request = msgspec.msgpack.decode(message, type=Request)
        if isinstance(request, Commit):
            call = request.call
            resolve = msgspec.msgpack.encode(Resolve(call.session, call.lane, call.number))
            send(links, address, member, resolve, deadline)
        return send(links, address, member, message, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(Links, "send", late)
        with pytest.raises(memstore.StoreTimeoutError, match="before its owner had heard of it"):
            here.put("k", big(2))
    assert root_of(here).next_put.file is None
    here.put("k", big(3))
    assert torch.equal(here.get("k"), big(3))


def test_a_forked_child_has_a_session_of_its_own(pair: Cluster) -> None:
    here = pair.stores[0]
    here.put("k", 1)

    def child(store: memstore.Store) -> tuple[int, int]:
        before = store.get("k")
        return before, store.put("k", big(2))

    before, version = in_child(child, here)
    assert before == 1
    assert here.version("k") == version
    assert here.put("k", 3) > version
    assert sum(isinstance(one, Open) for one in pair.homes[1].asked) == 2


def test_threads_put_at_both_homes(homes: Cluster) -> None:
    keys = [homes.key_at(0), homes.key_at(1)]
    errors: list[BaseException] = []

    def put(store: memstore.Store) -> None:
        try:
            for number in range(10):
                for key in keys:
                    store.put(key, big(number))
                    assert store.get(key).shape == (BIG,)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=put, args=(store,)) for store in homes.stores for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    one, other = homes.stores
    await_(lambda: len(segments(one)) + len(segments(other)) >= 2 and not _owed(homes))
    assert all(one.version(key) == other.version(key) for key in keys)


def _owed(cluster: Cluster) -> list[object]:
    return [place for home in cluster.homes for place in home.look(lambda tables: tables.owed(100))]


def test_a_put_follows_a_group_that_is_handed_over(homes: Cluster) -> None:
    """Each process remembers who owned it before."""
    here, there = homes.stores
    for store in (here, there):
        store.put("g/k", 0)
    for owner in (1, 0, 1):
        hand_over(homes, "g/k", owner)
        for store in (here, there):
            version = store.put("g/k", big(owner))
            assert here.version("g/k") == there.version("g/k") == version
        owns = [root_of(store).catalog.read(b"g/k") is not None for store in (here, there)]
        assert owns == [owner == 0, owner == 1]


def test_a_removed_host_says_so(pair: Cluster) -> None:
    here = pair.stores[0]
    here.put("k", 1)
    pair.homes[0].run(leave)
    for call in (lambda: here.put("k", 2), lambda: here.get("k"), lambda: list(here), lambda: here.delete("k")):
        with pytest.raises(memstore.errors.StaleMembershipError, match="serve the folder again"):
            call()


def test_filling_rows_are_none_after_errors(pair: Cluster) -> None:
    here = pair.stores[0]
    with pytest.raises(memstore.VersionConflictError):
        here.put_many({"a": big(1), "b": big(2)}, expect_versions={"b": 5})
    rows = root_of(here).catalog.view(Transaction.numbers, "filling", 10)
    assert rows == []
    assert not segments(here)


@pytest.mark.parametrize("number", [0, 1])
def test_a_version_that_is_none_is_refused_at_once_wherever_the_home_is(homes: Cluster, number: int) -> None:
    """The home takes it for what no client sends, and ends the connection, also for all calls that wait on it."""
    store, key = homes.stores[0], homes.key_at(number)
    version = store.put(key, 1)
    began = time.monotonic()
    for wrong, error in wrong_versions():
        with pytest.raises(error, match="expect_version.* is a"):
            store.put(key, 2, expect_version=wrong)
        with pytest.raises(error, match="expect_version.* is a"):
            store.delete(key, expect_version=wrong)
        with pytest.raises(error, match="expect_version.* is a"):
            store.put_many({key: 2}, expect_versions={key: wrong})
    for wrong in no_numbers():
        with pytest.raises(TypeError, match="newer_than is a whole number"):
            store.wait(key, newer_than=wrong)
    with pytest.raises(TimeoutError):
        store.wait(key, newer_than=2**70, timeout=0.5)
    assert time.monotonic() - began < 10
    whole: Any = torch.tensor(version)  # as NumPy's integers
    store.put(key, 2, expect_version=whole)
    assert store.get(key) == 2


# --- what a full or failing store says --------------------------------------------------------------------------------


def test_a_home_that_is_full_is_named_and_nothing_is_swept_here(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair.stores
    there.put("kept", big(1))
    here.get("kept")  # a copy, which a sweep would drop
    copies = len(segments(here))
    pair.homes[1].spoil = lambda answer: (
        Failed("StoreFullError", "its folder has no room") if isinstance(answer, Committed) else answer
    )
    for value in (1, big(2)):
        with pytest.raises(memstore.StoreFullError, match="its folder has no room") as caught:
            here.put("k", value)
        assert caught.value.host == pair.homes[1].member.address
        assert pair.homes[1].member.address in str(caught.value)
        assert pickle.loads(pickle.dumps(caught.value)).host == caught.value.host
    assert here.root not in str(caught.value)
    await_(lambda: len(segments(here)) == copies)  # what was filled is given back, and the copy is there


def test_the_real_error_is_raised_when_giving_back_fails_too(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here = pair.stores[0]
    here.put("k", 1)
    real = CatalogTables.retire

    def retire(tables: CatalogTables, place: Any) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(CatalogTables, "retire", retire)
    with pytest.raises(memstore.VersionConflictError):
        here.put("k", big(1), expect_version=7)
    monkeypatch.setattr(CatalogTables, "retire", real)


def test_puts_owner_by_owner_go_on_when_groups_are_handed_over(homes: Cluster) -> None:
    """What this process remembers of the owners is of before."""
    here, there = homes.stores
    names = [f"{number}/k" for number in range(6)]
    here.put_many(dict.fromkeys(names, 0))
    for name in names[:3]:
        hand_over(homes, name, 1)
    versions = here.put_many(dict.fromkeys(names, 1), atomic=False)
    assert list(versions) == names and all(there.version(name) == versions[name] for name in names)
    with pytest.raises(CrossHostError):
        here.put_many(dict.fromkeys(names, 2))
    for name in names[:3]:
        hand_over(homes, name, 0)
    assert there.delete_many(names, atomic=False) == 6


def test_groups_of_a_batch_are_claimed_for_who_owns_the_others(homes: Cluster) -> None:
    here, there = homes.stores
    there.put("theirs/k", 1)
    versions = here.put_many({"new/k": big(1), "theirs/k": big(2)})
    assert {key: there.version(key) for key in versions} == versions
    assert root_of(there).catalog.read(b"new/k") is not None and root_of(here).catalog.read(b"new/k") is None


def test_gets_waits_and_failed_puts_claim_nothing(homes: Cluster) -> None:
    here, there = homes.stores
    assert here.get("new/k", None) is None and here.delete("new/k", missing_ok=True) is False
    with pytest.raises(TimeoutError):
        here.wait("new/k", timeout=0.2)
    with pytest.raises(memstore.VersionConflictError):
        here.put("new/k", 1, expect_version=7)
    assert there.put("new/k", 1)
    assert root_of(there).catalog.read(b"new/k") is not None


def test_a_process_that_dies_between_its_claim_and_its_commit_leaves_a_group_that_its_host_owns(homes: Cluster) -> None:
    here, there = homes.stores
    claim(homes.homes[0], homes.homes[1], b"new")
    version = here.put("new/k", big(1))
    assert there.version("new/k") == version and root_of(there).catalog.read(b"new/k") is not None


def test_lanes_that_threads_fight_for_are_waited_for() -> None:
    """One looks, another takes the last one, and the first one finds none."""

    class Lanes(list[int]):
        def __bool__(self) -> bool:
            return True  # as it was when it was looked at

    client = Client()
    client._free_lanes = Lanes()  # pyright: ignore[reportPrivateUsage]
    steps = client.take_lane()
    assert isinstance(next(steps), Pause)
    client.free_lane(7)
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == 7


def test_parts_that_nobody_gives_up_leave_their_lanes_to_others(pair: Cluster) -> None:
    links = Links(secret=None, kind=CLIENT, hello=hello_of_this_process())
    puts = elsewhere.OtherHosts(root_of(pair.stores[0]), links)
    client = puts._client  # pyright: ignore[reportPrivateUsage]
    member = Participant(b"k", "attempt", 0, 2, 60.0)
    free = len(client._free_lanes)  # pyright: ignore[reportPrivateUsage]
    for number in range(200):
        part = puts._put_part(member)  # pyright: ignore[reportPrivateUsage]
        steps = client.take_lane()
        with pytest.raises(StopIteration) as end:
            next(steps)
        part.lane = end.value.value
        puts._note_unanswered((b"k", "attempt", number % 150), part)  # pyright: ignore[reportPrivateUsage]
    assert free - len(client._free_lanes) <= 64  # pyright: ignore[reportPrivateUsage]


def test_a_full_catalog_has_the_values_of_new_groups_in_segments(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flat key is a group of its own, and its first put claims it."""
    for number in range(2):
        memstore.open(f"{scratch}-{number}", inline_limit=1 << 16).close()
    with cluster_of(scratch, True, True) as homes:
        store = homes.stores[0]
        monkeypatch.setattr("memstore.engine.catalog.catalog._MOST_OF_VALUES", 1 << 20)
        for number in range(40):
            store.put(f"flat{number}", torch.full((15_000,), float(number)))
        kinds = [store.info(f"flat{number}").kind for number in range(40)]
        assert kinds[0] == "inline" and kinds[-1] == "segment"
        for of in homes.stores:
            assert [of.get(f"flat{number}")[7].item() for number in (0, 39)] == [0.0, 39.0]
