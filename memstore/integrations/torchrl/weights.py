"""MemstoreWeightSyncScheme: the weights of TorchRL's collectors, by a key of a store.

The trainer puts a version; each worker waits for newer ones in a thread, and copies them into its policy. Nothing is
sent to a worker, so one that starts late or again takes the newest version by itself.
"""

from __future__ import annotations

import time
from typing import Any, Literal, NoReturn

from torchrl.weight_update import WeightSyncScheme

import memstore
from memstore.errors import KeyNotFoundError, StoreTimeoutError

_LOOK = 0.5  # seconds until a thread that waits sees that it is to end


class MemstoreWeightSyncScheme(WeightSyncScheme):
    """Sends the weights of a policy to TorchRL's collectors by a store: `weight_sync_schemes={"policy": scheme}`.

    A worker copies each newer version into its policy, in a thread, which may be while the policy acts, as with
    TorchRL's own schemes: with `acknowledge`, and a collector that waits for its batches, it isn't. The scheme is
    pickled by the store's path.

    Args:
        store: a store that all workers can open.
        key: where the weights are put. Beside it, each worker puts the version that it has, in `KEY/workers/NUMBER`.
        strategy: as of TorchRL's schemes.
        acknowledge: whether `send` waits until the workers have the weights. False: they get them soon.
        timeout: seconds that `send` waits for them, and a worker for the first version.
    """

    def __init__(
        self,
        store: memstore.Store,
        key: str,
        *,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        acknowledge: bool = True,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(strategy)
        self.store, self.key, self.acknowledge, self.timeout = store, key, acknowledge, timeout
        self.version = 0  # the last one that was put, or copied into the policy

    # --- in the trainer's process ------------------------------------------------------------------------------------

    def _init_on_sender_impl(
        self, *, model_id: str = "policy", context: Any = None, weights: Any = None, model: Any = None, **_: Any
    ) -> None:
        self.model_id = model_id
        if context is not None:
            self.context = context
        if model is not None:
            self.model = model
        if weights is not None:
            self.weights = weights
        for number in range(self._workers()):  # what an earlier run has left
            self.store.delete(self._place_of(number), missing_ok=True)

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any | None = None
    ) -> None:
        self._put(weights)

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Puts weights, and waits until the workers have them.

        Args:
            weights: a module, a TensorDict, a state_dict; None: those of the collector's policy.
            worker_ids: which workers are waited for; None: all. All of them get the weights.

        Raises:
            StoreTimeoutError: a worker hasn't got them in time, and is named. The weights are in the store.
        """
        if not self.synchronized_on_sender:
            raise RuntimeError("connect() comes before send()")
        self._put(weights)
        if not self.acknowledge:
            return
        numbers = (
            range(self._workers())
            if worker_ids is None
            else [worker_ids]
            if isinstance(worker_ids, int)
            else worker_ids
        )
        deadline = time.monotonic() + self.timeout
        for number in numbers:
            place, seen = self._place_of(number), 0
            while self.store.get(place, 0) < self.version:
                try:
                    seen = self.store.wait(place, newer_than=seen, timeout=max(deadline - time.monotonic(), 0.0))
                except StoreTimeoutError:
                    raise StoreTimeoutError(
                        f"worker {number} doesn't have version {self.version:,} of {self.key!r} after "
                        f"{self.timeout:g} s: look whether it lives, or say acknowledge=False"
                    ) from None

    def _put(self, weights: Any) -> None:
        found = self.prepare_weights(weights, self.model_id or "policy", self.strategy, self.context)
        if found is None:
            found = self.weights
        self.version = self.store.put(self.key, getattr(found, "data", found))

    def _workers(self) -> int:
        return int(getattr(self.context, "num_workers", 0))

    # --- in a worker's process ---------------------------------------------------------------------------------------

    def _init_on_receiver_impl(
        self, *, model_id: str, context: Any = None, worker_idx: int | None = None, model: Any = None, **_: Any
    ) -> None:
        self.model_id = model_id
        self.version = 0
        if context is not None:
            self.context = context
            worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
        if model is not None:
            self.model = model
        self.worker_idx = worker_idx

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        if worker_idx is not None:
            self.worker_idx = worker_idx
        self.store.wait(self.key, newer_than=0, timeout=self.timeout)
        self.receive()
        self._start_background_receiver()

    def receive(self, timeout: float | None = 0.0) -> Any:
        """Copies the newest version into the policy, if there is a newer one.

        Args:
            timeout: seconds to wait for one; None: until there is one.

        Returns:
            The weights, or None.
        """
        try:
            self.store.wait(self.key, newer_than=self.version, timeout=float("inf") if timeout is None else timeout)
        except StoreTimeoutError:
            return None
        try:
            found = self.store.ref(self.key)
        except KeyNotFoundError:  # deleted since
            return None
        weights = found.get()
        # A collector sends its workers a policy without memory: the first weights are mapped, later ones copied there.
        has_memory = not any(tensor.is_meta for tensor in self.model.parameters())
        self.strategy.apply_weights(self.model, weights, inplace=has_memory)
        self.version = found.version
        if hasattr(self.context, "update_policy_weights_"):  # of collectors below, and the version that is counted
            self.context.update_policy_weights_(model_id=self.model_id or "policy", policy_or_weights=weights)
        if self.worker_idx is not None:
            self.store.put(self._place_of(self.worker_idx), self.version)
        return weights

    def _wait_for_instruction(self, timeout: float | None = None) -> str | None:
        while self._stop_event is not None and not self._stop_event.is_set():
            try:
                self.store.wait(self.key, newer_than=self.version, timeout=_LOOK)
                return "receive"
            except StoreTimeoutError:
                continue
        return None

    # --- both --------------------------------------------------------------------------------------------------------

    def create_transport(self, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("the store is the transport")

    def _place_of(self, number: int) -> str:
        return f"{self.key}/workers/{number}"
