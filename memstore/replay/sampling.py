"""Sampling: rows are picked, copied without a lock, and looked at again; or handed out once; or read by their age.

`sample` fills tensors with rows for the samplers that take nothing. `hand_out` does so for "fifo" and "lifo", which
give each row once to all processes together; `put_back` undoes that. `picker_for` chooses the picker of an opener.
`look_at_rows` and `rows_by_age` find rows without a sampler. `Samples` makes the TensorDicts that a user gets: of new
memory, or of the caller's. The rules: docs/decisions/015.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection

from memstore._arguments import flag
from memstore._compat import new_tensordict
from memstore._telling import tell
from memstore._threads import ABANDONED, check_abandoned, is_abandoned
from memstore._wording import an_instance
from memstore.datasets import NoLeafError
from memstore.engine import SAMPLES, Path, Root, deadline_after, open_mutable, resource_errors
from memstore.errors import ReadOnlyError, StoreTimeoutError, StructureMismatchError
from memstore.replay.entry import capacity_of
from memstore.replay.picking import ConsumingPicker, Dice, EachOnce, PickedSlots, Picker, Prioritized, Uniform
from memstore.replay.ring import READABLE, WHOLE, BufferWait, Ring, Slots, are_same, positions_of, words_of
from memstore.rows import copy_rows, is_kept, sharing
from memstore.structure import DTYPES, copy_into, modes, takes_bytes, to_device, why_not_filled

# --- Samples that take nothing ---------------------------------------------------------------------------------------


Targets = list[torch.Tensor]

_SMALL = 64 << 10  # bytes of a leaf's rows; from there on torch may be faster
_ROUNDS = 16  # before the rest is copied under the mutex
_PAUSE = 0.002  # seconds
_NONE = np.empty(0, np.int64)
LOADS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")  # elsewhere all is copied under the mutex


def new_targets(ring: Ring, rows: int) -> Targets:
    """Makes a tensor for each leaf, of its bits as integers: copies have no kernels for some dtypes."""
    return [torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in ring.tensors]


def sample(ring: Ring, picker: Picker, rows: int, targets: Targets, deadline: float) -> PickedSlots:
    """Fills targets with rows, and returns which rows they are. It changes nothing but the rate limiter's count.

    Raises StoreTimeoutError: there are no rows, or the rate limiter doesn't permit it.
    """
    # 1. Pick slots, and load their words.
    picked = picker.pick(rows, locked=False) if ring.limiter is None else None
    if picked is None:
        picked = wait_for_rows(ring, picker, rows, deadline, counts=True)
    # 2. Copy the rows, without a lock.
    # 3. Load the words again: rows that were overwritten meanwhile are wrong.
    wrong = copy_picked(ring, picked, targets) if LOADS_IN_ORDER else np.arange(rows)
    # 4. Replace them by others, which are picked, copied and checked likewise. After some rounds that is done under the
    #    mutex, where nothing can be claimed: so a sample always makes progress.
    rounds, began, retried = 0, 0.0, len(wrong) if LOADS_IN_ORDER else 0
    while len(wrong):
        began = began or time.perf_counter()
        if picker.together > 1:  # all rows of a slice, if one of them is wrong
            wrong = (
                np.unique(wrong // picker.together)[:, None] * picker.together + np.arange(picker.together)
            ).ravel()
        if time.monotonic() > deadline:
            raise StoreTimeoutError(
                f"{ring.key!r}: rows were written over faster than they could be copied", key=ring.key
            )
        rounds += 1
        if ring.entry.writable and (rounds > _ROUNDS or not LOADS_IN_ORDER):
            left = ring.run(_pick_again, deadline, ring, picker, picked, wrong, targets, locked=True)
        else:
            left = _pick_again(ring, picker, picked, wrong, targets, locked=False)
        if left is None:
            left = _replace(ring, picked, wrong, targets, wait_for_rows(ring, picker, len(wrong), deadline))
        wrong = left
    if retried:
        tell("replay retry", ring.entry.root.path, (ring.key,), 0, began, retried)
    return picked


def copy_picked(ring: Ring, picked: PickedSlots, targets: Targets) -> Slots:
    """Copies rows. Returns the numbers of the rows that were overwritten meanwhile."""
    slots = picked.slots
    for array, tensor, target in zip(ring.arrays, ring.tensors, targets, strict=True):
        if target.nbytes < _SMALL:  # by numpy at once: `copy_rows` would do the same, with twice as many calls
            array.take(slots, 0, target.numpy(), "clip")
        else:
            copy_rows(tensor, torch.from_numpy(slots), target, is_mapped=True)
    words: Any = ring.words.take(slots)
    if (words == picked.words).all():
        return _NONE
    return np.flatnonzero(~are_same(picked.words, words))


def _pick_again(
    ring: Ring, picker: Picker, picked: PickedSlots, wrong: Slots, targets: Targets, *, locked: bool
) -> Slots | None:
    """Replaces wrong rows by others that it picks. Returns the numbers of rows that are wrong again.

    The result is None if the picker finds too few.
    """
    others = picker.pick(len(wrong), locked=locked)
    return None if others is None else _replace(ring, picked, wrong, targets, others)


def _replace(ring: Ring, picked: PickedSlots, wrong: Slots, targets: Targets, others: PickedSlots) -> Slots:
    """Copies other rows in the place of wrong ones. Returns the numbers of rows that are wrong again."""
    copies = new_targets(ring, len(wrong))
    still = wrong[copy_picked(ring, others, copies)]
    places = torch.as_tensor(wrong)
    for target, copy in zip(targets, copies, strict=True):
        target[places] = copy
    picked.slots[wrong], picked.words[wrong] = others.slots, others.words
    if picked.odds is not None and others.odds is not None:
        picked.odds[wrong] = others.odds
    return still


def wait_for_rows(ring: Ring, picker: Picker, rows: int, deadline: float, *, counts: bool = False) -> PickedSlots:
    """Picks rows as soon as there are some, and the rate limiter permits it. Raises StoreTimeoutError.

    Args:
        counts: whether the rate limiter counts them. It doesn't where some rows of a sample are replaced, and then it
            stops nobody either.
    """
    if ring.entry.writable:
        wait = BufferWait(ring, SAMPLES, rows, deadline, picker.wants)
        return wait.until(_pick_locked, ring, picker, rows, wait if counts else None)
    # A process that may only read can't take the mutex, nor say that it sleeps.
    while (found := picker.pick(rows, locked=False)) is None:
        if ABANDONED:
            check_abandoned()
        ring.entry.check_in_place()
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeoutError(f"{ring.key!r}: {picker.wants(rows)}", key=ring.key)
        time.sleep(min(_PAUSE, left))
    return found


def _pick_locked(ring: Ring, picker: Picker, rows: int, wait: BufferWait | None) -> PickedSlots | None:
    """Picks rows under the mutex. With a `wait` the rate limiter counts them, once it lets them through."""
    if wait is not None and not wait.goes_on():
        return None
    picked = picker.pick(rows, locked=True)
    if picked is not None and wait is not None:
        _count_sampled(ring, rows)
    return picked


def _count_sampled(ring: Ring, rows: int) -> None:
    """Counts rows for the rate limiter, under the mutex; below 0 those that are put back."""
    if ring.limiter is not None:
        ring.numbers.sampled = max(ring.numbers.sampled + rows, 0)
        ring.page.ring()


# --- Rows that are handed out once -----------------------------------------------------------------------------------
# Each row is handed out once, to all openers together, the oldest first or the newest. See docs/decisions/015.


_HAND_OUT_ROUNDS = 3


def hand_out(ring: Ring, picker: ConsumingPicker, rows: int, targets: Targets, deadline: float) -> PickedSlots:
    """Fills targets with rows, and takes them. Raises StoreTimeoutError: too few wait, or a limiter doesn't permit it.

    A consumer that dies, or whose rows are overwritten, has taken only rows that it has got.
    """
    wait = BufferWait(ring, SAMPLES, rows, deadline, picker.wants)
    for _ in range(_HAND_OUT_ROUNDS if LOADS_IN_ORDER else 0):
        # 1. Pick rows that wait, and copy them, without the mutex. Killed up to here, it has taken nothing.
        picked = picker.pick(rows, locked=False) if ring.limiter is None else None
        if picked is None:
            picked = wait_for_rows(ring, picker, rows, deadline)
        copy_picked(ring, picked, targets)
        # 2. Take them, under the mutex, if they wait still. Otherwise another consumer was faster: begin anew.
        if ring.run(_take, deadline, ring, picker, picked, wait):
            return picked
    # 3. After some rounds, do all of it under the mutex.
    return wait.until(_pick_and_take, ring, picker, rows, targets, wait)


def _take(ring: Ring, picker: ConsumingPicker, picked: PickedSlots, wait: BufferWait) -> bool:
    """Takes rows under the mutex. Returns whether they were taken."""
    if ABANDONED and is_abandoned():  # they would be taken for nobody; `BufferWait.until` raises
        wait.leave()
        return False
    if not wait.may_go() or not picker.take(picked):
        return False
    wait.leave()
    _count_sampled(ring, len(picked.slots))
    return True


def _pick_and_take(
    ring: Ring, picker: ConsumingPicker, rows: int, targets: Targets, wait: BufferWait
) -> PickedSlots | None:
    """Picks, copies and takes rows, under the mutex."""
    picked = picker.pick(rows, locked=True)
    if picked is None:
        wait.leave()
        return None
    copy_picked(ring, picked, targets)
    return picked if _take(ring, picker, picked, wait) else None


def put_back(ring: Ring, picked: PickedSlots, deadline: float, *, are_taken: bool) -> None:
    """Undoes a sample that its caller doesn't get: its rows wait again, and the rate limiter doesn't count them.

    Args:
        are_taken: whether the sample took rows; else it was only counted.
    """
    if len(picked.slots) and (are_taken or ring.limiter is not None):
        ring.run(_put_back, deadline, ring, picked, are_taken=are_taken)


def _put_back(ring: Ring, picked: PickedSlots, *, are_taken: bool) -> None:
    """Puts rows back under the mutex.

    Killed in between, it leaves rows that are handed out, and a cursor before them, where no row waits.
    """
    if are_taken:
        still: Any = ring.words.take(picked.slots) == picked.words | 1
        slots, words = picked.slots[still], picked.words[still]
        if len(slots):
            # 1. Cursor, top and late: consumers look there again.
            positions, numbers = positions_of(words, slots, ring.capacity), ring.numbers
            numbers.count_published(int(positions.min()), int(positions.max()) + 1, numbers.added, ring.capacity)
            # 2. The rows wait, unless the ring has overwritten them.
            ring.words[slots] = words
        ring.page.ring()
    _count_sampled(ring, -len(picked.slots))


# --- The sampler of an opener ----------------------------------------------------------------------------------------


Sampler = Literal["uniform", "fifo", "lifo", "prioritized"]


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """The choices of an opener. Raises ValueError, TypeError: there is no such sampler."""

    sampler: Sampler
    replacement: bool
    beta: float

    def __post_init__(self) -> None:
        if self.sampler not in ("uniform", "fifo", "lifo", "prioritized"):
            raise ValueError(f"sampler is 'uniform', 'fifo', 'lifo' or 'prioritized', and not {self.sampler!r}")
        flag("replacement", self.replacement)
        if self.sampler == "prioritized" and not self.replacement:
            raise ValueError("replacement=False: rows that are drawn by priorities may come again; use 'uniform'")
        given: Any = self.beta
        if isinstance(given, str) or not hasattr(given, "__float__"):
            raise TypeError(f"beta is a number, 0 at least, and not {given!r:.100}")
        if not math.isfinite(self.beta) or self.beta < 0:
            raise ValueError(f"beta is a number, 0 at least, and not {self.beta!r}")


def picker_for(ring: Ring, options: SamplerOptions, dice: Dice) -> Picker:
    """Chooses the picker of an opener. Raises ReadOnlyError where samples are to be noted, and can't be."""
    if not ring.entry.writable and (options.sampler in ("fifo", "lifo") or ring.limiter is not None):
        what = "a rate limiter that counts them" if ring.limiter is not None else f"sampler={options.sampler!r}"
        raise ReadOnlyError(f"{ring.key!r}: samples with {what} are notes, and the store was opened with mode 'r'")
    if options.sampler in ("fifo", "lifo"):
        return ConsumingPicker(ring, newest=options.sampler == "lifo")
    if options.sampler == "prioritized" and ring.priorities is not None:
        return Prioritized(ring, ring.priorities, dice)
    return Uniform(ring, dice) if options.replacement else EachOnce(ring, dice)


# --- Rows without a sampler ------------------------------------------------------------------------------------------


class BufferRows(NamedTuple):
    """The slots of a buffer that rows were written to.

    Attributes:
        rows: how many rows can be sampled.
        capacity: how many slots there are.
        tensors: for each leaf the slots that were written, over the shared memory. Some may be half written, by a
            writer that goes on or has died.
    """

    rows: int
    capacity: int
    tensors: dict[Path, torch.Tensor]


@modes.put_aside()
def look_at_rows(root: Root, key: str, timeout: float) -> BufferRows:
    """Returns all slots where they lie. Raises KeyNotFoundError, MutableEntryError, CorruptionError."""
    with resource_errors(root.path, key, root), torch.inference_mode(False):
        ring = Ring(open_mutable(root, key, "buffer", capacity_of, deadline_after(timeout), writable=False))
        written = min(ring.numbers.head, ring.capacity)
        leaves = zip(ring.plan.leaves, ring.tensors, strict=True)
        tensors = {leaf.name: tensor[:written].view(DTYPES[leaf.dtype]) for leaf, tensor in leaves}
        return BufferRows(ring.numbers.rows, ring.capacity, tensors)


def rows_by_age(ring: Ring) -> Slots:
    """Returns the positions of all whole rows, in their order, also of those that were handed out."""
    words: Any = np.array(ring.words)
    slots = np.flatnonzero(words & READABLE)
    found: Slots = positions_of(words[slots], slots, ring.capacity)
    found.sort()
    return found


# --- The TensorDict of a sample --------------------------------------------------------------------------------------


INDEX, WEIGHT = "index", "weight"
ONLY = "data"  # the name of the leaf of a spec that is one tensor

Name = tuple[str, ...]


class Samples:
    """The form of a buffer's samples.

    Attributes:
        names: of the leaves, in their order.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.names: list[Name] = [tuple(map(str, leaf.name)) or (ONLY,) for leaf in ring.plan.leaves]
        self._dtypes = [DTYPES[leaf.dtype] for leaf in ring.plan.leaves]
        self._apart: list[Any] | None = None  # where the leaves of the last `out` lay, which share no memory

    def number_of_end(self, key: Any) -> int:
        """Returns the number of the leaf that says where episodes end. Raises KeyError, TypeError."""
        name = (key,) if isinstance(key, str) else key
        if name not in self.names:
            names = ", ".join(map(_shown, self.names))
            text = f"end_key: {self._ring.key!r} has no leaf {key!r}, but {names}; None: slices run over all"
            raise NoLeafError(text)
        number = self.names.index(name)
        if self._dtypes[number].is_complex or not self._ring.tensors[number].numel():
            shape = list(self._ring.plan.leaves[number].shape[1:])
            raise TypeError(f"end_key: {key!r} is of {self._dtypes[number]} {shape}, which tells no end")
        return number

    def index_of(self, picked: PickedSlots, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the positions of rows, as the caller gets them."""
        positions = torch.from_numpy(positions_of(picked.words, picked.slots, self._ring.capacity))
        return positions if len(shape) == 1 else positions.view(shape)

    def weights_of(self, picked: PickedSlots, beta: float) -> torch.Tensor:
        """Returns the weights of rows that were drawn by priorities, over the largest of them."""
        odds = np.ones(len(picked.slots)) if picked.odds is None else picked.odds
        weights = odds**-beta
        return torch.as_tensor(weights / weights.max() if len(weights) else weights, dtype=torch.float32)

    def build(self, targets: Targets, extra: dict[str, torch.Tensor], device: torch.device | None) -> TensorDict:
        """Makes a TensorDict of copied rows, and of `extra`, whose shapes begin with its batch size."""
        shape = extra[INDEX].shape
        entries: dict[Any, Any] = {}
        for name, dtype, target in zip(self.names, self._dtypes, targets, strict=True):
            tensor: Any = target if target.dtype is dtype else target.view(dtype)
            if len(shape) > 1:
                tensor = tensor.unflatten(0, shape)
            at: Any = entries
            for part in name[:-1]:
                at = at.setdefault(part, {})
            at[name[-1]] = _moved(tensor, device)
        entries |= {name: _moved(tensor, device) for name, tensor in extra.items()}
        return _collected(entries, shape, device)

    def copied(self, positions: Slots, deadline: float) -> TensorDict:
        """Copies the rows at positions, without those that were overwritten, to a TensorDict [n] with "index".

        A row is copied as a sample's is. Raises StoreTimeoutError where it takes the mutex.
        """
        ring = self._ring
        picked = PickedSlots(positions % ring.capacity, words_of(positions, ring.capacity, WHOLE))
        targets = new_targets(ring, len(positions))
        if LOADS_IN_ORDER or not ring.entry.writable:
            gone = copy_picked(ring, picked, targets)
        else:
            gone = ring.run(copy_picked, deadline, ring, picked, targets)
        if len(gone):
            left = np.delete(np.arange(len(positions)), gone)
            targets = [target[torch.from_numpy(left)] for target in targets]
            picked = PickedSlots(picked.slots[left], picked.words[left])
        return self.build(targets, {INDEX: self.index_of(picked, (len(picked.slots),))}, None)

    # --- out= ---------------------------------------------------------------------------------------------------------

    def targets(self, out: Any, rows: int, extra: tuple[str, ...]) -> Targets:
        """Returns the leaves of `out` that rows can be copied to at once, and new tensors for the others.

        Called before rows are picked: none are handed out for what can't be filled.

        Raises:
            StructureMismatchError: lists what is wrong.
        """
        wrong: list[str] = []
        targets: Targets = []
        places: list[Any] = []
        for found, row, dtype, name in self._pairs(out):
            shape = (rows, *row.shape[1:])
            if not is_kept(found, _found(out, name)):
                wrong.append(f"{_shown(name)} is a copy, which {an_instance(out)} makes when it is asked for it")
            elif (why := _why_not(found, shape, dtype)) is not None:
                wrong.append(f"{_shown(name)} is {why}")
            elif _is_plain(found):
                places.append(found.data_ptr())
                targets.append(found.detach().view(row.dtype))
            else:
                places.append((found.data_ptr(), found.stride()))
                targets.append(torch.empty(shape, dtype=row.dtype))
        for name in extra:
            dtype = torch.int64 if name == INDEX else torch.float32
            found = out.get(name, None)
            if (why := _why_not(found, (rows,), dtype)) is not None:
                wrong.append(f"{name!r} is {why}")
            else:
                places.append((found.data_ptr(), found.stride()))
        places.append(rows)
        if not wrong and places != self._apart:
            names = [*self.names, *((name,) for name in extra)]
            for one, other in sharing([_found(out, name) for name in names]):
                text = f"{_shown(names[one])} is a tensor that shares memory with {_shown(names[other])}"
                wrong.append(f"{text}: give each its own")
            self._apart = None if wrong else places
        if wrong:
            key = self._ring.key
            raise StructureMismatchError(f"{key!r}: out doesn't fit a sample: {'; '.join(wrong)}", key=key)
        return targets

    def fill(self, out: Any, targets: Targets, extra: dict[str, torch.Tensor]) -> Any:
        """Copies what was not copied to `out` at once."""
        for (found, _, dtype, _), target in zip(self._pairs(out), targets, strict=True):
            if not _is_plain(found):
                copy_into(found, target.view(dtype))
        with torch.no_grad():
            for name, tensor in extra.items():
                found = out.get(name)
                if found.is_inference():
                    copy_into(found, tensor)
                else:
                    found.copy_(tensor)  # a third of the time
        return out

    def _pairs(self, out: Any) -> Iterator[tuple[Any, torch.Tensor, torch.dtype, Name]]:
        if isinstance(out, type) or not is_tensor_collection(out):
            raise TypeError(f"out is {an_instance(out)}, and not the TensorDict that a sample is")
        for name, tensor, dtype in zip(self.names, self._ring.tensors, self._dtypes, strict=True):
            yield _found(out, name), tensor, dtype, name


def _found(out: Any, name: Name) -> Any:
    return out.get(name if len(name) != 1 else name[0], None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether rows can be copied to it as bytes; its class and autograd, if any, have no say in that."""
    is_plain = type(tensor) is torch.Tensor and tensor.is_contiguous() and not tensor.is_inference()
    return is_plain and takes_bytes(tensor)


def _moved(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if device is None or device.type == "cpu":
        return tensor
    if device.type == "cuda" and torch.cuda.is_available():
        return tensor.pin_memory().to(device, non_blocking=True)
    return to_device(tensor, device)


def _collected(entries: dict[Any, Any], shape: torch.Size, device: torch.device | None) -> TensorDict:
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor):
            entries[key] = _collected(value, shape, device)
    return new_tensordict(TensorDict, entries, shape, device=device, nested=False)


def _shown(name: Name) -> str:
    return repr(name[0] if len(name) == 1 else name)


def _why_not(found: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Says why an entry of `out` can't be filled with a tensor of this shape and dtype; None if it can."""
    if not isinstance(found, torch.Tensor):
        what = "missing" if found is None else type(found).__qualname__
        return f"{what}, and takes {dtype} of shape {list(shape)}"
    why = why_not_filled(found)
    if why is None and found.is_inference() and not torch.is_inference_mode_enabled():
        why = "an inference tensor, which is written in inference mode only: sample inside of torch.inference_mode()"
    if why is None and (tuple(found.shape) != shape or found.dtype != dtype):
        why = f"{found.dtype} of shape {list(found.shape)}, and takes {dtype} of shape {list(shape)}"
    return why
