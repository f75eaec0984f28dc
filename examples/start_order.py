"""A follower that starts before its trainer, and outlives it: the trainer is killed, and then the folder is cleared.

    python examples/start_order.py [ROOT]

The follower opens the store with wait=, so the processes can start in any order. It continues when a new trainer
continues with the store, and opens the path again when somebody has cleared the folder. It comes first, so what an
earlier run has left is removed before: else it would begin with the old policy.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time

import torch

import memstore

STEPS = 3


def follow(root: str) -> None:
    while True:
        with memstore.open(root, "r", wait=60.0) as store:  # the trainer makes it
            version = 0  # a new store counts from 1 again
            try:
                while True:
                    version = store.wait("policy", newer_than=version, timeout=60.0)
                    policy = store.get("policy")
                    print(f"follower: step {policy['step']} of {policy['run']}", flush=True)
            except memstore.NotAStoreError:
                print("follower: the folder was cleared, so it waits for the next store", flush=True)


def train(root: str, run: str) -> None:
    """Goes on where the last trainer was, if there was one."""
    with memstore.open(root) as store:
        step = store.get("policy", {"step": 0})["step"]
        for _ in range(STEPS):
            step += 1
            store.put("policy", {"w": torch.full((1000,), float(step)), "step": step, "run": run})
            time.sleep(0.2)  # a step of training
        sys.stdin.read()  # until whoever started this ends, or kills it


def start(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, __file__, *arguments], stdin=pipe, stdout=pipe, text=True)


def heard(follower: subprocess.Popen[str], text: str) -> None:
    """Prints what the follower says, until it says `text`."""
    assert follower.stdout is not None
    for line in follower.stdout:
        print(line, end="", flush=True)
        if text in line:
            return
    raise SystemExit(f"the follower has ended, and never said {text!r}")


def main(root: str) -> None:
    with contextlib.suppress(memstore.NotAStoreError):
        memstore.destroy(root)  # what a run has left that was killed
    started = [start("follow", root)]
    follower = started[0]
    try:
        for run in ("the first trainer", "its successor"):
            started.append(start("train", root, run))
            heard(follower, run)
            started[-1].kill()
            started[-1].wait()
            print(f"{run} was killed", flush=True)
        shutil.rmtree(root)
        heard(follower, "cleared")
        started.append(start("train", root, "a trainer in a new store"))
        heard(follower, f"step {STEPS} of a trainer in a new store")
    finally:
        for one in started:
            one.kill()
            one.wait()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["follow"]:
        follow(sys.argv[2])
    elif sys.argv[1:2] == ["train"]:
        train(sys.argv[2], sys.argv[3])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/memstore-start-order")
