"""torchtitan's layout on hosts: a controller, trainers on two hosts, generators on others, some of which come later."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memstore.integrations.torchstore.folders import ROOT_VARIABLE
from tests.distributed.meshes.conftest import MeshHosts
from tests.distributed.meshes.owners import SOURCES, environment, needs_monarch
from tests.distributed.serving.agents import eventually
from tests.support.hosts import Hosts, need_hosts

pytestmark = [needs_monarch, pytest.mark.full, pytest.mark.timeout(580)]

CONTROLLER, TRAINERS, GENERATORS, LATER = 0, (1, 2), 3, 4


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshHosts]:
    need_hosts()
    with Hosts(5, shm_bytes=64 << 20) as hosts:
        made = MeshHosts(hosts, tmp_path_factory.mktemp("layout"))
        with made.owner:
            yield made


class Job:
    """The controller's process, a line at a time."""

    def __init__(self, mesh: MeshHosts, errors: Path, *options: str) -> None:
        variables = environment()
        variables.pop(ROOT_VARIABLE, None)
        self.errors = errors
        with open(errors, "wb") as log:
            self.process: Any = mesh[CONTROLLER].popen(
                [sys.executable, "examples/torchstore_rl_layout.py", "--pause", *options],
                env=variables,
                cwd=SOURCES,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def line(self, pattern: str) -> str:
        """Reads lines up to one that matches."""
        seen: list[str] = []
        for line in self.process.stdout:
            seen.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"{pattern}: {''.join(seen)}{self.errors.read_text()[-6000:]}")

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def agents_on(mesh: MeshHosts, number: int) -> list[bytes]:
    """Returns the command lines of agents of TorchStore's stores on a host."""
    found = [
        Path(f"/proc/{pid}/cmdline").read_bytes() for pid in mesh[number].processes() if os.path.exists(f"/proc/{pid}")
    ]
    return [words for words in found if b"memstore.distributed.serving" in words and b"memstore-torchstore" in words]


LATER_SERVED = """
import asyncio, sys
import torch
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint, shutdown_context
import memstore.integrations.torchstore as ts

class Holder(Actor):
    @endpoint
    async def put(self, key: str) -> str:
        await ts.put(key, torch.full((1000,), 7.0))
        return (await (await ts.client()).store()).root

    @endpoint
    async def get(self, key: str) -> str:
        try:
            return str((await ts.get(key)).unique().tolist())
        except RuntimeError as error:
            return type(error).__name__

async def main():
    enable_transport(f"tcp://{sys.argv[1]}:0")
    mesh = attach_to_workers(ca="trust_all_connections", workers=sys.argv[2:])
    holders = mesh.spawn_procs(per_host={"gpus": 2}).spawn("holders", Holder)
    print([value for _, value in await holders.get.call("none")])
    for number in range(2):
        await ts.initialize()
        await ts.put("here", torch.ones(3))
        store = await (await ts.client()).store()
        print([value for _, value in await holders.get.call("here")])
        roots = {root for _, root in await holders.slice(gpus=0).put.call(f"there{number}")}
        print(roots == {store.root}, (await ts.get(f"there{number}")).unique().tolist(), sorted(await ts.keys()))
        await ts.shutdown()
        print([value for _, value in await holders.get.call("here")])
    try:
        await ts.initialize(mesh=mesh, strategy=ts.ControllerStorageVolumes())
    except NotImplementedError as error:
        print("refused:", str(error)[:24])
    await ts.initialize(mesh=mesh.slice(hosts=0))
    await ts.put("here", torch.ones(3))
    print([value for _, value in await holders.get.call("here")])
    await ts.shutdown()

asyncio.run(main())
shutdown_context().get(timeout=30.0)
"""


def test_a_store_of_one_host_is_served_once_another_asks_for_it(mesh: MeshHosts) -> None:
    variables = environment()
    variables.pop(ROOT_VARIABLE, None)
    done = mesh[CONTROLLER].run(
        [sys.executable, "-c", LATER_SERVED, mesh[CONTROLLER].address, *(mesh.workers[number] for number in TRAINERS)],
        env=variables,
        cwd=SOURCES,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    nothing = str(["NotInitializedError"] * 4)
    ones, sevens = str(["[1.0]"] * 4), "True [7.0]"
    assert done.stdout.splitlines() == [
        nothing,
        *(ones, f"{sevens} ['here', 'there0']", nothing),
        *(ones, f"{sevens} ['here', 'there1']", nothing),
        "refused: ControllerStorageVolumes",
        ones,
    ], done.stdout + done.stderr
    for number in (CONTROLLER, *TRAINERS):
        eventually(lambda: not agents_on(mesh, number), f"host {number} is served no longer")  # noqa: B023


def test_trainers_go_on_while_generators_come_and_die(mesh: MeshHosts, tmp_path: Path) -> None:
    workers = mesh.workers
    job = Job(
        mesh,
        tmp_path / "controller",
        *("--address", mesh[CONTROLLER].address, "--steps", "4", "--processes", "1"),
        *("--trainers", *(workers[number] for number in TRAINERS)),
        *("--generators", workers[GENERATORS], "--later", workers[LATER]),
    )
    try:
        job.line("step 1: generators have the weights of step 1$")
        owners = [words for number in TRAINERS for words in agents_on(mesh, number)]
        joined = [words for number in (CONTROLLER, GENERATORS) for words in agents_on(mesh, number)]
        assert owners and not any(b"--no-owner" in words for words in owners), "the trainers' hosts own the keys"
        assert joined and all(b"--no-owner" in words for words in joined), "and no other host does"
        assert not agents_on(mesh, LATER)
        job.go_on()
        job.line("step 2: generators have the weights of step 2$")
        job.line("step 2: later generators have the weights of step 2$")
        assert agents_on(mesh, LATER)
        mesh[GENERATORS].kill()
        job.go_on()
        began = time.monotonic()
        job.line("step 3: without generators, which are gone")
        job.line("step 3: later generators have the weights of step 3$")
        assert time.monotonic() - began < 60, "nobody waits for long for what is gone"
        job.go_on()
        job.line("step 4: later generators have the weights of step 4$")
        job.go_on()
        job.line("keys: policy$")
        job.line("the store is removed$")
        assert job.process.wait(90) == 0, job.errors.read_text()[-6000:]
    finally:
        job.process.kill()
        job.process.wait()
    for number in (CONTROLLER, *TRAINERS, LATER):
        eventually(lambda: not agents_on(mesh, number), f"host {number} is served no longer")  # noqa: B023
        left = mesh[number].run(["find", "/dev/shm", "-name", "memstore.json"], capture_output=True, text=True).stdout
        assert not left, left


def test_trainers_do_not_notice_that_a_generators_host_is_cut_off(mesh: MeshHosts, tmp_path: Path) -> None:
    """Its processes live, and nobody hears of them; those that hold a copy of the directory are trainers."""
    workers = [mesh.work(number) for number in range(5)]
    job = Job(
        mesh,
        tmp_path / "controller",
        *("--address", mesh[CONTROLLER].address, "--steps", "6", "--processes", "1"),
        *("--trainers", *(workers[number] for number in TRAINERS)),
        *("--generators", workers[GENERATORS], "--later", workers[LATER]),
    )
    try:
        for step in (1, 2, 3):
            job.line(f"step {step}: generators have the weights of step {step}$")
            if step < 3:
                job.go_on()
        job.line("step 3: later generators have the weights of step 3$")
        for other in (CONTROLLER, *TRAINERS, LATER):
            mesh.hosts.cut(other, GENERATORS)
        for step in (4, 5, 6):
            job.go_on()
            took = float(job.line(f"step {step}: the trainers have put in").split()[-2])
            assert took < 5.0, "a put waits for nobody that is cut off"
            if step == 4:
                job.line("step 4: without generators, which are gone")
            job.line(f"step {step}: later generators have the weights of step {step}$")
        for other in (CONTROLLER, *TRAINERS, LATER):
            mesh.hosts.heal(other, GENERATORS)
        job.go_on()
        job.line("keys: policy$")
        job.line("the store is removed$")
    finally:
        for other in (CONTROLLER, *TRAINERS, LATER):
            mesh.hosts.heal(other, GENERATORS)
        job.process.kill()
        job.process.wait()
    for number in (CONTROLLER, *TRAINERS, LATER):
        eventually(lambda: not agents_on(mesh, number), f"host {number} is served no longer")  # noqa: B023
