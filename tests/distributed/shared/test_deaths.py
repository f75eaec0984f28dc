"""A host of a store on shared storage dies, with its state folder: what it has put is read from its folder."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import memstore
from memstore.contents import content_of_headers
from memstore.distributed.serving import Cluster
from memstore.distributed.serving.supervision import holders, is_served
from memstore.engine import read_left, state_folder, syscalls
from memstore.engine.files.segments import write_slots
from memstore.engine.format.headers import HEAD_SIZE, HeaderSlots, read_slots
from memstore.engine.format.records import FILLING, LIVE, RETIRED
from tests.distributed.serving.agents import eventually
from tests.distributed.shared.pairs import Pair
from tests.inside import root_of

BIG = torch.arange(50_000, dtype=torch.float32)
WHOLE = partial(content_of_headers, of_all_ranks=True)


def die(pair: Pair, number: int) -> None:
    """All processes of a host end at once, and its state is lost. A person removes it."""
    store = pair.stores[number]
    with pair.on(number):
        state = state_folder(pair.root)
    store.close()
    for pid in holders(f"{state}/agent.lock"):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_served(state), "the agent ends")
    shutil.rmtree(pair.state(number))
    with pair.on(0):
        Cluster(pair.root).remove(pair.addresses[number])


def recovered(pair: Pair) -> dict[str, str]:
    """Names of what is lost, once all is recovered."""
    eventually(lambda: not pair.status().recovering, "all is recovered")
    return dict(pair.status().lost)


def put_sharded(stores: Sequence[memstore.Store], key: str, first: float, *, is_apart: bool = False) -> torch.Tensor:
    """Ranks put a row each, of one tensor, or of tensors of their own. Returns all rows."""
    rows = torch.full((len(stores), 50_000), first) + torch.arange(len(stores)).reshape(-1, 1)

    def put(rank: int) -> None:
        shape, start = ((1, 50_000), (0, 0)) if is_apart else (tuple(rows.shape), (rank, 0))
        shard = memstore.TensorShard(rows[rank : rank + 1].clone(), shape, start)
        options = {"attempt": f"{key} {first}", "rank": rank, "world_size": len(stores)}
        value = {f"w{rank}" if is_apart else "w": shard}
        stores[rank].put_sharded(key, value, **options)  # pyright: ignore[reportArgumentType]

    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(put, range(len(stores))))
    return rows


def tensor_of(store: memstore.Store, key: str) -> torch.Tensor:
    found = store.get(key)
    return found["w"] if isinstance(found, dict) else found


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.iterdir())}


def test_what_a_dead_host_has_put_is_read_from_its_folder(folder: Path) -> None:
    with Pair(folder, grace=3) as pair:
        a, b = pair.stores
        b.put("run/kept", BIG)
        b.put("run/replaced", BIG)
        b.put("run/replaced", BIG + 1)
        b.put("run/deleted", BIG)
        b.delete("run/deleted")
        b.put("run/small", BIG)
        b.put("run/small", 1)
        b.put("flat", BIG + 2)
        b.put_many({"run/one": BIG + 3, "run/two": BIG + 4})
        put_sharded([b, b], "run/sharded", 10.0)
        sharded = put_sharded([b, b], "run/sharded", 20.0)
        put_sharded([b, b], "run/gone", 30.0)
        b.delete("run/gone")
        everywhere = put_sharded([a, b], "run/everywhere", 40.0)
        a.put("run/theirs", BIG + 5)
        b.put("run/over", BIG)
        a.put("run/over", BIG + 6)
        a.put("mine/first", 1)
        b.put("mine/lent", BIG + 7)
        whole = {
            "flat": BIG + 2,
            "mine/lent": BIG + 7,
            "run/everywhere": everywhere,
            "run/kept": BIG,
            "run/one": BIG + 3,
            "run/over": BIG + 6,
            "run/replaced": BIG + 1,
            "run/sharded": sharded,
            "run/theirs": BIG + 5,
            "run/two": BIG + 4,
        }
        versions = {key: a.info(key).version for key in whole}
        before = a.view("run/kept")
        dead, state = Path(root_of(b).segments), root_of(b).state
        die(pair, 1)
        files = content(dead)
        lost = recovered(pair)
        assert sorted(key for key in a if key != "mine/first") == sorted(whole)
        for key, value in whole.items():
            assert torch.equal(tensor_of(a, key), value) and a.info(key).version == versions[key], key
        for key in ("run/deleted", "run/small", "run/gone"):
            with pytest.raises(memstore.KeyNotFoundError):
                a.get(key)
        assert "run" in lost and "flat" not in lost and "mine/lent" not in lost
        assert a.info("run/kept").recovered and not os.path.exists(state)
        assert content(dead) == files, "it is only read"

        # what was replaced since, by others, stays for who reads it
        a.put("run/kept", BIG + 9)
        assert torch.equal(before[-5:], BIG[-5:]) and torch.equal(a.get("run/kept"), BIG + 9)
        a.delete("run/one")
        assert content(dead) == files

        # its next life takes its place, and removes the folder once the others have copied what they name there
        pair.join(1)
        eventually(lambda: not dead.exists(), "the folder is removed")
        del whole["run/one"]
        with pair.open(1) as again:
            for store in (a, again):
                for key, value in {**whole, "run/kept": BIG + 9}.items():
                    assert torch.equal(tensor_of(store, key), value), key
                    assert key == "run/kept" or store.info(key).version == versions[key]
                assert "run/one" not in store


def copied(pair: Pair, folder: Path) -> tuple[Path, str]:
    """A copy of the files of host 0, whose headers a test may change, and its id."""
    source = Path(root_of(pair.stores[0]).segments)
    return shutil.copytree(source, folder / "copy"), source.name


def slots_of(path: Path, store: str) -> HeaderSlots:
    found = read_slots(path.read_bytes()[:HEAD_SIZE], store)
    assert found is not None
    return found


def test_what_is_half_published_or_damaged_in_a_folder_counts_for_nothing(pair: Pair, folder: Path) -> None:
    store = pair.stores[0]
    group = pair.key_at(0).rpartition("/")[0]
    put_sharded([store, store], f"{group}/s", 1.0)
    put_sharded([store, pair.stores[1]], f"{group}/t", 1.0, is_apart=True)  # one rank's part lies elsewhere
    store.put(f"{group}/a", BIG)
    store.put_many({f"{group}/b": BIG, f"{group}/c": BIG})
    copy, store_id = copied(pair, folder)

    def left() -> set[str]:
        found = read_left(str(copy), store_id, WHOLE)
        return {key.decode()[-1] for key, _ in found if key.startswith(group.encode())}

    def file_of(name: str) -> Path:
        return copy / Path(store.info(f"{group}/{name}").files[0]).name

    def write(name: str, state: int, version: int | None = None) -> None:
        old = slots_of(file_of(name), store_id)
        slots = HeaderSlots(old.put_id, state, old.version if version is None else version, old.batch, old.count)
        with open(file_of(name), "r+b") as file:
            write_slots(file.fileno(), slots)

    assert left() == {"a", "b", "c", "s"}
    assert f"{group}/t".encode() in dict(read_left(str(copy), store_id, content_of_headers)), "it would look whole"
    write("s", RETIRED)  # one of its parts
    assert left() == {"a", "b", "c"}
    assert read_left(str(copy), "0" * 32, WHOLE) == [] == read_left(str(folder / "none"), store_id, WHOLE)
    write("b", FILLING)  # its host died between two headers of what it published last
    assert left() == {"a"}
    newest = slots_of(file_of("c"), store_id).version
    write("a", LIVE, newest + 1)  # and if something was published since, it had come further
    assert left() == {"a", "c"}
    write("b", RETIRED)
    assert left() == {"a", "c"}
    write("c", LIVE, 0)  # another owner's version
    assert left() == {"a"}
    with open(file_of("a"), "r+b") as file:
        file.seek(HEAD_SIZE + 100)
        file.write(b"x")
    assert left() == set()


def test_a_file_says_that_it_was_replaced_before_the_call_returns(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is synced."""
    store, key = pair.stores[0], pair.key_at(0)
    states, sync = list[int](), syscalls.sync_data

    def synced(fd: int) -> None:
        head = os.pread(fd, HEAD_SIZE, 0)
        found = read_slots(head, root_of(store).settings.store)
        states.append(-1 if found is None else found.state)
        sync(fd)

    monkeypatch.setattr(syscalls, "sync_data", synced)
    for change in (lambda: store.put(key, BIG), lambda: store.put(key, 1), lambda: store.delete(key)):
        store.put(key, BIG)
        states.clear()
        change()
        assert RETIRED in states, states
    store.put(key, 1)
    states.clear()
    store.put(key, BIG)
    assert states[:1] == [LIVE], "a put's file says so before it returns"
