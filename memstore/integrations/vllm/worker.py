"""MemstoreWorker: the engine in each of vLLM's workers, which loads versions of a store into its model.

An update has vLLM's phases, which the worker is told by its process group, and all ranks alike:

1. `start_weight_update` begins a reload (`begin_reload`): most layers stay as they are. Others, whose kernels want the
   weights in another form, become tensors without memory, and their loaders wait.
2. `update_weights` is told a round (`weights.Round`) by its numbers. It maps the round's tensors, and hands lazy leaves
   to the model's `load_weights`: a rank of tensor parallelism reads the bytes of its slices only. They are copied to
   where the model has them; those of another form once their layer is complete.
3. `finish_weight_update` ends the reload. Tensors of which nothing came have what they had.

A round that isn't there any more is an error before anything is copied. An error within the copies leaves tensors of two
versions, which `version` tells as None until an update has gone well.

A worker that knows its place by the environment takes the newest round when it is made: rank 0 says which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    layerwise_groups,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers
from vllm.platforms import current_platform

from memstore.errors import MemstoreError, NotAStoreError, PermissionDeniedError, ReadOnlyError
from memstore.integrations.vllm.weights import Round, Staging, TakenWeights, WeightsPlace, keeping, take_round
from memstore.store.store import Store

logger = init_logger(f"vllm.{__name__}")  # of vLLM's own levels and form

ENVIRONMENT = "MEMSTORE_VLLM_"


@dataclass
class MemstoreInitInfo(WeightTransferInitInfo):
    """The place of the weights. Fields as of `weights.WeightsPlace`."""

    root: str
    key: str = "weights"
    cluster: str | None = None
    prefix: str = ""
    names: dict[str, str] | None = None

    @property
    def place(self) -> WeightsPlace:
        return WeightsPlace(self.root, self.key, self.cluster, self.prefix, self.names)


@dataclass
class MemstoreUpdateInfo(WeightTransferUpdateInfo):
    """The round that all ranks are to load.

    Attributes:
        version: of the key. A number: "newest" could be another one on each rank.
        changed: the version of what has changed since; 0: nothing.
        place: as init info; None: as it was told before.
    """

    version: int
    changed: int = 0
    place: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, given in (("version", self.version), ("changed", self.changed)):
            value: Any = given
            if not isinstance(value, int) or isinstance(value, bool) or value < (name == "version"):
                raise ValueError(
                    f"{name} is the number of a version, and not {value!r:.100}: ranks that look for the newest one "
                    "would find others; memstore.integrations.vllm.update_workers looks once, and tells all"
                )


class MemstoreWorker(WeightTransferEngine[MemstoreInitInfo, MemstoreUpdateInfo]):
    """vLLM's engine for the backend "memstore".

    Attributes:
        version: the round that the model has; None: it has what it was started with, or an update has failed.
    """

    init_info_cls = MemstoreInitInfo
    update_info_cls = MemstoreUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._served = model  # an update may be for a draft model
        self.version: Round | None = None
        self._place: WeightsPlace | None = None
        self._store: Store | None = None
        place = place_of_environment(os.environ)
        if place is not None:
            self._turn_to(place)
            self._load_newest(place)

    # --- vLLM's phases ------------------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: MemstoreInitInfo) -> None:
        """Turns to the place that the trainer names. Raises what `memstore.open` raises."""
        self._turn_to(init_info.place)
        self._opened()

    def start_weight_update(self) -> None:
        """Begins a reload."""
        begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a round. The base class's waits for an accelerator, also where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MemstoreUpdateInfo) -> None:
        """Loads a round within a reload that was begun. Raises VersionGoneError, CorruptionError, ValueError."""
        try:
            if update_info.place is not None:
                self._turn_to(self.parse_init_info(update_info.place).place)
            self._load(Round(update_info.version, update_info.changed))
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        """Ends a reload that has failed: each layer that is not complete gets what it had."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Ends the reload."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Closes the store."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # --- the store ----------------------------------------------------------------------------------------------------

    def _turn_to(self, place: WeightsPlace) -> None:
        if place != self._place:
            self.shutdown()
            self._place, self.version = place, None

    def _opened(self) -> tuple[Store, WeightsPlace]:
        """Opens the store where that is to be done, also one that has come in the place of one that is gone."""
        if self._place is None:
            raise RuntimeError(
                "this worker doesn't know where the weights are: the trainer's engine tells it; or set "
                f"{ENVIRONMENT}ROOT and {ENVIRONMENT}KEY where vLLM starts"
            )
        if self._store is not None:
            try:
                self._store.version(self._place.key)
            except NotAStoreError:
                self.shutdown()
        if self._store is None:
            self._store = self._place.open("r")
        return self._store, self._place

    # --- loads --------------------------------------------------------------------------------------------------------

    def _load(self, wanted: Round) -> None:
        store, place = self._opened()
        taken = take_round(store, place, wanted)
        is_target = self.model is self._served
        chosen = self._needed(taken, wanted) if is_target else taken.tensors
        if is_target:
            self.version = None
        with disable_mtp_completeness_check(), self._staging():
            self.model.load_weights(_in_order(taken.tensors, chosen))
        if is_target:
            self.version = wanted
        logger.info("memstore: version %s of %s, %d tensors", wanted, place.key, len(chosen))

    def _needed(self, taken: TakenWeights, wanted: Round) -> frozenset[str]:
        """Returns the names that are to be loaded: all, or the layers of which something has changed.

        vLLM's reload fills a layer only once all of it has come, and a layer has the tensors of several names. So
        whoever has the same whole already is given all names of each decoder layer that has a change.
        """
        if not taken.changed or self.version is None or self.version.version != wanted.version:
            return frozenset(taken.tensors)
        groups = layerwise_groups(list(taken.tensors))
        return frozenset(name for group in groups if not taken.changed.isdisjoint(group) for name in group)

    def _staging(self) -> Any:
        return nullcontext() if self.device.type == "cpu" else Staging(self.device)

    def _load_newest(self, place: WeightsPlace) -> None:
        """Takes the newest round, if there is one, as a worker that comes late. All ranks take that of rank 0."""
        with self._agreed(place) as wanted, set_current_vllm_config(self.vllm_config):
            if not wanted.version:
                logger.info("memstore: no version of %s yet", place.key)
                return
            self.start_weight_update()
            self.receive_weights(MemstoreUpdateInfo(*wanted))
            self.finish_weight_update()

    @contextmanager
    def _agreed(self, place: WeightsPlace) -> Generator[Round]:
        """Gives the round that rank 0 finds, which is kept until all ranks have it."""
        group = get_world_group()
        with _newest(place) if group.rank_in_group == 0 else nullcontext(Round(0)) as wanted:
            if group.world_size == 1:
                yield wanted
                return
            wanted = Round(*group.broadcast_object(tuple(wanted), src=0))
            try:
                yield wanted
            finally:
                group.barrier()


@contextmanager
def _newest(place: WeightsPlace) -> Generator[Round]:
    """Keeps the newest round. Gives Round(0) where there is no store yet, or it can't be reached now."""
    with ExitStack() as kept:
        try:
            store = kept.enter_context(_open_to_keep(place))
            found = kept.enter_context(keeping(store, place.key))
        except MemstoreError as error:
            logger.warning("memstore: started with the model's own weights: %s", error)
            found = Round(0)
        yield found


def _open_to_keep(place: WeightsPlace) -> Store:
    """Opens a store so that versions can be pinned, where this process may write into it."""
    try:
        return place.open("r+")
    except (PermissionDeniedError, ReadOnlyError):
        return place.open("r")


def _in_order(tensors: Mapping[str, torch.Tensor], chosen: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gives tensors layer by layer: what comes in another order waits in memory until its layer is complete."""
    wanted = frozenset(chosen)
    for group in layerwise_groups(list(tensors)):
        for name in group:
            if name in wanted:
                yield name, tensors[name]


# --- Reloads ---------------------------------------------------------------------------------------------------------
# vLLM's layerwise reload loads a layer into new memory, makes of it what the layer's kernels take, and copies that to
# where the layer was: two copies, and the faults of the new memory. Most layers' kernels take what was loaded. Their own
# loaders fill them where they are, as when the model was made.


_AS_LOADED = frozenset({UnquantizedLinearMethod, UnquantizedEmbeddingMethod})  # where the platform doesn't pack them


def begin_reload(model: torch.nn.Module) -> None:
    """Begins vLLM's layerwise reload of all layers but those that are filled in place."""
    in_place = [info for layer in model.modules() if is_filled_in_place(layer, info := get_layerwise_info(layer))]
    for info in in_place:
        info.load_numel_total = 0  # as of a layer whose reload has begun, which vLLM passes over
    initialize_layerwise_reload(model)
    for info in in_place:
        info.reset()


def is_filled_in_place(layer: torch.nn.Module, info: LayerReloadingInfo) -> bool:
    """Returns whether a layer has its tensors as they were loaded: its kernels want no other form of them."""
    if info.can_load() or is_deferred_attention_layer(layer):
        return False
    method = getattr(layer, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        is_packed = current_platform.is_cpu() or current_platform.is_rocm() or current_platform.is_xpu()
        if is_packed or type(method) not in _AS_LOADED:
            return False
    return all(
        now.keys() - SKIP_TENSORS == loaded.keys() and all(_is_as_loaded(now[name], loaded[name]) for name in loaded)
        for now, loaded in zip(get_layer_params_buffers(layer), info.restore_metadata, strict=True)
    )


def _is_as_loaded(now: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Compares a tensor with what vLLM has recorded of it before anything was loaded: its loader, too."""
    return (
        type(now) is type(loaded)
        and (now.dtype, now.shape, now.stride()) == (loaded.dtype, loaded.shape, loaded.stride())
        and vars(now).keys() >= vars(loaded).keys()
    )


def place_of_environment(environment: Mapping[str, str]) -> WeightsPlace | None:
    """Returns the place that MEMSTORE_VLLM_ROOT, _KEY, _CLUSTER, _PREFIX and _NAMES (JSON) say; None: no root."""
    given = {
        name: environment.get(ENVIRONMENT + name.upper()) for name in ("root", "key", "cluster", "prefix", "names")
    }
    if not given["root"]:
        return None
    names = json.loads(given["names"]) if given["names"] else None
    return WeightsPlace(
        given["root"], given["key"] or "weights", given["cluster"] or None, given["prefix"] or "", names
    )
