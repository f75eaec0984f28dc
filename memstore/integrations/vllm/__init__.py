"""vLLM's weight transfer by a store: backend "memstore". The guide: docs/serving.md. It needs vllm, which you install.

weights   weights as a store has them: whole versions, and what has changed since. Without vLLM
worker    the engine in each of vLLM's workers
trainer   the trainer's engine, and what drives the phases of an update
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore._threads import between_forks, late_names
from memstore._wording import offered

if TYPE_CHECKING:
    from memstore.integrations.vllm.trainer import LocalClient, MemstoreTrainer, MemstoreTrainerInitInfo, update_workers
    from memstore.integrations.vllm.worker import MemstoreInitInfo, MemstoreUpdateInfo, MemstoreWorker

BACKEND = "memstore"
_TRAINER, _WORKER = f"{__name__}.trainer", f"{__name__}.worker"
_HOMES = {
    **dict.fromkeys(("LocalClient", "MemstoreTrainer", "MemstoreTrainerInitInfo", "update_workers"), _TRAINER),
    **dict.fromkeys(("MemstoreInitInfo", "MemstoreUpdateInfo", "MemstoreWorker"), _WORKER),
}

__all__ = [
    "LocalClient",
    "MemstoreInitInfo",
    "MemstoreTrainer",
    "MemstoreTrainerInitInfo",
    "MemstoreUpdateInfo",
    "MemstoreWorker",
    "register",
    "update_workers",
]
__dir__ = offered(__all__)


def register() -> None:
    """Registers the backend "memstore" with vLLM. vLLM calls it in each process, as a plugin; may be called again."""
    with between_forks():
        from vllm.distributed.weight_transfer import factory

    for registry, module, name in (
        (factory.WeightTransferEngineFactory, "worker", "MemstoreWorker"),
        (factory.WeightTransferTrainerFactory, "trainer", "MemstoreTrainer"),
    ):
        try:
            registry.register_engine(BACKEND, f"{__name__}.{module}", name)
        except ValueError as error:  # of a name that is registered
            if "already registered" not in str(error):
                raise


if not TYPE_CHECKING:  # for a type checker any name would be there
    __getattr__ = late_names(__name__, _HOMES, "vllm>=0.33,<0.34")
