"""Who may be a host of a store on shared storage, where its state may lie, and who makes the store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

import memstore
from memstore.distributed.serving import Cluster
from memstore.distributed.serving.supervision import holders, is_served
from memstore.engine import Creation, close_root, open_root, state_folder, syscalls
from memstore.engine.root import folder as root_folder
from memstore.engine.root.folder import Settings, new_settings
from memstore.engine.root.shared import STATE_VARIABLE, create_shared, new_shared, shared_settings, state_base
from memstore.errors import NotServedError
from tests.distributed.hosts.clusters import wait_until
from tests.distributed.shared.pairs import Pair, free_ports, make_storage
from tests.inside import root_of
from tests.small_values import USERS_LIMIT

NFS = 0x6969


@pytest.fixture
def state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_VARIABLE, str(folder / "state"))
    return folder / "state"


def end_agent(lock: Path) -> None:
    """Kills the agent that holds it, and its index process."""
    for pid in holders(str(lock)):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_served(str(lock.parent)), "the agent ends")


def on_nfs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """All that lies in the folder is on NFS, as far as statfs tells."""
    real = syscalls.filesystem_type

    def kind(path: str) -> int:
        return NFS if f"{path}/".startswith(f"{folder}/") else real(path)

    monkeypatch.setattr(syscalls, "filesystem_type", kind)


def test_the_state_folder_is_private_and_has_an_id_of_its_own(pair: Pair) -> None:
    ids = set[str]()
    for number in range(2):
        with pair.on(number):
            folder = state_folder(pair.root)
        assert Path(folder).parent == pair.state(number)
        assert {os.stat(one).st_mode & 0o777 for one in (folder, pair.state(number))} == {0o700}
        said = json.loads(Path(f"{folder}/memstore.json").read_text())
        assert said["shared"]["store"] == json.loads(Path(f"{pair.root}/memstore.json").read_text())["store"]
        ids.add(said["store"])
    folders = [name for name in os.listdir(f"{pair.root}/segments") if not name.endswith(".json")]
    assert sorted(ids) == sorted(folders) and len(ids) == 2
    assert sorted(os.listdir(pair.root)) == ["memstore.json", "segments"], "and nothing else lies there"


def test_older_versions_refuse_the_store(pair: Pair) -> None:
    """They refuse features that they don't know."""
    said = json.loads(Path(f"{pair.root}/memstore.json").read_text())
    assert said["format"] == 2 and said["features"] == ["shared"]


def test_where_state_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, "/somewhere")
    assert state_base() == "/somewhere"
    monkeypatch.delenv(STATE_VARIABLE)
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert state_base() == "/xdg/memstore"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert state_base() == "/home/me/.local/state/memstore"


def test_state_on_a_file_system_that_hosts_share_is_refused(
    folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_storage(str(folder / "store"), grace=1)
    on_nfs(monkeypatch, folder)
    (port,) = free_ports(1)
    with pytest.raises(memstore.UnsupportedFilesystemError, match=f"NFS.*{STATE_VARIABLE}"):
        memstore.join(folder / "store", cluster=f"tcp://127.0.0.1:{port}", shared=True, timeout=10)


def test_state_of_another_user_is_refused(folder: Path, state: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    make_storage(str(folder / "store"), grace=1)
    state.mkdir(0o700)
    os.chown(state, 12345, 12345)
    with pytest.raises(memstore.PermissionDeniedError, match="12345"):
        memstore.join(folder / "store", cluster=f"tcp://127.0.0.1:{free_ports(1)[0]}", shared=True, timeout=10)


def test_a_store_of_one_host_is_refused_on_shared_storage_which_names_the_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_nfs(monkeypatch, folder)
    with pytest.raises(memstore.UnsupportedFilesystemError, match="--shared"):
        memstore.open(folder / "store")
    assert not (folder / "store").exists()


def test_a_value_of_some_kib_lies_in_a_file(folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives its host, whose catalog doesn't."""
    monkeypatch.setattr(root_folder, "INLINE_LIMIT", USERS_LIMIT)
    close_root(open_root(str(folder / "store"), "a", Creation(shared="copy"), 30.0))
    settings = shared_settings(str(folder / "store"))
    assert settings is not None and settings.inline_limit == 1536


def test_who_opens_a_store_that_is_not_served_here_is_told_what_to_do(folder: Path, state: Path) -> None:
    make_storage(str(folder / "store"), grace=1)
    for mode in ("r", "r+", "a"):
        with pytest.raises(memstore.NotServedError, match=f"--shared.*{STATE_VARIABLE}"):
            memstore.open(folder / "store", mode)  # type: ignore[arg-type]
    with pytest.raises(memstore.NotServedError, match="--shared"):
        memstore.repair(folder / "store")


def test_a_host_that_could_not_join_does_not_put_where_nobody_sees_it(folder: Path, state: Path) -> None:
    """Who joins opens the store before, and has a state folder then."""
    root = str(folder / "store")
    close_root(open_root(root, "a", Creation(shared="copy"), 30.0))
    for mode in ("r", "r+", "a"):
        with pytest.raises(memstore.NotServedError, match=f"--shared.*{STATE_VARIABLE}"):
            memstore.open(root, mode)  # type: ignore[arg-type]


def test_a_state_folder_is_no_store_to_be_opened(pair: Pair) -> None:
    with pair.on(0), pytest.raises(memstore.NotAStoreError, match="state of a store"):
        memstore.open(state_folder(pair.root))


def test_of_hosts_that_make_a_store_at_once_one_does(folder: Path) -> None:
    root = folder / "store"
    root.mkdir(0o700)
    found = set[str]()

    def make() -> None:
        chosen = new_settings(durability=None, checksum=None, inline_limit=None, file_mode=0o600, group=None)
        found.add(create_shared(str(root), new_shared(chosen, maps=False)).store)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    settings = shared_settings(str(root))
    assert settings is not None and found == {settings.store} and os.listdir(root) == ["memstore.json"]


def test_a_host_that_looks_while_another_makes_the_store_takes_that_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's settings appear after this one has looked for them, and before it lists the folder."""
    root = folder / "store"
    root.mkdir(0o700)
    chosen = new_settings(durability=None, checksum=None, inline_limit=None, file_mode=0o600, group=None)
    first, second = new_shared(chosen, maps=False), new_shared(chosen, maps=True)
    read, looks = root_folder.read_settings, list[str]()

    def read_settings(path: str) -> Settings | None:
        found = read(path)
        if not looks:
            looks.append(path)
            create_shared(path, first)
        return found

    monkeypatch.setattr(root_folder, "read_settings", read_settings)
    assert create_shared(str(root), second).shared == first.shared


def test_an_ordinary_store_can_not_become_a_shared_one(folder: Path, state: Path) -> None:
    memstore.open(folder / "store").close()
    with pytest.raises(memstore.NotServedError, match="without"):
        memstore.join(folder / "store", cluster=f"tcp://127.0.0.1:{free_ports(1)[0]}", shared=True, timeout=10)


def test_a_host_where_the_storage_is_not_mounted_is_refused(pair: Pair, folder: Path) -> None:
    """Its mount point is an empty folder: it must not begin a store of its own there."""
    (folder / "empty").mkdir(0o700)
    for root in (folder / "empty", folder / "nothing"):
        with pair.on(1), pytest.raises(memstore.NotServedError, match="mounted here"):
            memstore.join(root, cluster=pair.addresses[0], shared=True, timeout=0.3)
    assert os.listdir(folder / "empty") == []


@pytest.mark.full
def test_a_host_with_another_storage_is_refused(pair: Pair, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_storage(str(folder / "store"), grace=1)
    monkeypatch.setenv(STATE_VARIABLE, str(folder / "state"))
    monkeypatch.setenv("MEMSTORE_ADDRESS", f"tcp://127.0.0.1:{free_ports(1)[0]}")
    with pytest.raises(memstore.NotServedError, match="another store on its storage"):
        memstore.join(folder / "store", cluster=pair.addresses[0], shared=True, timeout=20)
    with pytest.raises(memstore.NotServedError, match="with --shared"):
        memstore.join(folder / "own", cluster=pair.addresses[0], timeout=20)
    assert len(pair.status().hosts) == 2


@pytest.mark.full
def test_a_shared_store_does_not_join_a_cluster_of_ordinary_ones(
    folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, own = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    monkeypatch.setenv("MEMSTORE_ADDRESS", seed)
    memstore.join(folder / "ordinary", cluster=seed)
    try:
        make_storage(str(folder / "store"), grace=1)
        monkeypatch.setenv("MEMSTORE_ADDRESS", own)
        with pytest.raises(memstore.NotServedError, match="not on storage that hosts share"):
            memstore.join(folder / "store", cluster=seed, shared=True, timeout=20)
    finally:
        Cluster(str(folder / "ordinary")).stop()


@pytest.mark.full
def test_a_host_comes_back_with_what_it_had(folder: Path) -> None:
    with Pair(folder) as pair:
        keys = [pair.key_at(home, "back") for home in range(2)]
        for key in keys:
            pair.stores[1].put(key, torch.full((5000,), 3.0))
        members = {host.address for host in pair.status().hosts}
        for store in pair.stores:
            store.close()
        pair.stores.clear()
        with pair.on(0):
            Cluster(pair.root).stop()
        pair.__enter__()
        for store in pair.stores:
            assert all(float(store.get(key)[0]) == 3.0 for key in keys)
        assert {host.address for host in pair.status().hosts} == members


def test_rows_that_are_written_in_place_are_refused(pair: Pair) -> None:
    spec = {"x": ((4,), torch.float32)}
    with pytest.raises(memstore.UnsupportedFilesystemError, match="a store of this host alone"):
        pair.stores[0].create_dataset("rows", spec, capacity=10)
    with pytest.raises(memstore.UnsupportedFilesystemError, match="a store of this host alone"):
        memstore.ReplayBuffer(pair.stores[0], "buffer", spec, capacity=10)
    assert "rows" not in pair.stores[1] and pair.stores[0].stats().filling_bytes == 0


@pytest.mark.full
def test_a_host_that_has_lost_its_state_removes_what_it_had_left(folder: Path) -> None:
    """And nothing of others."""
    with Pair(folder) as pair:
        key = pair.key_at(0, "left")
        for number, store in enumerate(pair.stores):
            store.put(f"{key}{number}", torch.full((5000,), float(number)))
        left = root_of(pair.stores[1]).segments
        pair.stores.pop().close()
        with pair.on(1):
            lock = Path(state_folder(pair.root)) / "agent.lock"
        with pair.on(1):
            end_agent(lock)
        shutil.rmtree(pair.state(1))
        with pair.on(0):
            memstore.join(pair.root, cluster=pair.addresses[0], shared=True).remove(pair.addresses[1])
        pair.join(1)
        pair.stores.append(pair.open(1))
        wait_until(lambda: not os.path.exists(left), "its next life removes it")
        assert not os.path.exists(f"{left}.json")
        assert len(pair.files(0)) == 2  # the other host has copied what it owns out of the folder that was left
        for store in pair.stores:
            for number in range(2):
                assert torch.equal(store.get(f"{key}{number}"), torch.full((5000,), float(number)))


def test_a_host_on_storage_that_hosts_share_is_not_drained(pair: Pair) -> None:
    """Its files stay there, and its next life would remove them."""
    with pair.on(0):
        with pytest.raises(NotServedError, match="storage that hosts share.*can't be drained"):
            Cluster(pair.root).drain(pair.addresses[1])
        assert not any(host.draining for host in Cluster(pair.root).status().hosts)
