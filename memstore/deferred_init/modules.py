"""materialize_module: real tensors in place of a module's deferred ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memstore import modes
from memstore.deferred_init.fitting import Materialized, fill
from memstore.deferred_init.replay import one_at_a_time
from memstore.deferred_init.shards import Placements, check_placements
from memstore.deferred_init.slots import Slot, deferred_slots, names_of, refuse_unknown
from memstore.deferred_init.sources import Table
from memstore.deferred_init.wishes import Names, Wish
from memstore.structure import own_device
from memstore.wording import an

_log = logging.getLogger("memstore")


@modes.uncompiled
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
    """Makes the tensors of a module and its descendants real, as the same objects: who has them has the real ones.

    An optimizer that was made before trains, and ties, hooks and weak references last. With `mesh`, plain tensors
    become DTensors, which are new objects.

    Args:
        module: the result of `deferred_init`, or a part of it. Tensors that are already real aren't changed.
        buffers_only: materialize only buffers, and no parameters.
        check_fn: says for each module, children first, whether to materialize it.
        source: a `Snapshot`, a view, a state dict (nested dicts have names with dots), or the path of a snapshot, of a
            safetensors file, or of a folder in Hugging Face's format. A prefix that all its names have (`model.`, the
            name in a snapshot) is ignored. If the module's names are in one part of the source only, that part is used,
            and its prefix is ignored. Weights that need no conversion are mapped, copy-on-write: nothing is read yet,
            and processes share their pages. From a state dict, the module takes the tensors themselves. Tensors that
            the source lacks are replayed.
        device: the tensors' device; None keeps the constructor's choice.
        dtype: the dtype of floating-point tensors; None keeps the constructor's choice. Other tensors keep theirs.
        mesh: a DeviceMesh. Tensors become DTensors, and each rank reads or keeps only its own part.
        placements: with `mesh`, torch's placements for all parameters; or a dict by name, or a function of name and
            tensor, for parameters and buffers. A tensor whose placements are None is whole on each rank. A dict may
            have any name of a tied tensor; a function gets the first.

    Returns:
        The names of the tensors that were found in the source, and of those that were replayed.

    Raises:
        StructureMismatchError: shapes or kinds of dtypes differ, or the source has different values for what is tied or
            shares memory in the module, and the message lists all differences; or the source has none of the module's
            names, or several parts of it have them; or `placements` has names that the module lacks. The module is
            unchanged, as after any error.
        UnsupportedValueError: a tensor can't be replayed; the message names the operator. Or a tensor was made in
            `fake_mode`, or is a DTensor that was written or converted while it was deferred, or C++ code has a weak
            reference of it; the message names it.
        NotAStoreError, CorruptionError: there is nothing at the path, or it is damaged.
        TypeError: `module` isn't a module, `source` is of an unknown type, `dtype` isn't a dtype, or only one of `mesh`
            and `placements` is given.
    """
    _check(module, buffers_only, dtype)
    if (mesh is None) != (placements is None):
        raise TypeError("mesh and placements belong together, and one of them is missing")
    names = names_of(module)
    check_placements(placements, names.values())
    slots = deferred_slots(module, check_fn)
    if buffers_only:
        parameters = set(map(id, module.parameters()))
        slots = [slot for slot in slots if id(slot.tensor) not in parameters]
    refuse_unknown(slots)
    table = None
    if source is not None and slots:
        saved = {id(slot.tensor): names[id(slot.tensor)] for slot in slots if slot.is_saved}
        table = Table(source, list(saved.values()))
    wish = Wish(own_device(device), dtype, mesh, placements, names)
    with one_at_a_time():
        done = fill(slots, table, wish)
    if table is not None:
        _report(table, [slot for slot in slots if slot.is_saved and slot.name in done.replayed], names)
    return done


def _check(module: Any, buffers_only: Any, dtype: Any) -> None:
    """Raises TypeError for what is no module, no flag, or no dtype of weights."""
    if not isinstance(module, torch.nn.Module):
        what = f"the class {module.__qualname__}" if isinstance(module, type) else an(type(module))
        raise TypeError(f"module is what deferred_init has returned, and not {what}")
    if not isinstance(buffers_only, bool):
        raise TypeError(
            f"buffers_only is True or False, and not {an(type(buffers_only))}: write source= before a snapshot, a "
            "view, a state dict or a path, and device= before a device"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a torch.dtype, such as torch.bfloat16, and not {dtype!r:.100}")
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"dtype is a floating-point dtype, such as torch.bfloat16, and not {dtype}")


def _report(table: Table, slots: Sequence[Slot], names: Names) -> None:
    """Logs what wasn't taken."""
    has = {slot.name: any(table.find(name) is not None for name in names[id(slot.tensor)]) for slot in slots}
    missing, left = [name for name in has if not has[name]], [name for name in has if has[name]]
    if missing:
        _log.info("%s lacks %d weights, which were replayed: %s", table.title, len(missing), ", ".join(missing[:20]))
    if left:
        text = "%s has %d weights that were not taken, as the module's were real already: %s"
        _log.info(text, table.title, len(left), ", ".join(left[:20]))
