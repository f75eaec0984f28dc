"""materialize_module: real tensors in a module's places."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from memstore.deferred_init.fitting import Materialized, Wish, fill
from memstore.deferred_init.replay import one_at_a_time
from memstore.deferred_init.shards import Placements
from memstore.deferred_init.slots import deferred_slots, names_of
from memstore.deferred_init.sources import Table

_log = logging.getLogger("memstore")


def materialize_module(
    module: torch.nn.Module,
    buffers_only: bool = False,
    check_fn: Callable[[torch.nn.Module], bool] | None = None,
    *,
    source: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    mesh: Any = None,
    placements: Placements | None = None,
) -> Materialized:
    """Makes the tensors of a module and its descendants real, in place.

    Args:
        module: what `deferred_init` returned, or a part of it. What is real already stays as it is.
        buffers_only: leave parameters as they are.
        check_fn: which modules to materialize; it is called for each, children first.
        source: where weights come from: a `Snapshot`, a view, a state dict (dicts in dicts have names with dots), or
            the path of a snapshot, of a safetensors file, or of a folder as Hugging Face's. What stands before all its
            names (`model.`, a name in a snapshot) is left out. Weights are mapped, copy on write, where they need no
            conversion: nothing is read, and processes share their pages. Of a state dict they are its tensors. What the
            source lacks is replayed.
        device: where tensors shall be; None: where the constructor has put them.
        dtype: of floating tensors; None: as the constructor has chosen. Others keep theirs.
        mesh: a DeviceMesh: tensors become DTensors, and each rank reads, or keeps of what it replays, its own part.
        placements: with `mesh`: torch's placements for all parameters; or a dict by name, or a function of name and
            tensor, for parameters and buffers. Where these have None, each rank has the whole tensor.

    Returns:
        The names of what was found in the source, and of what was replayed.

    Raises:
        StructureMismatchError: shapes or kinds of dtypes differ; all differences are listed. Or the source has none of
            the module's names. The module is as it was.
        UnsupportedValueError: a tensor can't be replayed; the message names the operator.
        NotAStoreError, CorruptionError: there is nothing at the path, or it is damaged.
        TypeError: it is no source; or only one of `mesh` and `placements` is there.
    """
    if (mesh is None) != (placements is None):
        raise TypeError("mesh and placements belong together, and one of them is missing")
    names = names_of(module)
    slots = deferred_slots(module, check_fn)
    if buffers_only:
        parameters = set(map(id, module.parameters()))
        slots = [slot for slot in slots if id(slot.tensor) not in parameters]
    table = None
    if source is not None and slots:
        table = Table(source, [name for slot in slots if slot.is_saved for name in names[id(slot.tensor)]])
    wish = Wish(None if device is None else torch.device(device), dtype, mesh, placements)
    with one_at_a_time():
        done = fill(slots, names, table, wish)
    missing = [slot.name for slot in slots if slot.is_saved and slot.name in done.replayed]
    if table is not None and missing:
        _log.info("%s lacks %d weights, which were replayed: %s", table.title, len(missing), ", ".join(missing[:20]))
    return done
