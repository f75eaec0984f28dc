"""Modules: deferred_init records how they are made, and materialize_module makes their tensors real.

`fill` puts tensors into a module's slots: what fits is taken from the source, what is missing is replayed. What an
earlier call has put into the module stays as it is, here and where it is tied. What was only looked at, by
`materialize_tensor`, gets the source's values too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.nn.parameter import is_lazy

from memstore._compat import DisableTorchFunction
from memstore._wording import an
from memstore.deferred_init.replay import Recording, one_at_a_time
from memstore.deferred_init.slots import (
    MaterializeOptions,
    Names,
    Placements,
    TensorSlot,
    check_placements,
    deferred_slots,
    is_on,
    names_of,
    refuse_unknown,
    slots_of,
)
from memstore.deferred_init.sources import SourceTable, WeightLoader
from memstore.deferred_init.tensors import (
    Swaps,
    all_within,
    as_before,
    become,
    have_same_slots,
    is_deferred_tensor,
    is_placed,
    is_wrapper,
    made_for_now,
    made_of,
    materialize,
    note_new_parameters,
    note_placed,
    note_wrapper,
    plainly,
)
from memstore.engine import syscalls
from memstore.fake import Session, in_session
from memstore.structure import modes, own_device
from memstore.view import distribute

# --- What a user calls -----------------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")


@modes.uncompiled
def deferred_init(module_fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Makes a module whose tensors take no memory yet. Operations on them are recorded, and replayed later.

    A replay gives the same bits as the constructor would have given now, random numbers included, in whichever order
    parts are materialized. Nothing is drawn from torch's generators, but they get new seeds, so random numbers that are
    drawn afterwards don't depend on the module.

    If the constructor reads values, the operations on which they depend are replayed at once.

    Args:
        module_fn: the module's class, or any callable that makes the module.
        args: the positional arguments of `module_fn`.
        kwargs: its keyword arguments.

    Returns:
        The result of `module_fn`. Tensors that existed before aren't changed.

    Raises:
        UnsupportedValueError: an operator can't be recorded; the message names it.
        TypeError: `module_fn` is a module.
        Exception: whatever `module_fn` raises.

    Example:
        >>> import torch
        >>> from memstore.deferred_init import deferred_init, is_deferred, materialize_module
        >>> model = deferred_init(torch.nn.Linear, 4, 2)
        >>> model.weight
        Parameter containing:
        tensor(..., size=(2, 4), requires_grad=True, fake=True)
        >>> materialize_module(model)
        Materialized(0 found, 2 replayed)
        >>> is_deferred(model), model(torch.ones(4)).shape
        (False, torch.Size([2]))
    """
    made: Any = module_fn  # anybody's
    if isinstance(made, torch.nn.Module):
        name = type(made).__qualname__
        raise TypeError(
            f"module_fn makes a module, and this {name} is made already: give its class and its arguments, as in "
            f"deferred_init({name}, ...)"
        )
    note_new_parameters()
    with in_session(Session(Recording())) as session:
        result = module_fn(*args, **kwargs)
        with DisableTorchFunction():
            for one in _tensors_of(result):
                session.note(one)
                note_wrapper(one)
    return result


@modes.uncompiled
def is_deferred(obj: torch.Tensor | torch.nn.Module) -> bool:
    """Returns whether a tensor, or a tensor of a module, is deferred.

    Args:
        obj: a tensor or a module.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(obj, torch.Tensor):
        return is_deferred_tensor(obj)
    found: Any = obj  # anybody's
    if isinstance(found, torch.nn.Module):
        return any(is_deferred_tensor(one) for one in _tensors_of(found))
    raise ValueError(f"a tensor or a module is needed, and this is {an(type(obj))}")


@modes.uncompiled
def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the real tensor for a deferred one, of the same class and with the same attributes.

    The deferred one stays as it is. A second call returns the same result, until `materialize_module` makes the
    deferred one real itself; both share their memory then. Tensors that share memory share it in their results.

    Args:
        tensor: a deferred tensor. A real tensor is returned as it is.

    Raises:
        UnsupportedValueError: it can't be replayed; the message names the operator, and says why.
        TypeError: it is no tensor.
    """
    given: Any = tensor
    if not isinstance(given, torch.Tensor):
        instead = ": materialize_module takes modules" if isinstance(given, torch.nn.Module) else ""
        raise TypeError(f"materialize_tensor takes a tensor, and not {an(type(given))}{instead}")
    return materialize([tensor])[0]


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a module and its descendants, or a tensor itself."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return [slot.tensor for module in value.modules() for slot in slots_of(module)]
    return []


# --- materialize_module ----------------------------------------------------------------------------------------------


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
    _check_arguments(module, buffers_only, dtype)
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
        table = SourceTable(source, list(saved.values()))
    options = MaterializeOptions(own_device(device), dtype, mesh, placements, names)
    with one_at_a_time():
        done = fill(slots, table, options)
    if table is not None:
        _report(table, [slot for slot in slots if slot.is_saved and slot.name in done.replayed], names)
    return done


def _check_arguments(module: Any, buffers_only: Any, dtype: Any) -> None:
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


def _report(table: SourceTable, slots: Sequence[TensorSlot], names: Names) -> None:
    """Logs what wasn't taken."""
    has = {slot.name: any(table.find(name) is not None for name in names[id(slot.tensor)]) for slot in slots}
    missing, left = [name for name in has if not has[name]], [name for name in has if has[name]]
    if missing:
        _log.info("%s lacks %d weights, which were replayed: %s", table.title, len(missing), ", ".join(missing[:20]))
    if left:
        text = "%s has %d weights that were not taken, as the module's were real already: %s"
        _log.info(text, table.title, len(left), ", ".join(left[:20]))


# --- Fill the slots --------------------------------------------------------------------------------------------------


_TRIMMED_EVERY = 32 << 20  # bytes


class Materialized(NamedTuple):
    """Names of the tensors that were made real. Made by `materialize_module`.

    Attributes:
        found: those that were taken from the source.
        replayed: all others; among them those that a former call has put into the module, in another place.
    """

    found: tuple[str, ...]
    replayed: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Materialized({len(self.found)} found, {len(self.replayed)} replayed)"


def fill(slots: Sequence[TensorSlot], table: SourceTable | None, options: MaterializeOptions) -> Materialized:
    """Puts real tensors into slots. After any error nothing was changed: `as_before` and `Swaps` undo what was.

    Raises:
        StructureMismatchError: tensors of the source don't fit; all are listed.
        MemstoreError: see `materialize_module`.
    """
    slots = [slot for slot in slots if is_deferred_tensor(slot.tensor)]  # another thread may have made them since
    in_turn = sorted(slots, key=lambda slot: not slot.is_parameter)  # what is one is spread as one, wherever it is too
    looked_at = {id(slot.tensor): made_of(slot.tensor) for slot in in_turn}
    with as_before(slot.tensor for slot in in_turn), Swaps() as swaps:
        # 1. What a former call has put into the module stays as it is.
        placed = {id(slot.tensor) for slot in in_turn if is_placed(slot.tensor)}
        todo = [slot for slot in in_turn if id(slot.tensor) not in placed]
        # 2. The source's tensors are checked, all of them, then read or mapped. No memory of the module's changes.
        loader = None if table is None else WeightLoader(slots, todo, table, options)
        if loader is not None:
            loader.check()
            loader.take()
        # 3. The rest is replayed, all at once. For a mesh each tensor is replayed when it is spread.
        if options.mesh is None:
            materialize(slot.tensor for slot in todo if made_of(slot.tensor) is None and not is_wrapper(slot.tensor))
        # 4. The source's values are written into storages that several tensors show.
        if loader is not None:
            loader.write()
        # 5. What was made is spread, moved and converted.
        made = _all_finished(in_turn, placed, options)
        # 6. The deferred tensors become real as the same objects, but for those in whose place another object belongs.
        with plainly():
            within = {id(part) for slot in todo for part in all_within(slot.tensor)}  # what was made is in wrappers
            for slot, one in zip(in_turn, made, strict=True):
                tensor = slot.tensor
                is_done = id(tensor) in placed or id(tensor) in within or swaps.deferred(tensor) is not None
                if is_done or made_of(tensor) is not one or not have_same_slots(type(tensor), type(one)):
                    continue
                if one is looked_at[id(tensor)]:  # materialize_tensor has returned it: it stays, and shares its memory
                    if id(one) in options.names or is_lazy(one):
                        continue  # a user has put it into the module: what is tied to it becomes that object
                    one = become(tensor, one.detach())
                swaps.swap(slot.name, tensor, one)
    # 7. They are in the slots.
    for slot, one in zip(in_turn, made, strict=True):
        deferred = swaps.deferred(slot.tensor)
        slot.put(one if deferred is None else slot.tensor)  # a scripted module's home is in C++
        note_placed(slot.tensor if deferred is None else deferred)
    taken = {id(slot.tensor) for slot, _ in loader.found} if loader is not None else set[int]()
    saved = {id(slot.tensor) for slot in slots if slot.is_saved}
    named = [slot for slot in slots if slot.is_saved or id(slot.tensor) not in saved]
    return Materialized(
        tuple(slot.name for slot in named if id(slot.tensor) in taken),
        tuple(slot.name for slot in named if id(slot.tensor) not in taken),
    )


def _all_finished(
    slots: Sequence[TensorSlot], placed: Container[int], options: MaterializeOptions
) -> list[torch.Tensor]:
    """Finishes what was made for each slot, and returns memory to the system that the C library would keep."""
    made: list[torch.Tensor] = []
    freed = 0
    for slot in slots:
        made.append(materialize([slot.tensor])[0] if id(slot.tensor) in placed else _finished(slot, options))
        freed += 0 if options.mesh is None or is_lazy(slot.tensor) else slot.tensor.nbytes
        if freed >= _TRIMMED_EVERY:
            freed = 0
            syscalls.trim_heap()
    return made


def _finished(slot: TensorSlot, options: MaterializeOptions) -> torch.Tensor:
    """Finishes what was made for a slot, as it is wanted.

    Tensors are spread one by one: all are never there at once.
    """
    tensor = slot.tensor
    made, dtype, spread = made_of(tensor), options.dtype_of(tensor), options.spread_of(slot)
    # A lazy one that the source lacks has no shape, and can't be spread.
    is_spread = is_wrapper(tensor) or is_lazy(tensor) or (made is not None and is_wrapper(made))
    if spread is not None and not is_spread:
        whole = made_for_now(tensor) if made is None else made
        return become(tensor, distribute(whole.detach(), *spread, dtype))
    if made is None:
        made = materialize([tensor])[0]
    device = made.device if options.device is None and options.mesh is None else options.device_of(tensor)
    if made.dtype != dtype or not is_on(made.device, device):
        return become(tensor, made.detach().to(device=device, dtype=dtype))
    return made
