"""Models of transformers whose weights lie in a store, and checkpoints of its Trainer. The guide: docs/transformers.md.

from_store      a model whose parameters are the store's memory, without a copy
StoreCallback   publishes a Trainer's model to a store, and saves the run by a CheckpointManager
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from typing import Any, TypeVar, cast

import numpy as np
import torch
from transformers.trainer_callback import TrainerCallback

import memstore
from memstore._threads import between_forks
from memstore.errors import StructureMismatchError

__all__ = ["StoreCallback", "from_store"]

_Model = TypeVar("_Model")
_NAMED = 5  # in a message


def from_store(
    cls: type[_Model],
    store: memstore.Store,
    key: str,
    *,
    config: Any,
    prefix: str = "",
    strict: bool = True,
    **options: Any,
) -> _Model:
    """Makes a model whose weights are those of `key`, in the store's memory: nothing is copied or read before its use.

    It is `cls.from_pretrained` with a state_dict, so tied weights, buffers and renamed weights are as there. All
    processes of the host that do it share one copy of the weights. What a process writes into its model, as by
    training, only that process sees. The model stays as it is when the key gets a new version.

    Args:
        cls: a class of models, such as `BertModel`; or `AutoModelForCausalLM` and its like, which choose by `config`.
        store: the store.
        key: of what `Store.save_model` has stored, a state_dict, or attached files.
        config: the model's configuration, or what `AutoConfig.from_pretrained` takes, such as a folder.
        prefix: as of `memstore.iter_weights`.
        strict: weights that are missing, left over or of another shape are an error. False: as `from_pretrained` does,
            which makes new ones and warns.
        options: as of `from_pretrained`: `dtype` (another one than the store's is a copy), `attn_implementation`, ...

    Raises:
        KeyNotFoundError: no such key.
        StructureMismatchError: the weights aren't those of the model, which names them.
    """
    if isinstance(config, (str, os.PathLike)):
        with between_forks():
            from transformers.models.auto.configuration_auto import AutoConfig

        config = AutoConfig.from_pretrained(os.fspath(config))
    target: Any = cls
    if not hasattr(cls, "base_model_prefix"):  # AutoModel and its like, which load no state_dict
        target = _class_of(cls, config)
    weights = dict(memstore.iter_weights(store, key, prefix=prefix))
    options.setdefault("dtype", "auto")  # of the weights: else they would be copied into that of the configuration
    model, found = target.from_pretrained(None, config=config, state_dict=weights, output_loading_info=True, **options)
    wrong = [
        f"{what}: {', '.join(map(str, sorted(names)[:_NAMED]))}{', ...' if len(names) > _NAMED else ''}"
        for what, names in (
            ("missing", found["missing_keys"]),
            ("left over", found["unexpected_keys"]),
            ("of another shape", found["mismatched_keys"]),
        )
        if names
    ]
    if strict and wrong:
        raise StructureMismatchError(
            f"{key!r} doesn't have the weights of {target.__name__}: {'; '.join(wrong)}: choose another class, or "
            "prefix=, or say strict=False",
            key=key,
        )
    return cast("_Model", model)


def _class_of(auto: Any, config: Any) -> Any:
    """Returns the class of models that AutoModel, or one of its like, makes of a configuration."""
    mapping = getattr(auto, "_model_mapping", None)
    if mapping is None:
        raise TypeError(f"cls is a class of transformers' models, and not {auto!r:.100}")
    found: Any = mapping[type(config)]
    classes = list(found) if isinstance(found, (list, tuple)) else [found]
    named = [one for one in classes if one.__name__ in (config.architectures or ())]
    return (named or classes)[0]


class StoreCallback(TrainerCallback):
    """Publishes the model of a Trainer to a store, and saves the run by a CheckpointManager, while it goes on.

    Trainer's own checkpoints aren't needed then: `save_strategy="no"`. It has been run in one process.

    Args:
        store: a store for the weights, or None.
        key: where they are put, as by `Store.save_model`.
        every: so many steps lie between two versions. The first one is there when the training begins.
        dtype: floating-point weights are cast to it, as in `put`.
        manager: saves the run after each step that its `save_every` says, or None. Close it after the training.
    """

    def __init__(
        self,
        store: memstore.Store | None = None,
        key: str | None = None,
        *,
        every: int = 1,
        dtype: torch.dtype | None = None,
        manager: memstore.CheckpointManager | None = None,
    ) -> None:
        if (store is None) != (key is None):
            raise TypeError("store and key come together: say both, or neither")
        if every < 1:
            raise ValueError(f"every is a number of steps, 1 or more, and not {every}")
        self._store, self._key, self._every, self._dtype, self._manager = store, key, every, dtype, manager

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._publish(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step: int = state.global_step
        if step % self._every == 0:
            self._publish(kwargs["model"])
        if self._manager is not None:
            self._manager.save(step, _app_state(state, kwargs))
            if self._manager.stopping:
                control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._manager is not None:
            self._manager.wait()

    def _publish(self, model: torch.nn.Module) -> None:
        if self._store is not None and self._key is not None:
            self._store.save_model(self._key, model, dtype=self._dtype)

    def checkpoint(self, trainer: Any) -> str | None:
        """Writes the newest step as one of Trainer's checkpoints: what `train(resume_from_checkpoint=)` takes.

        Returns:
            Its folder, `checkpoint-N` in the Trainer's output_dir; None if nothing was saved yet.
        """
        if self._manager is None:
            raise TypeError("this callback has no manager, and so no checkpoints: say manager=")
        step = self._manager.latest()
        if step is None:
            return None
        found = {name: memstore.StateDict() for name in ("model", "optimizer", "scheduler", "trainer", "rng")}
        self._manager.restore(found, step)
        folder = os.path.join(cast("str", trainer.args.output_dir), f"checkpoint-{step}")
        os.makedirs(folder, exist_ok=True)
        torch.save(dict(found["model"]), f"{folder}/pytorch_model.bin")
        torch.save(dict(found["optimizer"]), f"{folder}/optimizer.pt")
        torch.save(dict(found["scheduler"]), f"{folder}/scheduler.pt")
        torch.save(_as_of_trainer(found["rng"]), f"{folder}/rng_state.pth")
        with open(f"{folder}/trainer_state.json", "w") as file:
            file.write(found["trainer"]["state"])
        return folder


def _app_state(state: Any, objects: dict[str, Any]) -> dict[str, Any]:
    """Returns what a step of a Trainer consists of."""
    told = json.dumps(dataclasses.asdict(state), sort_keys=True)
    return {
        "model": objects["model"],
        "optimizer": objects["optimizer"],
        "scheduler": objects["lr_scheduler"],
        "trainer": memstore.StateDict(state=told),
        "rng": memstore.RNGState(),
    }


def _as_of_trainer(stored: dict[str, Any]) -> dict[str, Any]:
    """Returns a random state as Trainer's files have it. That of this process stays."""
    mine = memstore.RNGState().state_dict()
    try:
        memstore.RNGState().load_state_dict(stored)
        found = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
        if torch.cuda.is_available():
            found["cuda"] = torch.cuda.random.get_rng_state()
    finally:
        memstore.RNGState().load_state_dict(mine)
    return found
