"""What tests let processes of their hosts do: functions that a worker there calls with its store, once it is open.

No test's own module is imported there, which would take longer than what it does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

import memstore
from memstore import TensorShard
from memstore.engine import elsewhere_of
from tests.inside import root_of

MOVED = 4 << 20  # bytes of the values that are moved
LONGEST = 60.0  # seconds
WHOLE = 50_000  # floats of a value: more than a record has room for


def with_store(channel: Connection, root: str, action: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The whole life of a worker: it sends what the action returns."""
    with memstore.open(root, "r+") as store:
        channel.send(action(store, *arguments))


# --- values of all hosts ----------------------------------------------------------------------------------------------


def put_all(store: memstore.Store, host: int) -> None:
    for number in range(8):
        store.put(f"from{host}-{number}/k", {"x": torch.full((1 << 14,), float(number)), "n": number})


def get_all(store: memstore.Store) -> list[str]:
    """What there is, once it was looked at."""
    for host in range(3):
        for number in range(8):
            value = store.get(f"from{host}-{number}/k")
            assert value["n"] == number and bool((value["x"] == number).all()), value
    assert len(store) == 24 and len(list(store.keys("from1-"))) == 8
    return sorted(store.keys())


def put_and_get(store: memstore.Store, keys: list[str], timeout: float) -> list[str]:
    """Which of these keys could be put and got within that time."""
    done: list[str] = []
    for key in keys:
        try:
            store.put(key, key, timeout=timeout)
            assert store.get(key) == key
            done.append(key)
        except memstore.HomeUnavailableError:
            pass
    return done


def owners(store: memstore.Store, groups: list[str]) -> list[str | None]:
    """Returns for each group the name and address of the host that owns it; None: nobody does."""
    root = root_of(store)
    found = elsewhere_of(root).owners_of([group.encode() for group in groups], time.monotonic() + 30)
    return [None if owner is None else elsewhere_of(root).name_of(owner) for owner in found]


def put_stable(store: memstore.Store, groups: list[str], host: int) -> None:
    """Puts values that nobody changes: one in the owner's record, and one in a file of this host."""
    for group in groups:
        store.put(f"{group}/small-of-{host}", host, timeout=30)
        store.put(f"{group}/large-of-{host}", torch.full((1 << 15,), host), timeout=30)


def stable(store: memstore.Store, groups: list[str]) -> list[str]:
    """Returns those of these values that are there, whole."""
    found: list[str] = []
    for group in groups:
        for key in store.keys(f"{group}/"):
            size, _, host = key.partition("/")[2].partition("-of-")
            if size in ("small", "large"):
                value = store.get(key, timeout=30)
                assert bool((torch.as_tensor(value) == int(host)).all()), key
                found.append(key)
    return sorted(found)


def delete_all(store: memstore.Store) -> None:
    store.delete_many(list(store.keys()), missing_ok=True, atomic=False)
    store.gc()


def trouble_with(store: memstore.Store, key: str, timeout: float) -> tuple[str, str]:
    """The error that a get ends with."""
    try:
        store.get(key, timeout=timeout)
    except memstore.MemstoreError as error:
        return type(error).__name__, str(error)
    return "", ""


# --- what depends on time ---------------------------------------------------------------------------------------------


def put_part(store: memstore.Store, key: str, attempt: str, rank: int, timeout: float) -> int | str:
    """The version, or the name of the error."""
    value = {"w": TensorShard(torch.full((2, 500), float(rank)), (4, 500), (2 * rank, 0))}
    try:
        return store.put_sharded(key, value, attempt=attempt, rank=rank, world_size=2, timeout=timeout)  # pyright: ignore[reportReturnType]
    except memstore.MemstoreError as error:
        return type(error).__name__


def put_in_a_while(channel: Connection, root: str, key: str, seconds: float) -> None:
    with memstore.open(root, "r+") as store:
        channel.send("begins")
        time.sleep(seconds)
        channel.send(store.put(key, "late"))


def wait(store: memstore.Store, key: str, timeout: float) -> tuple[int, float]:
    """The version, 0 if none came; and how long that took."""
    started = time.monotonic()
    try:
        version = store.wait(key, timeout=timeout)
    except memstore.StoreTimeoutError:
        version = 0
    return version, time.monotonic() - started


def refer(store: memstore.Store, key: str) -> bytes:
    return pickle.dumps(store.ref(key))


def sum_of(store: memstore.Store, reference: bytes) -> float:
    return float(pickle.loads(reference).get().sum())


def clock(store: memstore.Store) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def try_calls(channel: Connection, root: str, key: str) -> None:
    """Says with which errors a get and a put end; empty: with none."""
    store, errors = memstore.open(root, "r+"), list[str]()
    for call in (lambda: store.get(key), lambda: store.put(key, "x")):
        try:
            call()
        except memstore.MemstoreError as error:
            errors.append(type(error).__name__)
        else:
            errors.append("")
    store.close()
    channel.send(tuple(errors))


def put_on(channel: Connection, root: str, key: str) -> None:
    """Puts numbers again and again, until an error. Says which number was put last, and the error's name and text."""
    with memstore.open(root, "r+", timeout=5.0) as store:
        channel.send("begins")
        last = 0
        try:
            while True:
                store.put(key, last + 1)
                last += 1
        except memstore.MemstoreError as error:
            channel.send((last, type(error).__name__, str(error)))


# --- what is left -----------------------------------------------------------------------------------------------------


def own(store: memstore.Store, group: str) -> None:
    """Makes this host the owner of a group. There is no key of it afterwards."""
    store.put(f"{group}/own", 0)
    store.delete(f"{group}/own")


def put_own(store: memstore.Store, name: str, count: int) -> None:
    for number in range(count):
        store.put(f"{name}{number}/k", torch.full((5000,), float(number)))


def found(store: memstore.Store, keys: list[str]) -> list[str]:
    """Those of these keys that can be got."""
    return [key for key in keys if store.get(key, None) is not None]


def put_again(store: memstore.Store, keys: list[str]) -> None:
    for key in keys:
        store.put(key, torch.ones(5000))


def put_whole(store: memstore.Store, key: str, number: int) -> int:
    """Puts bytes in a file of this host's, all of one number. Returns the version."""
    return store.put(key, torch.full((WHOLE,), float(number)))


def get_whole(store: memstore.Store, key: str) -> int | None:
    value: Any = store.get(key, None)
    if value is None:
        return None
    tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else value["w"]
    assert bool((tensor == tensor[0]).all())
    return int(tensor[0])


def delete(store: memstore.Store, key: str) -> int:
    store.delete(key)
    return 0


def leave_part(store: memstore.Store, key: str, attempt: str, number: int) -> None:
    """Puts the first of two parts, and leaves."""
    store.put_sharded(key, half(0, number), attempt=attempt, rank=0, world_size=2, wait=False)


def put_last_part(store: memstore.Store, key: str, attempt: str, number: int) -> int | None:
    return store.put_sharded(key, half(1, number), attempt=attempt, rank=1, world_size=2)


def half(rank: int, number: int) -> dict[str, TensorShard]:
    return {"w": TensorShard(torch.full((WHOLE,), float(number)), (2 * WHOLE,), (rank * WHOLE,))}


def put_many_groups(store: memstore.Store, name: str, groups: int, of_each: int) -> None:
    """Puts so many groups, a hundred in each call."""
    for first in range(0, groups, 100):
        numbers = range(first, min(first + 100, groups))
        store.put_many({f"{name}-{group}/{key}": key for group in numbers for key in range(of_each)}, timeout=60.0)


def count_keys(store: memstore.Store) -> int:
    return sum(1 for _ in store)


def wait_newer(store: memstore.Store, key: str, version: int) -> int:
    return store.wait(key, newer_than=version)


def read_on(channel: Connection, root: str, key: str) -> None:
    """Gets a number again and again, as a generator does, also while nobody answers. Says the last one if asked."""
    with memstore.open(root, "r+", timeout=2.0) as store:
        channel.send("ready")
        last = 0
        while True:
            with contextlib.suppress(memstore.HomeUnavailableError):
                last = store.get(key)
            if channel.poll(0.02):
                channel.recv()
                channel.send(last)


def put_number(store: memstore.Store, key: str, number: int) -> int:
    return store.put(key, number)


def get_number(store: memstore.Store, key: str) -> int:
    return store.get(key)


def owner_of(store: memstore.Store, key: str) -> str:
    return str(store.info(key).owner).rpartition(" ")[2]


# --- what crosses the network -----------------------------------------------------------------------------------------


def put_rows(store: memstore.Store, key: str) -> None:
    store.put(key, torch.arange(MOVED // 8).view(-1, 64))


def read_in_children(store: memstore.Store, key: str, count: int) -> list[int]:
    """The exit codes of children that were forked with the store open, and then of this process."""

    def read() -> int:
        try:
            assert int(store.get(key)[-1, -1]) == MOVED // 8 - 1
        except BaseException:
            traceback.print_exc()
            return 1
        return 0

    readers: list[int] = []
    for _ in range(count):
        pid = os.fork()
        if not pid:
            os._exit(read())
        readers.append(pid)
    return [os.waitpid(pid, 0)[1] for pid in readers] + [read()]


def read_a_slice(store: memstore.Store, key: str) -> None:
    view: Any = store.view(key)
    assert view[100:110].sum() == sum(range(6400, 7040))
    assert view[:100, 3:5].shape == (100, 2) and view[:100, 3].sum() == sum(range(3, 6400, 64))


def put_half(store: memstore.Store, key: str, attempt: str, rank: int) -> None:
    """One of two parts: half of the rows. The second one is put last, and publishes both."""
    rows = torch.arange(MOVED // 8).view(-1, 64) + rank * (MOVED // 8)
    whole = torch.Size((2 * len(rows), 64))
    value = {"w": TensorShard(rows, whole, (rank * len(rows), 0)), "n": 7}
    store.put_sharded(key, value, attempt=attempt, rank=rank, world_size=2, wait=rank == 1)


def read_halves_in_children(store: memstore.Store, key: str, ways: list[str]) -> list[int]:
    """The exit codes of children, one for each way to read the value."""
    whole = torch.arange(MOVED // 4).view(-1, 64)
    store.wait(key, timeout=30)

    def read(way: str) -> torch.Tensor:
        if way == "get":
            return store.get(key)["w"]
        if way == "out":
            return store.get(key, out={"w": torch.zeros_like(whole)}, strict=False)["w"]
        if way == "like":
            shard = TensorShard(torch.zeros_like(whole), whole.shape, (0, 0))
            return store.get(key, like={"w": shard}, strict=False)["w"].local
        if way == "ref":
            return store.ref(key).get()["w"]
        view: Any = store.view(key)
        return torch.cat([view["w"][at : at + 1024].clone() for at in range(0, len(whole), 1024)])

    readers: list[int] = []
    for way in ways:
        pid = os.fork()
        if not pid:
            try:
                os._exit(0 if torch.equal(read(way), whole) else 1)
            except BaseException:
                traceback.print_exc()
                os._exit(2)
        readers.append(pid)
    return [os.waitpid(pid, 0)[1] for pid in readers]


def put_several(store: memstore.Store, count: int) -> None:
    for number in range(count):
        store.put(f"value/{number}", torch.full((MOVED // 4,), number, dtype=torch.int32))


def read_until_all_have_come(channel: Connection, root: str, count: int) -> None:
    """Says of each value that it has come, and in the end how many gets have failed."""
    with memstore.open(root, "r+") as store:
        left, failures = list(range(count)), 0
        while left:
            try:
                value = store.get(f"value/{left[0]}", timeout=1.0)
            except memstore.HomeUnavailableError:
                failures += 1
                continue
            assert bool((value == left[0]).all()) and value.numel() == MOVED // 4
            channel.send(left.pop(0))
        channel.send(failures)


def fetch(channel: Connection, root: str, key: str) -> None:
    """Says that it begins, and has come."""
    with memstore.open(root, "r+") as store:
        channel.send("begins")
        store.get(key)
        channel.send("done")


def bytes_left(store: memstore.Store) -> tuple[int, int]:
    """What this host's folder holds that is being filled, and that is live, once what can be given back is."""
    store.gc()
    stats = store.stats()
    return stats.filling_bytes, stats.live_bytes


# --- weights for many hosts ---------------------------------------------------------------------------------------


def put_weights(store: memstore.Store, nbytes: int, value: float) -> int:
    half = torch.full((nbytes // 8 // 1024, 1024), value)
    return store.put("weights/k", {"weight": half, "bias": half + 0}, timeout=LONGEST)


def put_bias(store: memstore.Store, nbytes: int, value: float) -> int:
    """Puts a value of which half is as `put_weights` puts it with 1.0."""
    half = torch.full((nbytes // 8 // 1024, 1024), 1.0)
    return store.put("weights/k", {"weight": half, "bias": half * value}, delta_of=True, timeout=LONGEST)


def put_weights_in_parts(store: memstore.Store, nbytes: int, value: float) -> None:
    whole = (nbytes // 4 // 1024, 1024)
    for rank in range(2):
        half = torch.full((whole[0] // 2, 1024), value)
        part = {"weight": TensorShard(half, whole, (rank * len(half), 0))}
        store.put_sharded("weights/k", part, attempt=str(value), rank=rank, world_size=2, wait=rank == 1)


def read_when_told(channel: Connection, root: str, how: str, newer_than: int) -> None:
    """Sends the value of all elements, once somebody has sent something."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.uname().nodename} %(message)s")
    with memstore.open(root, "r+") as store:
        channel.send("ready")
        channel.recv()
        channel.send(_follow(store) if how == "follow" else _read_weights(store, how, newer_than))


def _read_weights(store: memstore.Store, how: str, newer_than: int) -> float:
    if how == "iter_weights":
        found = memstore.iter_weights(store, "weights/k", newer_than=newer_than or None, timeout=LONGEST)
        tensors = [tensor for _, tensor in found]
    elif how == "load_model":
        store.wait("weights/k", newer_than=newer_than, timeout=LONGEST)
        rows = store.info("weights/k").nbytes // 8 // 1024
        model = torch.nn.Linear(1024, rows)
        model.bias = torch.nn.Parameter(torch.empty(rows, 1024))
        store.load_model("weights/k", model, newer_than=newer_than, timeout=LONGEST)
        tensors = [tensor.detach() for tensor in model.parameters()]
    else:
        store.wait("weights/k", newer_than=newer_than, timeout=LONGEST)
        value = store.view("weights/k") if how == "view" else store.get("weights/k", timeout=LONGEST)
        if how == "bias":
            assert value.pop("weight").max() == 1
        tensors = [tensor[:] for tensor in value.values()]
    (value,) = {float(end) for tensor in tensors for end in (tensor.min(), tensor.max())}
    return value


def _follow(store: memstore.Store) -> list[int]:
    """Returns the versions of five gets, each whole, of the newest."""
    versions: list[int] = []
    for _ in range(5):
        store.wait("weights/k", newer_than=versions[-1] if versions else 0, timeout=LONGEST)
        ref = store.ref("weights/k")
        value = ref.get()
        assert value["weight"].min() == value["bias"].max(), "torn"
        versions.append(ref.version)
    return versions


def put_again_and_again(channel: Connection, root: str, nbytes: int) -> None:
    """Until the process is killed."""
    with memstore.open(root, "r+") as store:
        number = 0
        while True:
            put_weights(store, nbytes, float(number))
            if not number:
                channel.send(None)
            number += 1


# --- versions that were replaced --------------------------------------------------------------------------------------


def put_version(store: memstore.Store, key: str, number: int, history: int | None = None) -> int:
    return store.put(key, {"x": torch.full((WHOLE,), float(number)), "n": number}, history=history, timeout=30)


def versions_of(store: memstore.Store, key: str) -> dict[int, int]:
    """Returns the number in each version of a key, by version; none if there is no such key."""
    found: dict[int, int] = {}
    for version in store.versions(key) if key in store else ():
        value = store.get(key, version=version, timeout=30)
        assert bool((value["x"] == value["n"]).all()), value
        found[version] = value["n"]
    return found


def put_versions_until_killed(channel: Connection, root: str, key: str) -> None:
    """Numbers that grow, until the process is told something. It sends how many were put, then."""
    with memstore.open(root, "r+", timeout=30.0) as store:
        number = 0
        while not channel.poll():
            put_version(store, key, number, 3)
            number += 1
            if number == 4:
                channel.send("there are some")
        channel.send(number)


def read_versions(store: memstore.Store, key: str, seconds: float) -> int:
    """Reads earlier versions again and again: each is whole, or gone. Returns how many it has read."""
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        versions = store.versions(key)
        assert 1 <= len(versions) <= 3 and list(versions) == sorted(set(versions)), versions
        for version in versions:
            value = store.get(key, None, version=version, timeout=30)
            assert value is None or bool((value["x"] == value["n"]).all()), value
            count += value is not None
    return count


def live_bytes(store: memstore.Store) -> int:
    return store.stats().live_bytes


# --- deltas -----------------------------------------------------------------------------------------------------------

LEAVES, MODEL = 50, 50 * 4 * (40 << 10)  # of a value, and its bytes


def model(changed: int, value: float) -> dict[str, torch.Tensor]:
    """Leaves of which the first so many have this value."""
    size = MODEL // LEAVES // 4
    return {f"layer.{i}": torch.full((size,), value if i < changed else float(i)) for i in range(LEAVES)}


def put_small(store: memstore.Store, key: str) -> None:
    """Puts the first key of its group, which this host owns from then on."""
    store.put(key, 1, timeout=LONGEST)


def put_model(store: memstore.Store, key: str, changed: int, value: float, is_delta: bool = False) -> None:
    store.put(key, model(changed, value), delta_of=is_delta, timeout=LONGEST)


def check_model(store: memstore.Store, key: str, changed: int, value: float) -> None:
    found, expected = store.get(key, timeout=LONGEST), model(changed, value)
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def collect(store: memstore.Store) -> None:
    store.gc()


def follow_model(store: memstore.Store, key: str, how: str, changed: int, value: float) -> None:
    """Reads it as those do who load weights."""
    expected = model(changed, value)
    if how == "iter_weights":
        found = dict(memstore.iter_weights(store, key, timeout=LONGEST))
    else:
        module = torch.nn.Module()
        module.layer = torch.nn.ParameterList([torch.empty_like(tensor) for tensor in expected.values()])
        store.load_model(key, module, timeout=LONGEST)
        found = module.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
