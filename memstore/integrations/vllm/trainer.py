"""MemstoreTrainer: the trainer's engine, which puts weights into a store and tells vLLM's workers to load them.

`send_weights` puts first, and then drives the phases back to back. So a trainer that dies leaves a whole version, and
at most a session that is open: the next one ends it, and begins anew (`update_workers`). No rank of the trainer meets a
worker: a worker that was away loads the newest version when it comes back.
"""

# vLLM's classes are unknown where this is checked.
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    Replicate,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from memstore.errors import KeyNotFoundError
from memstore.integrations.vllm.weights import BASE, CHANGED, WEIGHTS, Round, keeping
from memstore.integrations.vllm.worker import MemstoreInitInfo
from memstore.sharding import TensorShard
from memstore.store.opening import open as open_store
from memstore.store.store import Store

Names = Callable[[str], bool] | Iterable[str]


@dataclass
class MemstoreTrainerInitInfo(TrainerInitInfo):
    """The place of the weights, and how they are put. `rank` is this process's rank among the trainer's.

    Attributes:
        root: the folder of the store, which the workers open by the same path.
        key: the key.
        cluster: the address of the store's cluster, where hosts share it.
        prefix: removed by the workers from the front of the source's names; tensors without it are left out there.
        names: the workers' names, by the source's without the prefix.
        dtype: as "bfloat16": floating-point tensors are cast while they are put; None: as they are.
    """

    backend: ClassVar[str] = "memstore"

    root: str
    key: str = "weights"
    cluster: str | None = None
    prefix: str = ""
    names: dict[str, str] | None = None
    dtype: str | None = None

    @property
    def for_workers(self) -> dict[str, Any]:
        return asdict(MemstoreInitInfo(self.root, self.key, self.cluster, self.prefix, self.names))


class MemstoreTrainer(TrainerWeightTransferEngine[MemstoreTrainerInitInfo]):
    """vLLM's trainer engine for the backend "memstore". Every rank of the trainer makes one, and calls its methods.

    Attributes:
        store: the store that it puts into.
        sent: the round that was put last.
    """

    init_info_cls = MemstoreTrainerInitInfo

    def __init__(self, info: MemstoreTrainerInitInfo, client: Any, source: WeightSource) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender, rank=info.rank)
        self._info = info
        self._dtype: torch.dtype | None = None if info.dtype is None else getattr(torch, info.dtype)
        self.store: Store = open_store(info.root, cluster=info.cluster)
        self.sent = Round(0)
        self._changed: dict[str, None] = {}  # the names that were sent since the whole

    @classmethod
    def trainer_init(
        cls, init_info: MemstoreTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> MemstoreTrainer:
        """Opens the store, and tells the workers where it is.

        Raises:
            ValueError: there is no source.
            RuntimeError: the trainer has several ranks, and torch.distributed isn't initialised.
        """
        if source is None:
            raise ValueError("the backend 'memstore' puts the weights of a WeightSource: source=ModuleSource(model)")
        owners = {rank for meta in source.metadata for rank in meta.owners or (0,)}
        if (max(owners) > 0 or init_info.rank > 0) and not dist.is_initialized():
            raise RuntimeError(
                f"the trainer has rank {max(*owners, init_info.rank)}: several ranks agree on a version by the default "
                "process group, so call torch.distributed.init_process_group before"
            )
        engine = cls(init_info, client, source)
        if engine.is_sender:
            client.init_weight_transfer_engine(init_info.for_workers)
        return engine

    def send_weights(self, changed: Names | None = None) -> Round:
        """Puts the weights as one version, and has the workers load it. Every rank of the trainer calls it.

        Args:
            changed: the names of what is trained, or a function that says so of a name: only these are put, with those
                that were named since the last whole version. None: all.

        Raises:
            KeyNotFoundError: what has changed is sent before a whole version.
            MemstoreError: as of a put; or of the client, whose errors are its own. Then the version was put.
        """
        self.sent = self.put_weights(changed)
        if self.is_sender:
            info = self._info
            update_workers(self.client, self.store, info.key, self.sent, place=info.for_workers)
        return self.sent

    def put_weights(self, changed: Names | None = None) -> Round:
        """Puts the weights, and tells nobody. Arguments and errors as `send_weights`."""
        key = self._info.key
        if changed is None:
            self._changed.clear()
            return Round(self._put(key, self._local(None)))
        if not self.sent.version:
            raise KeyNotFoundError(
                f"{key!r}: what has changed was to be sent before a whole version: call send_weights() once", key=key
            )
        source = self._given()
        is_wanted = changed if callable(changed) else frozenset(changed).__contains__
        self._changed.update({meta.name: None for meta in source.metadata if is_wanted(meta.name)})
        value = {BASE: self.sent.version, WEIGHTS: self._local(self._changed)}
        return Round(self.sent.version, self._put(key + CHANGED, value))

    def shutdown(self) -> None:
        """Closes the store. What was put stays."""
        self.store.close()

    def _given(self) -> WeightSource:
        assert self.source is not None, "trainer_init has refused this"
        return self.source

    def _put(self, key: str, value: dict[str, Any]) -> int:
        if dist.is_initialized() and dist.get_world_size() > 1:
            version = self.store.put_sharded(key, value, dtype=self._dtype)
            assert isinstance(version, int), "it has waited"
            return version
        return self.store.put(key, value, dtype=self._dtype)

    def _local(self, names: Iterable[str] | None) -> dict[str, Any]:
        """Returns what this rank puts of the source: its own pieces, where the source has them."""
        source, wanted = self._given(), None if names is None else frozenset(names)
        metas = {meta.name: meta for meta in source.metadata}
        found: dict[str, Any] = {}
        if source.implements_iter_local():
            for name, tensor in source.iter_local():
                if wanted is None or name in wanted:
                    found[name] = piece(metas[name], self.rank, tensor.detach())
            return found
        for name, tensor in source.iter_full():  # which gathers: every rank takes part, and the first owner puts
            first = (metas[name].owners or (0,))[0]
            if self.rank == first and (wanted is None or name in wanted):
                found[name] = tensor.detach()
        return found


def piece(meta: ParamMeta, rank: int, local: torch.Tensor) -> Any:
    """Returns the part of a tensor that this rank has, with its place in the whole."""
    if meta.owners is None or meta.placements is None:
        return local
    position, offsets, sizes = meta.owners.index(rank), [0] * len(meta.shape), list(meta.shape)
    assert meta.mesh_shape is not None, "of a tensor with owners"
    coordinates: list[int] = []
    for size in reversed(meta.mesh_shape):
        position, coordinate = divmod(position, size)
        coordinates.insert(0, coordinate)
    for coordinate, count, placement in zip(coordinates, meta.mesh_shape, meta.placements, strict=True):
        if not isinstance(placement, Replicate):  # a shard, cut as torch.chunk cuts
            dim, length = placement.dim, sizes[placement.dim]
            chunk = -(-length // count)
            start = min(coordinate * chunk, length)
            offsets[dim] += start
            sizes[dim] = min(chunk, length - start)
    if tuple(local.shape) != tuple(sizes):
        raise ValueError(
            f"the source yields {meta.name!r} with shape {list(local.shape)} on rank {rank}; of {list(meta.shape)} "
            f"with placements {meta.placements} that rank has {sizes}"
        )
    return TensorShard(local, tuple(meta.shape), tuple(offsets))


# --- The phases ------------------------------------------------------------------------------------------------------


def update_workers(
    client: Any, store: Store, key: str, wanted: Round | None = None, *, place: dict[str, Any] | None = None
) -> Round:
    """Has the workers of a client load one round: the newest, or the one that is given. All ranks load the same.

    A session that another trainer has left open, as one that was killed, is ended first.

    Args:
        client: of vLLM's, as HTTPVLLMWeightSyncClient(url); or LocalClient(llm).
        store: the store, as this process has it.
        key: the key.
        wanted: the round; None: the newest.
        place: as init info of the workers; None: they know it.

    Raises:
        KeyNotFoundError: there are no weights yet.
        Exception: of the client: its errors are its own.
    """
    with keeping(store, key, wanted) as found:
        if not found.version:
            raise KeyNotFoundError(f"{key!r}: there are no weights under this key yet", key=key)
        _start(client)
        info = {"version": found.version, "changed": found.changed}
        client.update_weights(info if place is None else {**info, "place": place})
        client.finish_weight_update(str(found))
        return found


def _start(client: Any) -> None:
    """Starts a session. Workers refuse that while one is open, and know no other reason."""
    try:
        client.start_weight_update()
    except Exception as refused:
        try:
            client.finish_weight_update()
        except Exception:
            raise refused from None
        client.start_weight_update()


class LocalClient:
    """A client of vLLM's phases for an engine in this process: `vllm.LLM`, or what has its four methods.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tells the workers where the weights are."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begins a session."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        """Has the workers load a round."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends the session."""
        self._llm.finish_weight_update(weight_version)
