"""A training run that reads rows from a store, is killed in the middle of an epoch, and goes on with the same batches.

    python examples/train_digits_dataloader.py [--epochs N] [--workers N] [--root PATH]

A classifier of handwritten digits is trained to the end. Then it is trained again, with a checkpoint in the store every
few steps; in the middle of the second epoch the trainer is killed while its workers are reading ahead. Another trainer
loads the newest checkpoint. From there on, each of its batches must be the same as in the run that was not interrupted,
and so must the weights at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch
from sklearn.datasets import load_digits
from tensordict import TensorDict
from torch.utils.data import DataLoader

import memstore

BATCH, BLOCK, EVERY = 64, 256, 10  # rows, rows, steps between checkpoints
PATIENCE = 120.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/train_digits_dataloader.py")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", default="/dev/shm/memstore-digits", help="of the store, which begins anew")
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error("--epochs: at least 2, for the trainer is killed in the second one")
    with memstore.open(options.root, "w") as store:  # "w": without the checkpoint of a run that was killed
        try:
            store.put("digits", digits())
            per_epoch = -(-len(store.view("digits")) // BATCH)
            run(store, per_epoch, options)
        finally:
            memstore.destroy(options.root)


def run(store: memstore.Store, per_epoch: int, options: argparse.Namespace) -> None:
    batches, end = train(store, "undisturbed", options)
    print(f"undisturbed   {len(batches)} batches, {end['right']:.1%} right, weights {end['weights']}")
    killed, _ = train(store, "killed", options, kill_after=per_epoch + per_epoch // 2)
    saved = store.get("killed")
    print(f"killed        after batch {max(killed)}, the newest checkpoint is of batch {saved['step']}")
    resumed, resumed_end = train(store, "killed", options)
    same = all(batches[step] == seen for part in (killed, resumed) for step, seen in part.items())
    print(f"resumed       with batch {min(resumed)}, {'the same batches' if same else 'OTHER BATCHES'}")
    print(f"              {'the same weights' if resumed_end == end else 'OTHER WEIGHTS'}: {resumed_end['weights']}")
    whole = set(killed) | set(resumed) == set(batches) and min(resumed) == saved["step"] + 1
    if not (same and whole and resumed_end == end):
        raise SystemExit(1)


def digits() -> TensorDict:
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.uint8), torch.tensor(data.target)
    return TensorDict({"image": images, "label": labels, "row": torch.arange(len(labels))}, [len(labels)])


# --- the trainer ------------------------------------------------------------------------------------------------------


def trainer(store: memstore.Store, checkpoint: str, epochs: int, workers: int, told: Connection) -> None:
    """Trains to the last epoch, from the checkpoint on if there is one. Tells of each batch which rows it has."""
    os.setsid()  # its workers are killed with it
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = used = 0  # batches; rows of this epoch
    with store:
        data = memstore.StoreDataset(store, "digits", transform=scaled)
        order = memstore.BlockShuffle(len(data), block=BLOCK, prefetch=data.prefetch)
        loader: Any = DataLoader(data, BATCH, sampler=order, num_workers=workers, multiprocessing_context="fork")
        if checkpoint in store:
            saved = store.get(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            order.load_state_dict(saved["order"])
            step, used = saved["step"], saved["order"]["rows"]
        for epoch in range(order.epoch, epochs):
            order.set_epoch(epoch)  # an epoch that was loaded goes on in its middle
            for batch in loader:
                learn(model, optimizer, batch)
                step, used = step + 1, used + len(batch)
                told.send((step, digest(batch["row"])))
                if step % EVERY == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    # What was used, and not what was drawn: the workers are ahead of this loop.
                    store.put(checkpoint, {**state, "order": order.state_dict(used), "step": step})
            used = 0
        told.send({"right": right(model, scaled(store.get("digits"))), "weights": digest(*model.state_dict().values())})


def scaled(batch: TensorDict) -> TensorDict:
    """Runs in the workers, once a batch."""
    return batch.set("image", batch["image"].float() / 16)


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: TensorDict) -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
    optimizer.step()


@torch.no_grad()
def right(model: torch.nn.Module, rows: TensorDict) -> float:
    return (model(rows["image"]).argmax(1) == rows["label"]).double().mean().item()


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


# --- the trainer, started and killed ----------------------------------------------------------------------------------


def train(
    store: memstore.Store, checkpoint: str, options: argparse.Namespace, kill_after: int | None = None
) -> tuple[dict[int, str], dict[str, Any]]:
    """The rows of each batch, as a digest by its step, and what the trainer says at its end; none if it was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["memstore.store.opening", "sklearn.datasets", "tensordict"])
    receiver, sender = context.Pipe(duplex=False)
    arguments = (store, checkpoint, options.epochs, options.workers, sender)
    process = context.Process(target=trainer, args=arguments)
    process.start()
    sender.close()
    batches: dict[int, str] = {}
    end: dict[str, Any] = {}
    try:
        while not end and (kill_after is None or kill_after not in batches):
            note(receive(receiver), batches, end)
    finally:
        if not end and process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        process.join()
    with contextlib.suppress(EOFError):
        while receiver.poll():  # what it said before it was killed
            note(receiver.recv(), batches, end)
    return batches, end


def note(told: Any, batches: dict[int, str], end: dict[str, Any]) -> None:
    if isinstance(told, dict):
        end.update(told)
    else:
        batches[told[0]] = told[1]


def receive(told: Connection) -> Any:
    if not told.poll(PATIENCE):
        raise SystemExit(f"the trainer has said nothing for {PATIENCE:.0f} s")
    return told.recv()


if __name__ == "__main__":
    main()
