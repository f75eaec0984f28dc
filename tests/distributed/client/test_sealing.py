"""Datasets that another host owns: what a seal leaves that is cut off, and that no acknowledged row is lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import memstore
from memstore.distributed.rules import Answer
from memstore.distributed.rules.messages import Commit, Committed, Request
from memstore.errors import CrossHostError, HomeUnavailableError, MutableEntryError, UnknownOutcomeError
from tests.children import Child, Wire
from tests.distributed.client.hosts import Cluster, await_, hand_over
from tests.distributed.serving.homes import answering, join
from tests.inside import root_of
from tests.patience import give_back_until
from tests.support import faults

SPEC = {"x": ((2,), torch.float32)}


def rows(count: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(2.0 * count).reshape(count, 2)}


def create(store: memstore.Store, key: str = "k") -> memstore.Dataset:
    data = store.create_dataset(key, SPEC, capacity=100)
    data.extend(rows(3))
    return data


def is_seal(request: Request) -> bool:
    return isinstance(request, Commit) and any(change.seals and not change.is_mutable for change in request.changes)


def untouched(answer: Answer) -> Answer:
    return answer


def check_nothing_is_lost(data: memstore.Dataset, other: memstore.Store) -> bool:
    """All rows that were acknowledged are in the sealed version. Returns whether it was open still."""
    count = len(data)
    try:
        data.extend(rows(1))
        count += 1
        data.seal()
        is_open = True
    except MutableEntryError:
        is_open = False
    assert len(other.get(data.key)["x"]) == count
    with pytest.raises(MutableEntryError):
        data.extend(rows(1))
    return is_open


def seal_and_die(wire: Wire, data: memstore.Dataset, number: int, after: bool) -> None:
    with faults.at_step(number, faults.die, after=after):
        data.seal()


def killed_at(data: memstore.Dataset, number: int, *, after: bool) -> bool:
    """False: the seal has fewer steps."""
    with Child(seal_and_die, data, number, after) as child:
        child.process.join(60)
        return child.process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("number", [0, 1], ids=["home here", "home elsewhere"])
def test_a_kill_at_each_step_loses_no_acknowledged_row(homes: Cluster, number: int, stride: int) -> None:
    here, there = homes.stores
    keys = homes.keys_at(number)
    found: list[bool] = []
    for after in (False, True):
        step, is_killed = 1, True
        while is_killed:
            data = create(here, next(keys))
            is_killed = killed_at(data, step, after=after)
            found.append(check_nothing_is_lost(data, there))
            step += stride
    assert len(found) > 4 and found[0] and not found[-1], "some of these kills come before the seal, and some after it"


def test_a_sealer_that_is_killed_after_its_homes_commit_has_sealed_it(pair: Cluster) -> None:
    here, there = pair.stores
    data = create(here)
    with Child(_seal, data) as child:

        def kill(answer: Answer) -> Answer:
            if isinstance(answer, Committed):
                os.kill(child.pid, signal.SIGKILL)
            return answer

        pair.homes[1].spoil = kill
        child.process.join(60)
        assert child.process.exitcode == -signal.SIGKILL
    pair.homes[1].spoil = untouched
    assert not check_nothing_is_lost(data, there)


def _seal(wire: Wire, data: memstore.Dataset) -> int:
    return data.seal()


def test_a_seal_that_comes_late_is_made_no_more_once_rows_were_added(pair: Cluster) -> None:
    here, there = pair.stores
    home, data = pair.homes[1], create(here)
    home.delays = is_seal
    with Child(_seal, data) as child:
        await_(lambda: bool(home.delayed))
        os.kill(child.pid, signal.SIGKILL)
        child.process.join(60)
    assert data.extend(rows(1)) == range(3, 4)
    home.deliver()
    assert data.extend(rows(2)) == range(4, 6)
    data.seal()
    assert len(there.get("k")["x"]) == len(here.get("k")["x"]) == 6


def test_while_the_home_is_silent_nobody_writes_to_what_may_be_sealed(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair.stores
    home, data = pair.homes[1], create(here)
    monkeypatch.setattr(home, "_duties", ())  # nor does it say by itself what nothing names any more

    def silence(answer: Answer) -> Answer:
        if isinstance(answer, Committed):
            home.silent = True
            raise ConnectionError("it was made, and its answer is lost")
        return answer

    home.spoil = silence
    with pytest.raises(UnknownOutcomeError, match=home.member.address):
        data.seal(timeout=0.7)
    for call in (lambda: data.extend(rows(1), timeout=0.5), lambda: data.seal(timeout=0.5)):
        with pytest.raises(HomeUnavailableError, match="seal of it was cut off") as caught:
            call()
        assert home.member.address in str(caught.value)
    assert len(data) == 3 and len(data[:]["x"]) == 3  # it can be read
    home.spoil = untouched
    home.silent = False
    assert not check_nothing_is_lost(data, there)


def test_a_seal_whose_home_can_not_be_reached_leaves_it_open(pair: Cluster) -> None:
    here, there = pair.stores
    home, data = pair.homes[1], create(here)
    home.silent = True
    with pytest.raises(HomeUnavailableError, match=home.member.address):
        data.seal(timeout=0.5)
    data.extend(rows(1))  # no host is asked
    home.silent = False
    assert check_nothing_is_lost(data, there)


def test_a_full_store_leaves_it_open(scratch: str, pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair.stores
    data = create(here)

    def full(*_: Any, **__: Any) -> Any:
        raise memstore.StoreFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("memstore.datasets.dataset.put", full)
        with pytest.raises(memstore.StoreFullError):
            data.seal()
    assert check_nothing_is_lost(data, there)


def test_an_index_process_renews_an_entry_whose_seal_was_cut_off(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_cut_off(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with answering(f"{scratch}-home") as home, memstore.open(f"{scratch}-here", timeout=20.0) as here:
        join(home, root_of(here))
        data = create(here)
        before = here.version("k")
        with monkeypatch.context() as patch:
            patch.setattr("memstore.datasets.dataset.put", is_cut_off)
            with pytest.raises(KeyboardInterrupt):
                data.seal()
        assert data.extend(rows(1)) == range(3, 4)
        renewed = here.version("k")
        assert before is not None and renewed is not None and renewed > before
        assert len(here.open_dataset("k")) == 4, "its record is as it was"
        data.seal()
        assert len(here.get("k")["x"]) == 4


def test_rows_are_added_though_the_group_was_handed_over_meanwhile(homes: Cluster) -> None:
    """A seal was cut off, and this host owns the key by now."""
    here = homes.stores[0]
    key = homes.key_at(1)
    home, data = homes.homes[1], create(here, key)
    home.delays = is_seal
    with Child(_seal, data) as child:
        await_(lambda: bool(home.delayed))
        os.kill(child.pid, signal.SIGKILL)
        child.process.join(60)
    hand_over(homes, key, 0)
    assert data.extend(rows(1)) == range(3, 4)
    home.deliver()
    assert data.extend(rows(1)) == range(4, 5)
    data.seal()
    assert len(homes.stores[1].get(key)["x"]) == 5


# --- what other hosts may do with a dataset ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1], ids=["home here", "home elsewhere"])
def test_a_dataset_is_used_on_its_host_and_others_are_told_which(homes: Cluster, number: int) -> None:
    here, there = homes.stores
    key = homes.key_at(number)
    data = create(here, key)
    address = homes.homes[0].member.address
    calls: list[Any] = [
        lambda: there.open_dataset(key),
        lambda: there.open_dataset(key, mode="r"),
        lambda: there.view(key),
        lambda: memstore.ReplayBuffer(there, key),
    ]
    for call in calls[:3]:
        with pytest.raises(CrossHostError, match=f"dataset on .*{address}.*: open it there"):
            call()
    with pytest.raises(MutableEntryError):
        calls[3]()
    for call in (lambda: there.get(key), lambda: there.ref(key), lambda: there.wait(key), lambda: there.put(key, 1)):
        with pytest.raises(MutableEntryError, match="dataset"):
            call()
    with pytest.raises(memstore.errors.AlreadyExistsError):
        there.create_dataset(key, SPEC, capacity=4)
    assert there.info(key).kind == "dataset" and key in there and key in list(there)
    assert len(here.open_dataset(key)) == len(here.view(key)["x"]) == 3
    data.extend(rows(2))
    version = data.seal()
    assert there.version(key) == version and torch.equal(there.get(key)["x"], here.get(key)["x"])
    assert there.delete(key)
    assert len(create(there, key)) == 3


@pytest.mark.parametrize("number", [0, 1], ids=["home here", "home elsewhere"])
def test_a_dataset_that_is_deleted_elsewhere_says_so_and_gives_back_its_room(homes: Cluster, number: int) -> None:
    here, there = homes.stores
    key = homes.key_at(number)
    opened = [create(here, key)]
    assert there.delete(key)

    def is_refused() -> bool:
        try:
            opened[0].extend(rows(1))
        except MutableEntryError:
            return True
        return False

    await_(is_refused)
    with pytest.raises(MutableEntryError):
        opened[0].seal()
    opened.clear()
    give_back_until(here, lambda: here.stats().live_bytes == 0)
