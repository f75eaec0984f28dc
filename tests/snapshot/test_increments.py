"""Increments: each is a snapshot of its own, that has all of its state, whatever becomes of those before it."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import random
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memstore
from memstore import CorruptionError, MemstoreError, Snapshot, StateDict
from memstore._threads import collect_later
from memstore.snapshot import differences, increments, load_manifest
from memstore.snapshot.chunks import CHUNK
from memstore.snapshot.increments import sharing_of
from tests.children import Child, Wire, in_child
from tests.small_tmpfs import free_bytes, on_small_tmpfs
from tests.snapshot.leftovers import MANIFEST
from tests.snapshot.ranks import all_right, on_ranks
from tests.support import faults

LEAVES, NUMBEL = 40, 1000


def state(leaves: int = LEAVES, size: int = NUMBEL) -> dict[str, Any]:
    model = torch.nn.Linear(20, 30)
    return {"model": model, "state": StateDict({f"w{i}": torch.full((size,), float(i)) for i in range(leaves)}, n=0)}


def change(app_state: dict[str, Any], *leaves: int) -> None:
    for leaf in leaves:
        app_state["state"][f"w{leaf}"] += 1
    app_state["state"]["n"] += 1


def check(path: str, expected: dict[str, Any]) -> None:
    """The snapshot has just this state, to its last byte."""
    snapshot = Snapshot(path)
    snapshot.verify()
    found = {
        "model": torch.nn.Linear(20, 30),
        "state": StateDict({name: torch.zeros_like(x) if name != "n" else -1 for name, x in expected["state"].items()}),
    }
    snapshot.restore(found)
    assert found["state"]["n"] == expected["state"]["n"]
    for name, value in expected["state"].items():
        if name != "n":
            assert torch.equal(found["state"][name], value), name
    assert torch.equal(found["model"].weight, expected["model"].weight)


def copied(app_state: dict[str, Any]) -> dict[str, Any]:
    model = torch.nn.Linear(20, 30)
    model.load_state_dict(app_state["model"].state_dict())
    values = {name: x.clone() if name != "n" else x for name, x in app_state["state"].items()}
    return {"model": model, "state": StateDict(values)}


def files(path: str) -> dict[str, os.stat_result]:
    return {name: os.stat(f"{path}/{name}") for name in os.listdir(path) if name.endswith(".safetensors")}


def written(path: str) -> int:
    """Bytes that only this snapshot has."""
    return sum(status.st_size for status in files(path).values() if status.st_nlink == 1)


# --- what is shared ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["take", "async_take"])
def test_what_is_unchanged_is_not_written_and_the_base_may_go(path: str, asynchronous: bool) -> None:
    app_state = state()
    Snapshot.take(f"{path}/a", app_state)
    change(app_state, 3)
    if asynchronous:
        Snapshot.async_take(f"{path}/b", app_state, base=f"{path}/a").wait()
    else:
        Snapshot.take(f"{path}/b", app_state, base=Snapshot(f"{path}/a"))
    assert written(f"{path}/b") < 2 * 4 * NUMBEL
    assert sharing_of(f"{path}/b", load_manifest(f"{path}/b")).unused == 4 * NUMBEL
    assert len(differences(Snapshot(f"{path}/a"), Snapshot(f"{path}/b"))) == 2  # the leaf, and the number
    shutil.rmtree(f"{path}/a")
    check(f"{path}/b", app_state)
    assert not sharing_of(f"{path}/b", load_manifest(f"{path}/b")).shared


def test_a_leaf_of_several_chunks_and_one_that_lies_otherwise_in_memory(path: str) -> None:
    app_state = state(2)
    app_state["state"]["large"] = torch.arange(2.5 * CHUNK / 8, dtype=torch.float64)
    app_state["state"]["turned"] = torch.randn(300, 200).t()
    app_state["state"]["negative"] = torch.randn(50, dtype=torch.complex64).conj()
    Snapshot.take(f"{path}/a", app_state)
    app_state["state"]["w0"] += 1
    Snapshot.take(f"{path}/b", app_state, base="latest")
    assert written(f"{path}/b") < 8 * NUMBEL
    app_state["state"]["large"][CHUNK // 8 + 5] += 1  # in the middle of its second chunk
    app_state["state"]["turned"][3, 4] += 1
    Snapshot.take(f"{path}/c", app_state, base="latest")
    assert app_state["state"]["large"].nbytes < written(f"{path}/c")
    found = Snapshot(f"{path}/c")
    found.verify()
    for name in ("large", "turned", "negative", "w0", "w1"):
        assert torch.equal(found.read_object(f"0/state/{name}"), app_state["state"][name]), name


@pytest.mark.parametrize("seed", range(3))
def test_chains_of_any_changes_of_which_any_are_removed(path: str, seed: int) -> None:
    chance = random.Random(seed)
    app_state, there = state(), dict[str, dict[str, Any]]()
    for step in range(12):
        name = f"{path}/{step}"
        take = Snapshot.take if chance.random() < 0.7 else lambda *a, **k: Snapshot.async_take(*a, **k).wait()
        take(name, app_state, base=chance.choice(["latest", *sorted(there)]), durability="process")
        there[name] = copied(app_state)
        manifest = load_manifest(name)
        needed = sum(box.nbytes for tensor in manifest.tensors for box in tensor.boxes)
        assert manifest.nbytes < 2 * needed + 10_000 * len(manifest.files)
        change(app_state, *chance.sample(range(LEAVES), chance.choice([0, 1, 5, 30])))
        if chance.random() < 0.3:
            gone = chance.choice(sorted(there))
            shutil.rmtree(gone)
            del there[gone]
    for name, expected in there.items():
        check(name, expected)


def test_views_attached_entries_and_conversions_have_the_newest_values(path: str) -> None:
    app_state = state()
    Snapshot.take(f"{path}/a", app_state)
    change(app_state, 3, 4)
    with torch.no_grad():
        app_state["model"].bias.fill_(7)
    Snapshot.take(f"{path}/b", app_state, base="latest")
    shutil.rmtree(f"{path}/a")
    view = Snapshot(f"{path}/b").view()
    assert view["state"]["w3"][:2].tolist() == [4.0, 4.0] and view["model"]["bias"][5].item() == 7
    with memstore.open(f"{path}/store") as store:
        store.attach("key", f"{path}/b")
        assert store.get("key")["state"]["w4"].unique().tolist() == [5.0]
    from memstore.convert import convert

    convert(f"{path}/b", f"{path}/c", target_as="snapshot")
    assert not differences(Snapshot(f"{path}/b"), Snapshot(f"{path}/c"))


def test_readers_of_models_find_no_half_of_one(path: str) -> None:
    """transformers takes model.safetensors, or what an index names, for the whole model."""
    app_state = state(1)
    app_state["model"] = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(5)))
    Snapshot.take(f"{path}/a", app_state)
    with torch.no_grad():
        app_state["model"][0].weight += 1
    Snapshot.take(f"{path}/b", app_state, base="latest")
    assert len([name for name in files(f"{path}/b") if name.startswith("model")]) == 2
    assert "model.safetensors" not in os.listdir(f"{path}/b")
    assert "model.safetensors.index.json" not in os.listdir(f"{path}/b")
    Snapshot(f"{path}/b").copy(f"{path}/c")
    assert {"model.safetensors", "state.safetensors"} <= set(os.listdir(f"{path}/c"))


def test_two_keys_that_are_one_text_are_two_tensors(path: str) -> None:
    one, other = torch.arange(50.0), torch.arange(50.0)  # alike, under keys that are one text
    state = {"state": StateDict(d={1: one, "1": other}, x=torch.zeros(100))}
    Snapshot.take(f"{path}/a", state)
    for step in range(2):
        other += step
        Snapshot.take(f"{path}/b{step}", state, base=f"{path}/a")
        found = Snapshot(f"{path}/b{step}").get_state_dict_for_key("state")["d"]
        assert torch.equal(found[1], one) and torch.equal(found["1"], other)


def test_a_file_of_which_less_than_half_is_unchanged_is_not_linked(path: str) -> None:
    app_state = state()
    Snapshot.take(f"{path}/a", app_state)
    change(app_state, *range(LEAVES // 2 + 1))
    Snapshot.take(f"{path}/b", app_state, base="latest")
    names = [name for name in files(f"{path}/b") if name.startswith("state")]
    assert len(names) == 1 and load_manifest(f"{path}/b").nbytes == load_manifest(f"{path}/a").nbytes


def test_a_rank_links_so_many_files_and_no_more(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(increments, "_MOST_FILES", 3)
    app_state = state()
    for step in range(8):
        Snapshot.take(f"{path}/{step}", app_state, base="latest")
        change(app_state, step)
        assert len(files(f"{path}/{step}")) <= 3 + 2
    Snapshot(f"{path}/7").verify()


# --- bases that can't be shared with ----------------------------------------------------------------------------------


def test_on_another_file_system_all_is_written(path: str, caplog: pytest.LogCaptureFixture) -> None:
    app_state = state()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Snapshot.take(f"{folder}/a", app_state)
        if os.stat(folder).st_dev == os.stat(os.path.dirname(path)).st_dev:
            pytest.skip("/var/tmp and /dev/shm are one file system")
        Snapshot.take(f"{path}/b", app_state, base=f"{folder}/a")
    assert "can't be linked" in caplog.text
    check(f"{path}/b", app_state)
    assert all(name.startswith(("memstore_snapshot", "model", "state")) for name in os.listdir(f"{path}/b"))
    assert len(files(f"{path}/b")) == 2


def test_without_a_base_the_first_one_is_whole_and_one_that_is_given_must_be_there(path: str) -> None:
    app_state = state()
    Snapshot.take(f"{path}/a", app_state, base="latest")
    assert "model.safetensors" in os.listdir(f"{path}/a")
    with pytest.raises(memstore.NotAStoreError, match="nothing-there"):
        Snapshot.take(f"{path}/b", app_state, base=f"{path}/nothing-there")
    assert not os.path.exists(f"{path}/b")
    with pytest.raises(ValueError, match="checksum"):
        Snapshot.take(f"{path}/b", app_state, base=f"{path}/a", checksum=False)


def test_a_base_without_checksums_or_with_a_damaged_manifest(path: str, caplog: pytest.LogCaptureFixture) -> None:
    app_state = state()
    Snapshot.take(f"{path}/a", app_state, checksum=False)
    Snapshot.take(f"{path}/b", app_state, base=f"{path}/a")
    assert "no sums" in caplog.text and written(f"{path}/b")
    os.truncate(f"{path}/b/{MANIFEST}", 100)
    with pytest.raises(CorruptionError, match=f"b/{MANIFEST}"):
        Snapshot.take(f"{path}/c", app_state, base=f"{path}/b")
    Snapshot.take(f"{path}/c", app_state, base="latest")  # that was found, and not given
    check(f"{path}/c", app_state)


def _link_fails(path: str, code: int, app_state: dict[str, Any]) -> None:
    links = frozenset({"link"})
    names = faults.record(lambda: Snapshot.take(f"{path}/recorded", app_state, base=f"{path}/a"), names=links)
    for number in range(1, len(names)):  # all but the manifest's
        failing = faults.at_step(number, faults.raising(OSError(code, "injected")), names=links)
        with contextlib.suppress(memstore.MemstoreError, OSError), failing:
            Snapshot.take(f"{path}/b{number}", app_state, base=f"{path}/a")
        if os.path.exists(f"{path}/b{number}/{MANIFEST}"):
            check(f"{path}/b{number}", app_state)
        else:
            assert number not in (3, 5)  # of files; the others are of claims
            assert not os.path.exists(f"{path}/b{number}") or not os.listdir(f"{path}/b{number}")


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EMLINK, errno.EXDEV, errno.EPERM])
def test_what_cannot_be_linked_is_written(path: str, code: int) -> None:
    app_state = state()
    Snapshot.take(f"{path}/a", app_state)
    change(app_state, 1)
    _link_fails(path, code, app_state)


def test_a_base_in_whose_place_another_snapshot_comes_meanwhile(path: str) -> None:
    """Its files may have the names and sizes of before."""
    app_state, other = state(), state()
    change(other, *range(LEAVES))
    Snapshot.take(f"{path}/a", app_state)

    def replace() -> None:
        for name in os.listdir(f"{path}/a"):
            os.remove(f"{path}/a/{name}")
        in_child(Snapshot.take, f"{path}/a", other)

    for number in (1, 2, 3):  # the claim of the take; that of the first file, and its link
        with faults.at_step(number, replace, names=frozenset({"link"})):
            Snapshot.take(f"{path}/b{number}", app_state, base=f"{path}/a")
        check(f"{path}/b{number}", app_state)
        shutil.rmtree(f"{path}/a")
        Snapshot.take(f"{path}/a", app_state)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_damaged_block_of_the_base_is_found_in_the_increment(path: str) -> None:
    """An increment doesn't read what it shares: but the sums are those of what was in memory, and so it is found."""
    app_state = state()
    Snapshot.take(f"{path}/a", app_state)
    with open(f"{path}/a/state.safetensors", "r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"damage")
    Snapshot.take(f"{path}/b", app_state, base=f"{path}/a")
    shared = next(name for name, status in files(f"{path}/b").items() if status.st_nlink > 1 and "state" in name)
    for use in (Snapshot(f"{path}/b").verify, lambda: Snapshot(f"{path}/b").restore(state())):
        with pytest.raises(CorruptionError, match=shared):
            use()
    with pytest.raises(CorruptionError, match=shared):
        Snapshot(f"{path}/b").copy(f"{path}/c")
    assert not os.path.exists(f"{path}/c")
    Snapshot.take(f"{path}/d", app_state)  # a whole one has no damage
    check(f"{path}/d", app_state)


def test_a_base_that_is_shorter_than_it_was_is_not_linked(path: str) -> None:
    app_state = state()
    Snapshot.take(f"{path}/a", app_state)
    os.truncate(f"{path}/a/state.safetensors", 5000)
    os.remove(f"{path}/a/model.safetensors")
    os.symlink("/etc/passwd", f"{path}/a/model.safetensors")
    Snapshot.take(f"{path}/b", app_state, base=f"{path}/a")
    check(f"{path}/b", app_state)


def test_sums_of_boxes_that_are_damaged_share_nothing_wrong(path: str) -> None:
    app_state = state(4, 10)
    Snapshot.take(f"{path}/a", app_state)
    (name,) = [name for name in os.listdir(f"{path}/a") if name.endswith(".sums")]
    with open(f"{path}/a/{name}", "rb") as file:
        text = file.read()
    change(app_state, 1)
    for at in range(len(text)):
        with open(f"{path}/a/{name}", "wb") as file:
            file.write(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        Snapshot.take(f"{path}/b{at}", app_state, base=f"{path}/a", durability="process")
        assert len(files(f"{path}/b{at}")) == 2
    for size in (0, 1, len(text) - 1):
        with open(f"{path}/a/{name}", "wb") as file:
            file.write(text[:size])
        Snapshot.take(f"{path}/c{size}", app_state, base=f"{path}/a", durability="process")
        assert len(files(f"{path}/c{size}")) == 2
    check(f"{path}/c0", app_state)


def test_sums_of_another_snapshot_are_none(path: str) -> None:
    app_state = state(4, 10)
    Snapshot.take(f"{path}/a", app_state)
    change(app_state, 1)
    Snapshot.take(f"{path}/b", app_state)
    (ours,) = [name for name in os.listdir(f"{path}/a") if name.endswith(".sums")]
    (theirs,) = [name for name in os.listdir(f"{path}/b") if name.endswith(".sums")]
    shutil.copy(f"{path}/b/{theirs}", f"{path}/a/{ours}")
    Snapshot.take(f"{path}/c", app_state, base=f"{path}/a")
    assert all(status.st_nlink == 1 for status in files(f"{path}/c").values())


# --- kills, failures, races -------------------------------------------------------------------------------------------


def _take_next(path: str, name: str) -> dict[str, Any]:
    app_state = state()
    change(app_state, 2)
    Snapshot.take(f"{path}/{name}", app_state, base=f"{path}/a")
    return app_state


def _die_at(path: str, name: str, step: int) -> None:
    with faults.at_step(step, faults.die, after=True):
        _take_next(path, name)


def _check_after(path: str, name: str) -> None:
    """The base is as it was, the increment is whole or none, and the next take to its path works and cleans up."""
    check(f"{path}/a", copied(state()) | {"model": _same_model(path)})
    if not os.path.exists(f"{path}/{name}/{MANIFEST}"):
        _take_next(path, name)
    Snapshot(f"{path}/{name}").verify()
    assert Snapshot(f"{path}/{name}").read_object("0/state/w2")[0].item() == 3
    named = {file.name for file in load_manifest(f"{path}/{name}").files}
    left = {one for one in os.listdir(f"{path}/{name}") if not one.endswith((".sums", ".json"))}
    assert left == named or (left - named and os.path.exists(f"{path}/{name}/{MANIFEST}")), left


def _same_model(path: str) -> torch.nn.Module:
    model = torch.nn.Linear(20, 30)
    Snapshot(f"{path}/a").restore({"model": model})
    return model


def increment_steps(path: str, chosen: frozenset[str] = faults.STEPS) -> list[str]:
    names = faults.record(lambda: _take_next(path, "recorded"), names=chosen)
    shutil.rmtree(f"{path}/recorded")
    return names


def test_an_increment_that_is_killed_at_a_step(path: str) -> None:
    Snapshot.take(f"{path}/a", state())
    names = increment_steps(path)
    links = [number for number, name in enumerate(names, 1) if name == "link"]
    assert len(links) == 4, names  # the claim; the claim and the name of a file that is shared; the manifest
    for i, step in enumerate([*links, links[-1] - 1, len(names) - 4]):
        with pytest.raises(RuntimeError, match="-9"):
            in_child(_die_at, path, f"b{i}", step)
        _check_after(path, f"b{i}")
    shutil.rmtree(f"{path}/a")
    for i in range(len(links) + 2):
        Snapshot(f"{path}/b{i}").verify()


@pytest.mark.full
def test_an_increment_that_is_killed_at_every_step(path: str) -> None:
    Snapshot.take(f"{path}/a", state())
    for step in range(1, len(increment_steps(path)) + 1):
        with pytest.raises(RuntimeError, match="-9"):
            in_child(_die_at, path, f"b{step}", step)
        _check_after(path, f"b{step}")


def test_an_increment_that_fails_at_every_step_leaves_nothing(path: str) -> None:
    chosen = faults.STEPS - faults.CLEANUPS
    Snapshot.take(f"{path}/a", state())
    names = increment_steps(path, chosen)
    for step, name in enumerate(names, 1):
        failing = faults.at_step(step, faults.raising(OSError(errno.EIO, "injected")), names=chosen)
        with contextlib.suppress(OSError, memstore.MemstoreError), failing:
            _take_next(path, f"b{step}")
        there = f"{path}/b{step}"
        if os.path.exists(f"{there}/{MANIFEST}"):
            Snapshot(there).verify()
        else:
            left = os.listdir(there) if os.path.exists(there) else []
            assert not left or (name == "unlink" and len(left) == 1), (step, name, left)
        shutil.rmtree(there, ignore_errors=True)
        assert all(status.st_nlink == 1 for status in files(f"{path}/a").values()), (step, name)


def _racer(wire: Wire, path: str, asynchronous: bool) -> str:
    app_state = state()
    change(app_state, os.getpid() % LEAVES)
    wire.send("ready")
    wire.receive()
    try:
        if asynchronous:
            Snapshot.async_take(f"{path}/b", app_state, base=f"{path}/a").wait()
        else:
            Snapshot.take(f"{path}/b", app_state, base=f"{path}/a")
    except memstore.AlreadyExistsError:
        return "was late"
    return "won"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["take", "async_take"])
def test_of_increments_to_one_path_one_wins(path: str, asynchronous: bool) -> None:
    Snapshot.take(f"{path}/a", state())
    racers = [Child(_racer, path, asynchronous) for _ in range(3)]
    try:
        for racer in racers:
            assert racer.receive() == "ready"
        for racer in racers:
            racer.send()
        assert [racer.receive() for racer in racers].count("won") == 1
    finally:
        for racer in racers:
            racer.__exit__()
    Snapshot(f"{path}/b").verify()
    assert {file.name for file in load_manifest(f"{path}/b").files} == set(files(f"{path}/b"))


def _fill_up(folder: str) -> None:
    app_state = state(4, free_bytes(folder) // 4 // 8)
    Snapshot.take(f"{folder}/a", app_state)
    change(app_state, 0)
    Snapshot.take(f"{folder}/b", app_state, base="latest")  # for which there is room
    change(app_state, 0, 1, 2, 3)
    with pytest.raises(memstore.StoreFullError):
        Snapshot.take(f"{folder}/c", app_state, base="latest")
    assert not os.path.exists(f"{folder}/c")
    Snapshot(f"{folder}/b").verify()


def test_a_disk_that_has_room_for_an_increment_only() -> None:
    on_small_tmpfs(4, _fill_up)


def _copy_and_die(path: str, step: int) -> None:
    with faults.at_step(step, faults.die, after=True):
        Snapshot(f"{path}/a").copy(f"{path}/b")


def test_a_copy_that_is_killed_is_none_and_the_next_one_works(path: str) -> None:
    app_state = state()
    Snapshot.take(f"{path}/a", app_state)
    names = faults.record(lambda: Snapshot(f"{path}/a").copy(f"{path}/recorded"))
    links = [number for number, name in enumerate(names, 1) if name == "link"]
    for step in (links[0], names.index("truncate") + 1, links[-1] - 1):
        with pytest.raises(RuntimeError, match="-9"):
            in_child(_copy_and_die, path, step)
        assert not os.path.exists(f"{path}/b/{MANIFEST}")
        Snapshot(f"{path}/a").copy(f"{path}/b")
        check(f"{path}/b", app_state)
        with pytest.raises(memstore.AlreadyExistsError):
            Snapshot(f"{path}/a").copy(f"{path}/b")
        shutil.rmtree(f"{path}/b")


# --- ranks ------------------------------------------------------------------------------------------------------------


def ranks_state(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(60, 50))
    own = {f"x{i}": torch.full((500,), float(i)) for i in range(10)}  # of one path and one content on all ranks
    return {"model": model, "own": StateDict(own, mine=torch.full((700,), float(rank)))}


def _ranks_take(rank: int, path: str) -> int:
    app_state = ranks_state(rank)
    Snapshot.take(f"{path}/a", app_state)
    app_state["own"]["x3"] += rank + 1
    Snapshot.take(f"{path}/b", app_state, base=f"{path}/a" if rank == 0 else None)  # rank 0's counts
    app_state["own"]["x4"] += rank + 1
    Snapshot.async_take(f"{path}/c", app_state, base="latest").wait()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(f"{path}/a")
        shutil.rmtree(f"{path}/b")
    dist.barrier()
    fresh = ranks_state(rank)
    fresh["own"]["mine"].zero_()
    Snapshot(f"{path}/c").restore(fresh)
    assert fresh["own"]["mine"].unique().tolist() == [float(rank)]
    assert fresh["own"]["x3"][0].item() == 3 + rank + 1 and fresh["own"]["x4"][0].item() == 4 + rank + 1
    return len([name for name in files(f"{path}/c") if f"-0000{rank + 1}-of-00002" in name])


def _rank_dies(rank: int, path: str, step: int) -> str:
    app_state = ranks_state(rank)
    Snapshot.take(f"{path}/a", app_state)
    try:
        if rank == 1:
            with faults.at_step(step, faults.die, names=frozenset({"link"}), after=True):
                Snapshot.take(f"{path}/b", app_state, base="latest")
        Snapshot.take(f"{path}/b", app_state, base="latest")
    except memstore.MemstoreError as error:
        return str(error)
    return "no error"


def test_ranks_share_what_each_has_written(path: str) -> None:
    for linked in all_right(on_ranks(2, _ranks_take, path)):
        assert linked >= 3
    Snapshot(f"{path}/c").verify()
    Snapshot(f"{path}/c").copy(f"{path}/d")
    assert not differences(Snapshot(f"{path}/c"), Snapshot(f"{path}/d"))


def test_a_rank_that_dies_when_it_has_linked_leaves_no_increment(path: str) -> None:
    told = on_ranks(2, _rank_dies, path, 2, dead=(1,))[0]
    assert "rank 1" in told and not os.path.exists(f"{path}/b/{MANIFEST}")
    Snapshot(f"{path}/a").verify()
    app_state = state(3)
    Snapshot.take(f"{path}/b", app_state)
    assert {file.name for file in load_manifest(f"{path}/b").files} == set(files(f"{path}/b"))


# --- progress ---------------------------------------------------------------------------------------------------------


def test_without_a_terminal_progress_is_told_in_lines(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memstore"):
        snapshot = Snapshot.take(f"{path}/a", state(), progress=True)
        snapshot.restore(state(), progress=True)
        snapshot.verify(progress=True)
        snapshot.copy(f"{path}/b", progress=True)
    for what in ("writing", "reading", "verifying", "copying"):
        assert any(text.startswith(f"{what}: 100%") and "/s" in text for text in caplog.messages), what


# --- collections ------------------------------------------------------------------------------------------------------


def test_a_take_of_many_tensors_causes_no_full_collections_and_leaves_the_collector_as_it_was(path: str) -> None:
    app_state = {"state": StateDict({f"w{i}": torch.zeros(3) for i in range(4000)})}
    full: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        full.extend([1] if phase == "start" and info["generation"] == 2 else [])

    gc.collect()
    gc.callbacks.append(note)
    try:
        Snapshot.take(path, app_state)
        Snapshot.take(f"{path}-2", app_state, base=path)
    finally:
        gc.callbacks.remove(note)
    assert len(full) <= 1 and gc.isenabled()
    with pytest.raises(MemstoreError), collect_later(), collect_later():
        raise MemstoreError("inside")
    assert gc.isenabled()
    gc.disable()
    try:
        with collect_later():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with collect_later():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0 and not gc.isenabled()
    assert gc.isenabled()
