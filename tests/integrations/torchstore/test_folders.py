"""Where a job's stores lie: found by its processes, also by actors of Monarch; removed at its end, and after a kill."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore
import memstore.integrations.torchstore as ts
from memstore.integrations.torchstore import folders
from memstore.integrations.torchstore.folders import ROOT_VARIABLE
from tests.children import Child, Wire, in_child


@pytest.fixture
def memory(scratch: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of /dev/shm: jobs of other tests are left alone. Forked children have it too."""
    os.mkdir(scratch)
    monkeypatch.setattr(folders, "_SHARED_MEMORY", scratch)
    monkeypatch.delenv(ROOT_VARIABLE, raising=False)
    yield Path(scratch, f"memstore-torchstore-{os.geteuid()}")
    asyncio.run(ts.shutdown())


def jobs(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.glob("job-*"))


def initialize(wire: Wire | None = None, name: str = "torchstore") -> str:
    asyncio.run(ts.initialize(store_name=name))
    asyncio.run(ts.put("key", torch.ones(3), store_name=name))
    if wire is not None:
        wire.send(os.environ[ROOT_VARIABLE])
        wire.receive()
    return os.environ[ROOT_VARIABLE]


def test_a_job_has_a_folder_until_it_is_shut_down(memory: Path) -> None:
    job = initialize()
    assert jobs(memory) == [os.path.basename(job)] and oct(memory.stat().st_mode)[-3:] == "700"
    asyncio.run(ts.initialize(store_name="second"))
    asyncio.run(ts.shutdown())
    assert os.listdir(job) != [] and os.environ[ROOT_VARIABLE] == job
    asyncio.run(ts.shutdown(store_name="second"))
    assert jobs(memory) == [] and ROOT_VARIABLE not in os.environ
    asyncio.run(ts.shutdown())  # as in TorchStore, nothing


def test_jobs_of_a_host_do_not_meet(memory: Path) -> None:
    own = initialize()
    with Child(initialize_anew) as child:
        other = child.receive()
        assert other != own and len(jobs(memory)) == 2
        child.send()
        child.receive()


def initialize_anew(wire: Wire) -> str:
    """As a process that was not started by one of the job."""
    del os.environ[ROOT_VARIABLE]
    ts.reset_client()
    return initialize(wire)


def test_what_a_killed_job_left_is_removed_by_the_next_one(memory: Path) -> None:
    with Child(initialize) as child:
        killed = child.receive()
        os.kill(child.pid, signal.SIGKILL)
        child.process.join(100)
        assert jobs(memory) == [os.path.basename(killed)]
        assert jobs(memory) != [os.path.basename(initialize())] and len(jobs(memory)) == 1


def test_a_job_that_lives_is_left_alone(memory: Path) -> None:
    with Child(initialize) as child:
        other = child.receive()
        initialize()
        assert os.path.basename(other) in jobs(memory)
        child.send()
        child.receive()


def test_a_store_that_is_served_here_for_another_host_is_left_alone(memory: Path) -> None:
    served = memory / "job-of-another-host" / "torchstore"
    served.mkdir(parents=True)
    memory.chmod(0o700)
    with open(served / "agent.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        initialize()
        assert len(jobs(memory)) == 2
        asyncio.run(ts.shutdown())
    initialize()
    assert len(jobs(memory)) == 1


def test_a_job_of_a_dead_owner_goes_though_its_agent_lives(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent ends when its root is removed. Here it doesn't, and is waited for in vain."""
    monkeypatch.setattr(folders, "_AGENT_ENDS_WITHIN", 0.1)
    served = memory / "job-of-the-dead" / "torchstore"
    served.mkdir(parents=True)
    memory.chmod(0o700)
    (memory / "job-of-the-dead" / "torchstore.owner").touch()
    with open(served / "agent.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert jobs(memory) != [os.path.basename(initialize())] and len(jobs(memory)) == 1


def test_a_folder_that_a_mesh_is_about_to_serve_is_left_alone(memory: Path) -> None:
    path = str(memory / "job-of-a-mesh" / "torchstore")
    before = os.umask(0o002)
    try:
        folders.prepare(path)
    finally:
        os.umask(before)
    initialize()  # the folder above is still this user's alone
    assert len(jobs(memory)) == 2
    asyncio.run(ts.shutdown())
    os.utime(memory / "job-of-a-mesh", (0, 0))  # nobody has come to serve it
    initialize()
    assert len(jobs(memory)) == 1


def test_a_job_that_ends_while_another_looks_is_no_error(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = memory / "job-that-ends"
    (stale / "torchstore").mkdir(parents=True)
    memory.chmod(0o700)
    look = folders._has_owner

    def look_late(job: str) -> bool:
        shutil.rmtree(stale, ignore_errors=True)
        return look(job)

    monkeypatch.setattr(folders, "_has_owner", look_late)
    initialize()
    assert len(jobs(memory)) == 1


def test_an_owner_that_ends_takes_its_store_along(memory: Path) -> None:
    with Child(end_as_a_script) as child:
        assert child.receive() == 1
        child.process.join(100)
    assert jobs(memory) == []


def end_as_a_script(wire: Wire) -> int:
    import atexit

    initialize()
    count = len(list(Path(os.environ[ROOT_VARIABLE]).parent.glob("job-*")))
    atexit._run_exitfuncs()  # a forked child of multiprocessing skips them
    return count


def test_one_name_is_one_store(memory: Path) -> None:
    initialize()
    with pytest.raises(ts.AlreadyInitializedError, match="shutdown"):
        asyncio.run(ts.initialize())
    assert issubclass(ts.AlreadyInitializedError, RuntimeError)
    assert torch.equal(asyncio.run(ts.get("key")), torch.ones(3))


def test_the_store_of_a_killed_owner_is_made_anew(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT_VARIABLE, str(memory))
    with Child(initialize) as child:
        child.receive()
        os.kill(child.pid, signal.SIGKILL)
        child.process.join(100)
    asyncio.run(ts.initialize())
    assert asyncio.run(ts.keys()) == []
    asyncio.run(ts.shutdown())
    shutil.rmtree(memory)


def test_a_process_finds_the_store_of_who_started_it(memory: Path) -> None:
    initialize()

    def use() -> list[str]:
        asyncio.run(ts.put("child", torch.zeros(2)))
        return asyncio.run(ts.keys())

    assert in_child(use) == ["child", "key"] == asyncio.run(ts.keys())


def test_a_client_finds_the_store_that_was_made_after_a_shutdown(memory: Path) -> None:
    initialize()
    asyncio.run(ts.get("key"))
    held = asyncio.run(ts.client())
    asyncio.run(ts.shutdown())
    for call in (held.get("key"), held.keys(), held.put("key", 1), ts.get("key"), ts.exists("key")):
        with pytest.raises(ts.NotInitializedError, match="call initialize"):
            asyncio.run(call)
    asyncio.run(ts.initialize())
    assert asyncio.run(held.keys()) == []
    asyncio.run(held.put("key", 1))
    assert asyncio.run(ts.get("key")) == 1


def test_without_initialize_the_error_says_what_to_call(memory: Path) -> None:
    for call in (ts.put("key", 1), ts.get("key"), ts.client(), ts.keys(), ts.get_state_dict("key")):
        with pytest.raises(RuntimeError, match=r"no store named 'torchstore': call initialize\(\)"):
            asyncio.run(call)


def test_a_folder_that_others_may_write_is_refused(memory: Path) -> None:
    memory.mkdir()
    memory.chmod(0o777)
    with pytest.raises(memstore.PermissionDeniedError, match="only you may write"):
        asyncio.run(ts.initialize())
    memory.rmdir()
    memory.symlink_to("/tmp")
    with pytest.raises(memstore.PermissionDeniedError):
        asyncio.run(ts.initialize())
    assert ROOT_VARIABLE not in os.environ


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../../x", "\x00", "ü" * 80])
def test_any_name_is_a_folder_of_the_job(name: str) -> None:
    path = folders.path_in("/job", name)
    assert os.path.dirname(os.path.normpath(path)) == "/job" and "\x00" not in path, path
    assert len(os.path.basename(path)) < 240


def test_readers_never_get_parts_of_two_versions(memory: Path) -> None:
    initialize()
    asyncio.run(ts.put_state_dict(weights(0), "policy"))
    with Child(overwrite) as one, Child(overwrite) as two:
        found: set[float] = set()
        while len(found) < 30:
            into = weights(-1)
            asyncio.run(ts.get_state_dict("policy", into))
            whole = asyncio.run(ts.get_state_dict("policy"))
            for value in (into, whole):
                steps = {float(number) for leaf in value.values() for number in (leaf.min(), leaf.max())}
                assert len(steps) == 1
                found |= steps
        assert one.process.is_alive() and two.process.is_alive()


def weights(step: int) -> dict[str, Any]:
    return {f"layers.{number}": torch.full((64, 257), float(step)) for number in range(20)}


def overwrite(_wire: Wire) -> None:
    step = os.getpid()
    while True:
        asyncio.run(ts.put_state_dict(weights(step), "policy"))
        step += 1


# --- actors of Monarch find the store of their job, also those that were spawned before it was made -------------------
# In processes of their own: one that has imported Monarch can't be forked, and pytest's is.


ROOT = Path(__file__).parents[3]
NEEDS_MONARCH = pytest.mark.skipif(importlib.util.find_spec("monarch") is None, reason="torchmonarch isn't installed")

SCRIPT = """
import asyncio, os
import torch
from monarch.actor import Actor, current_rank, endpoint, shutdown_context
import memstore.integrations.torchstore as ts

class Holder(Actor):
    @endpoint
    async def put(self, step: int) -> str:
        await ts.put(f"step{step}.{current_rank().rank}", torch.full((1000,), step))
        return (await (await ts.client()).store()).root

    @endpoint
    async def fails(self) -> str:
        try:
            await ts.get("key")
        except RuntimeError as error:
            return type(error).__name__

async def main():
    holders = await ts.spawn_actors(2, Holder, "holders")
    print([name for _, name in await holders.fails.call()])
    for step in range(2):
        await ts.initialize(num_storage_volumes=2, strategy=ts.LocalRankStrategy())
        roots = {root for _, root in await holders.put.call(step)}
        print(len(roots), sorted(await ts.keys()), (await ts.get(f"step{step}.1")).unique().tolist())
        await ts.shutdown()
    print([name for _, name in await holders.fails.call()], [os.path.exists(root) for root in roots])

asyncio.run(main())
shutdown_context().get(timeout=10.0)
"""


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(ROOT_VARIABLE, None)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@NEEDS_MONARCH
@pytest.mark.full
@pytest.mark.timeout(300)
def test_actors_find_the_stores_of_their_job_one_after_the_other() -> None:
    assert run("-c", SCRIPT).splitlines() == [
        "['NotInitializedError', 'NotInitializedError']",
        "1 ['step0.0', 'step0.1'] [0]",
        "1 ['step1.0', 'step1.1'] [1]",
        "['NotInitializedError', 'NotInitializedError'] [False]",
    ]


SERVED = """
import asyncio, os
from monarch.actor import shutdown_context, this_host
import memstore.integrations.torchstore as ts

async def main():
    await ts.initialize(mesh=this_host())
    await ts.put("key", 5)
    store = await (await ts.client()).store()
    print(await ts.get("key"), os.path.exists(f"{store.root}/agent.lock"))
    await ts.shutdown()
    print(os.path.exists(store.root))

asyncio.run(main())
shutdown_context().get(timeout=10.0)
"""


@NEEDS_MONARCH
@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_hosts_of_a_mesh_are_served_until_the_shutdown() -> None:
    assert run("-c", SERVED).splitlines() == ["5 True", "False"]


@NEEDS_MONARCH
@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_example_of_actors_runs() -> None:
    output = run("examples/torchstore_actors.py")
    assert all(f"rank {rank} got tensor([{(rank + 1) % 4}])" in output for rank in range(4)), output
    assert "keys: tensor.0 tensor.1 tensor.2 tensor.3" in output


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_example_of_ranks_runs() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nnodes=1", "--nproc-per-node=2")
    output = run(*torchrun, "examples/torchstore_spmd.py")
    assert all(f"rank {rank} got tensor([123])" in output for rank in range(2)), output
