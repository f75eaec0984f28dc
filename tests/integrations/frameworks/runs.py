"""Training runs of several frameworks, each a process: `python -m tests.integrations.frameworks.runs NAME FOLDER STOP`.

A run trains a small model with dropout on shuffled rows, saves its checkpoints in FOLDER, and continues from the newest
one that is there. At step STOP it kills itself by SIGKILL; 0: never, and it prints a digest of its weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch

import memstore

EPOCHS, ROWS, BATCH = 4, 24, 4
STEPS = EPOCHS * ROWS // BATCH


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def digest(model: torch.nn.Module) -> str:
    state = model.state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def rows() -> torch.utils.data.TensorDataset:
    numbers = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(ROWS, 8, generator=numbers), torch.randn(ROWS, 2, generator=numbers)
    )


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def kill_at(step: int, stop: int) -> None:
    if step == stop:
        os.kill(os.getpid(), signal.SIGKILL)


def lightning(folder: str, stop: int) -> torch.nn.Module:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from memstore.integrations.lightning import SnapshotIO, StoreCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    class Kill(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            kill_at(trainer.global_step, stop)

    seed()
    module = Module()
    store = memstore.open(f"{folder}/store")
    loader = torch.utils.data.DataLoader(rows(), BATCH, shuffle=True)
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        plugins=[SnapshotIO()],
        callbacks=[
            StoreCallback(store, "policy", every=2),
            Kill(),
            ModelCheckpoint(
                f"{folder}/checkpoints",
                save_top_k=2,
                monitor="epoch",
                mode="max",
                every_n_epochs=1,
                save_on_train_epoch_end=True,
                save_last="link",
            ),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = f"{folder}/checkpoints/last.ckpt"
    trainer.fit(module, loader, ckpt_path=last if os.path.exists(last) else None)
    return module


def accelerate(folder: str, stop: int) -> torch.nn.Module:
    """Saves by a manager in the middle of epochs."""
    from accelerate import Accelerator

    from memstore.integrations.accelerate import app_state

    seed()
    accelerator = Accelerator(cpu=True)
    progress = memstore.StateDict(step=0)
    accelerator.register_for_checkpointing(progress)
    model, optimizer, loader, scheduler = prepared(accelerator)
    with memstore.CheckpointManager(f"{folder}/checkpoints", save_every=5) as manager:
        if manager.latest() is not None:
            manager.restore(app_state(accelerator))
        train(
            accelerator,
            model,
            optimizer,
            loader,
            scheduler,
            progress,
            stop,
            lambda step: manager.save(step, app_state(accelerator)),
        )
    return accelerator.unwrap_model(model)


def accelerate_state(folder: str, stop: int) -> torch.nn.Module:
    """Saves by Accelerate's `save_state`, with the weights as a snapshot."""
    from accelerate import Accelerator

    from memstore.integrations.accelerate import use_snapshots

    seed()
    accelerator = Accelerator(cpu=True)
    use_snapshots(accelerator)
    progress = memstore.StateDict(step=0)
    accelerator.register_for_checkpointing(progress)
    model, optimizer, loader, scheduler = prepared(accelerator)
    done = f"{folder}/done"  # the name of the newest state that is whole
    if os.path.exists(done):
        with open(done) as file:
            accelerator.load_state(file.read())

    def save(step: int) -> None:
        if step % 5 == 0:
            accelerator.save_state(f"{folder}/state-{step}")
            with open(f"{done}.new", "w") as file:
                file.write(f"{folder}/state-{step}")
            os.replace(f"{done}.new", done)

    train(accelerator, model, optimizer, loader, scheduler, progress, stop, save)
    return accelerator.unwrap_model(model)


def prepared(accelerator: Any) -> Any:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator.prepare(
        model,
        optimizer,
        # Each iterator draws a number, of this generator: the random state of the process goes on as if there were one.
        torch.utils.data.DataLoader(rows(), BATCH, generator=torch.Generator()),
        torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.9),
    )


def train(
    accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any, progress: Any, stop: int, save: Any
) -> None:
    while progress["step"] < STEPS:
        done = progress["step"] % len(loader)
        for x, y in accelerator.skip_first_batches(loader, done) if done else loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress["step"] += 1
            save(progress["step"])
            kill_at(progress["step"], stop)


def trainer(folder: str, stop: int) -> torch.nn.Module:
    """Trains BERT by transformers' Trainer."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    from memstore.integrations.transformers import StoreCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            kill_at(state.global_step, stop)

    seed()
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    model = BertForSequenceClassification(config)
    numbers = torch.Generator().manual_seed(1)
    examples = [
        {"input_ids": torch.randint(0, 64, (6,), generator=numbers), "labels": torch.tensor(i % 2)} for i in range(ROWS)
    ]
    store = memstore.open(f"{folder}/store")
    with memstore.CheckpointManager(f"{folder}/checkpoints", save_every=5) as manager:
        callback = StoreCallback(store, "policy", every=2, manager=manager)
        made = Trainer(
            model,
            TrainingArguments(
                output_dir=f"{folder}/output",
                num_train_epochs=EPOCHS,
                per_device_train_batch_size=BATCH,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                logging_strategy="no",
            ),
            train_dataset=examples,  # pyright: ignore
            callbacks=[callback, Kill()],
        )
        made.train(resume_from_checkpoint=callback.checkpoint(made))
    return model


def torchtitan(folder: str, stop: int) -> torch.nn.Module:
    """Saves by torchtitan's manager, in its layout."""
    import torch.distributed as dist

    from memstore.integrations.torchtitan import CheckpointManager

    class Container:
        """Stands for the containers of torchtitan's trainer, which a manager saves and loads as Statefuls."""

        def __init__(self, inner: Any) -> None:
            self.state_dict, self.load_state_dict = inner.state_dict, inner.load_state_dict

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seed()
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, 0.9)
    progress = memstore.StateDict(step=0)
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True, interval=5, async_mode="async", keep_latest_k=2, last_save_model_only=False
        ),
        dataloader=None,
        model_parts=[model],
        optimizers=Optimizers(model, optimizer),
        lr_schedulers=Container(scheduler),
        states={"train_state": progress, "rng": memstore.RNGState()},
        sd_adapter=None,
        base_folder=folder,
    )
    manager.load()
    loader = torch.utils.data.DataLoader(rows(), BATCH, generator=torch.Generator())
    while progress["step"] < STEPS:
        for index, (x, y) in enumerate(loader):
            if index != progress["step"] % len(loader):
                continue
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress["step"] += 1
            manager.save(progress["step"], last_step=progress["step"] == STEPS)
            kill_at(progress["step"], stop)
    manager.maybe_wait_for_saving()
    manager.close()
    dist.destroy_process_group()
    return model


class Optimizers:
    """An optimizer whose states are saved by the names of its parameters, as in torchtitan's container."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._of = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        return get_optimizer_state_dict(*self._of, options=StateDictOptions(flatten_optimizer_state_dict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        set_optimizer_state_dict(
            *self._of, optim_state_dict=state, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, place, at = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        trained = globals()[name](place, int(at))
    print(digest(trained))
