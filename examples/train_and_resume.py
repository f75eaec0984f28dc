"""A training run that is killed and continues from its last checkpoint, bit for bit, even with another number of ranks.

    python examples/train_and_resume.py [--steps N] [--folder PATH | --to s3://BUCKET/PATH]

A small network learns the handwritten digits of scikit-learn (extra `demo`). First two ranks train it to the end. Then
they train it again, and a CheckpointManager saves every few steps while training goes on; in the middle all ranks are
killed. At last two ranks, one rank, and four ranks resume from the newest checkpoint: each run must end with the same
weights as the run that was not interrupted.

With --to the checkpoints go to a bucket (extra `cloud`), under a name of this run's own, where they stay. Credentials
and endpoint come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL.

Sums of floating-point numbers depend on their order. So each batch consists of four parts, whose gradients are added in
the same order whichever rank computed them.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import shutil
import tempfile
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import memstore

BATCH, PARTS, EVERY = 64, 4, 10  # rows, parts of a batch, steps between checkpoints
PATIENCE = 120.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/train_and_resume.py")
    parser.add_argument("--steps", type=int, default=100)
    default = f"{tempfile.gettempdir()}/memstore-train"
    parser.add_argument("--folder", default=default, help="of the checkpoints; what is there is removed")
    parser.add_argument("--to", metavar="URL", help="of a place in a bucket, instead of a folder")
    options = parser.parse_args()
    steps, folder = options.steps, options.folder
    if options.to:
        folder = f"{options.to.rstrip('/')}/run-{time.time_ns()}"
    else:
        shutil.rmtree(folder, ignore_errors=True)  # those of a run that was killed: this one begins at step 0
        os.mkdir(folder)
    try:
        undisturbed = train(2, steps, None)
        print(f"2 ranks, undisturbed    weights {undisturbed}")
        train(2, steps, folder, kill_after=steps // 2)
        print(f"2 ranks, killed; the newest checkpoint is of step {newest(folder)} of {steps}")
        for ranks in (2, 1, 4):
            resumed = train(ranks, steps, folder)
            same = "the same" if resumed == undisturbed else "OTHER WEIGHTS"
            print(f"{ranks} {'ranks' if ranks > 1 else 'rank'}, resumed".ljust(24) + f"weights {resumed}  {same}")
            if resumed != undisturbed:
                raise SystemExit(1)
        if options.to:
            print(f"the checkpoints stay: memstore checkpoints {folder}")
    finally:
        if not options.to:
            shutil.rmtree(folder, ignore_errors=True)


# --- the trainer ------------------------------------------------------------------------------------------------------


def trainer(rank: int, ranks: int, steps: int, folder: str | None, rendezvous: str, result: Connection) -> None:
    """One rank. Resumes from the newest checkpoint in the folder, if there is one."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress = memstore.StateDict(step=0, order=torch.zeros(len(images), dtype=torch.int64))
    app_state = {"model": model, "optimizer": optimizer, "progress": progress, "random": memstore.RNGState()}

    manager: memstore.CheckpointManager | None = None
    if folder is not None:
        manager = memstore.CheckpointManager(folder, save_every=EVERY, replicated=["**"])  # all ranks have the same
        if manager.latest() is not None:
            manager.restore(app_state)
            manager = None  # the resumed trainings only compare where they end
    while progress["step"] < steps:
        step = progress["step"]
        per_epoch = len(images) // BATCH
        if step % per_epoch == 0:
            progress["order"] = torch.randperm(len(images))  # from the random state, which is in the checkpoint
        start = step % per_epoch * BATCH
        rows = progress["order"][start : start + BATCH]
        set_gradients(model, images[rows], labels[rows], rank, ranks)
        optimizer.step()
        progress["step"] += 1
        if manager is not None:
            manager.save(progress["step"], app_state)  # what has failed in the last one raises here
    if manager is not None:
        manager.close()
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    result.send(hashlib.sha256(weights).hexdigest()[:16])
    dist.destroy_process_group()


def set_gradients(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, rank: int, ranks: int) -> None:
    """The mean over the batch. This rank computes some parts; all ranks add all parts, in the same order."""
    parameters = list(model.parameters())
    mine = range(rank * PARTS // ranks, (rank + 1) * PARTS // ranks)
    chunks = list(zip(images.chunk(PARTS), labels.chunk(PARTS), strict=True))
    found: list[torch.Tensor] = []
    for part in mine:
        loss = torch.nn.functional.cross_entropy(model(chunks[part][0]), chunks[part][1])
        found.append(torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)]))
    gathered = [torch.empty_like(torch.stack(found)) for _ in range(ranks)]
    dist.all_gather(gathered, torch.stack(found))
    total = torch.zeros_like(found[0])
    for part in torch.cat(gathered):
        total += part
    for parameter, gradient in zip(
        parameters, (total / PARTS).split([parameter.numel() for parameter in parameters]), strict=True
    ):
        parameter.grad = gradient.view_as(parameter).clone()


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def newest(folder: str) -> int:
    return memstore.CheckpointManager(folder).latest() or 0


# --- the ranks, started and killed ------------------------------------------------------------------------------------


def train(ranks: int, steps: int, folder: str | None, kill_after: int | None = None) -> str:
    """Trains to the end, and returns a digest of rank 0's weights; or kills all ranks in the middle."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["memstore.store.opening", "sklearn.datasets"])
    rendezvous = tempfile.mkdtemp(prefix="memstore-ranks-")  # ranks of one training alone meet there
    processes, results = [], []
    for rank in range(ranks):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (rank, ranks, steps, folder, f"{rendezvous}/file", sender)
        processes.append(context.Process(target=trainer, args=arguments))
        processes[-1].start()
        results.append(receiver)
        sender.close()
    try:
        if kill_after is None:
            digests = {receive(result) for result in results}
            if len(digests) != 1:
                raise SystemExit(f"the ranks ended with different weights: {digests}")
            return digests.pop()
        wait_for_checkpoint(folder or "", kill_after)
        return ""
    finally:
        for process in processes:
            if kill_after is not None:
                process.kill()
            process.join()
        shutil.rmtree(rendezvous, ignore_errors=True)


def receive(result: Connection) -> str:
    if not result.poll(PATIENCE):
        raise SystemExit(f"a rank has sent nothing for {PATIENCE:.0f} s")
    return result.recv()


def wait_for_checkpoint(folder: str, step: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while newest(folder) < step:
        if time.monotonic() > deadline:
            raise SystemExit(f"no checkpoint of step {step} has come in {PATIENCE:.0f} s")
        time.sleep(0.2 if "://" in folder else 0.002)  # each look at a bucket is a request that lists it


if __name__ == "__main__":
    main()
