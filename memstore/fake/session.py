"""Sessions: one mode, from its entry to its end, on one thread; and the marks by which fake tensors are known.

This module says what becomes of an operator:

1. No argument is fake, and it makes no tensor: it runs as it is.
2. It makes one out of nothing: a meta tensor, whose storage gets a mark with the device that was asked for.
3. Some are fake: it runs on meta tensors. Storages that are new get a mark; the rest are views of what was there.
4. Meta tensors can't tell what it returns: the recorder runs it on values. Without a recorder that is an error.

While a session lasts, its fakes are plain meta tensors of the classes that the code inside has given them: so
Parameter, lazy modules and classes of anybody's work as they are. At its end those that live (`LiveTensors`) become of
a class that says what it is by itself (`mode.py`). `Recorder` is the interface to what remembers the operators.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

from memstore._compat import COLLECTIVES, TensorBase, has_kernel, neg_view, schema_of, storage_use_count, version_of
from memstore.errors import UnsupportedValueError

# --- Marks -----------------------------------------------------------------------------------------------------------
# A fake tensor is a meta tensor whose *storage* has a mark. So whatever shares the storage is fake too, and no table
# has to be kept: a view, a Parameter, what `.data` gives; and what a tensor shows of its storage says all about it
# (`TensorRef`). The functions look at tensors in C, past properties of subclasses. Callers have torch functions
# disabled.


is_meta: Callable[[torch.Tensor], bool] = TensorBase.is_meta.__get__
requires_grad: Callable[[torch.Tensor], bool] = TensorBase.requires_grad.__get__
is_leaf: Callable[[torch.Tensor], bool] = TensorBase.is_leaf.__get__
storage_of: Callable[[torch.Tensor], Any] = TensorBase.untyped_storage
is_inference: Callable[[torch.Tensor], bool] = TensorBase.is_inference
_device, _dtype, _layout = TensorBase.device.__get__, TensorBase.dtype.__get__, TensorBase.layout.__get__
_size, _stride, _offset = TensorBase.size, TensorBase.stride, TensorBase.storage_offset
_is_conj, _is_neg = TensorBase.is_conj, TensorBase.is_neg
_NAME = "_memstore_fake"
META = torch.device("meta")
APART = 1 << 30  # the first version of what `.data` gives; torch counts its writes by themselves
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


class Mark:
    """Facts about a fake tensor's storage.

    Attributes:
        device: where it would be. "cuda" without an index is the device that is current whenever somebody asks.
        history: what was done with it, a `History`; None: nobody knows, so it has no values.
        is_lent: a tensor was moved to it, or from it, by `.data =` or `set_`; versions count writes of both storages.
        writes_apart: how often it was written through what `.data` gave.
    """

    __slots__ = ("device", "history", "is_lent", "writes_apart")

    def __init__(self, device: torch.device, history: Any) -> None:
        self.device, self.history, self.is_lent, self.writes_apart = device, history, False, 0


class TensorRef(NamedTuple):
    """Fake tensor, as what it shows of its storage. It keeps the mark, and no tensor."""

    mark: Mark
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


def mark_of(tensor: torch.Tensor) -> Mark | None:
    """Returns the mark of a fake tensor; None for any other."""
    if not is_meta(tensor):
        return None
    try:
        return getattr(storage_of(tensor), _NAME, None)
    except NotImplementedError:  # a sparse one: it has none
        return None


def set_mark(tensor: torch.Tensor, mark: Mark) -> None:
    setattr(storage_of(tensor), _NAME, mark)


def unrecorded_writes(tensor: torch.Tensor, mark: Mark, recorded: int) -> int:
    """Returns how many writes of a tensor torch has counted that no recorder has heard of.

    Args:
        recorded: how many writes of its storage one has heard of.
    """
    if is_apart(tensor):
        return version_of(tensor) - APART - mark.writes_apart
    return 0 if is_inference(tensor) else version_of(tensor) - recorded + mark.writes_apart


def is_apart(tensor: torch.Tensor) -> bool:
    """Returns whether its writes are counted apart from those of the tensor that it is the data of."""
    return not is_inference(tensor) and version_of(tensor) >= APART


def ref_of(tensor: torch.Tensor, mark: Mark) -> TensorRef:
    return TensorRef(
        mark,
        _dtype(tensor),
        tuple(_size(tensor)),
        tuple(_stride(tensor)),
        _offset(tensor),
        _is_conj(tensor),
        _is_neg(tensor),
    )


def storage_bytes(tensor: torch.Tensor) -> int:
    return int(storage_of(tensor).nbytes())


def over_storage(tensor: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Makes a tensor over the storage of another one, of which it shows what the ref shows of its own."""
    made = torch.empty(0, dtype=ref.dtype, device=_device(tensor))
    made.set_(storage_of(tensor), ref.offset, ref.size, ref.stride)
    made = made.conj() if ref.conj else made
    return neg_view(made) if ref.neg else made


def meta_twin(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a meta tensor with the shape and strides of a real one, and nothing else of it."""
    return torch.empty_strided(_size(tensor), _stride(tensor), dtype=_dtype(tensor), device=META)


def form_of(tensor: torch.Tensor) -> str:
    """Names the form in which a tensor has its values, if it can't be fake; else ""."""
    if _dtype(tensor) in _QUANTIZED:
        return "quantized"
    return "" if _layout(tensor) is torch.strided else "sparse"


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)  # pyright: ignore[reportUnknownArgumentType]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Returns the same arguments or results, with other tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is list or type(value) is tuple:
        return type(value)(map_tensors(change, one) for one in value)
    return value


# --- What an operator does -------------------------------------------------------------------------------------------


_tag: Any = torch.Tag
_RANDOM = _tag.nondeterministic_seeded
_BY_VALUES = (_tag.data_dependent_output, _tag.dynamic_output_shape)
_aten: Any = torch.ops.aten
# They say of which storage a tensor is, and change none.
_SETS = {
    _aten.set_.source_Tensor,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten.set_.default,
}

_BATCH_NORM = _aten.native_batch_norm.default
_LIKE = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
# What remains of the functions that torch.autocast has on its lists of lower precision.
_LOWERED = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution"}
_LOWER = {torch.bfloat16, torch.float16}


class OperatorKind(NamedTuple):
    """Kind of an operator: what it does, as its schema and its name say.

    Attributes:
        makes: it makes a tensor on a device that it is told.
        takes_shape: of a tensor that it is given, it takes no values.
        random: it draws random numbers.
        by_values: what it returns depends on values.
        sets: it gives a tensor another storage.
        collective: other processes take part in it.
        averages: in training it writes a running mean and variance, of which its schema says nothing.
        quantizes: it returns a quantized tensor, of which its meta kernel says nothing.
        lowered: torch.autocast runs it in lower precision.
        autocast: torch.autocast knows it: of tensors of lower precision it may make others.
        written: the places of arguments that it writes, and the names of those that come by name.
    """

    makes: bool
    takes_shape: bool
    random: bool
    by_values: bool
    sets: bool
    collective: bool
    averages: bool
    quantizes: bool
    lowered: bool
    autocast: bool
    written: tuple[int | str, ...]


@functools.cache
def kind_of(operator: Any) -> OperatorKind:
    schema = schema_of(operator)
    name, arguments = schema.name, schema.arguments
    written = tuple(
        one.name if one.kwarg_only else place
        for place, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    )
    tags = operator.tags
    return OperatorKind(
        any(one.name == "device" for one in arguments),
        operator.namespace == "aten" and name.endswith(_LIKE),
        _RANDOM in tags or any(one.name == "generator" for one in arguments),
        any(tag in tags for tag in _BY_VALUES),
        operator in _SETS,
        operator.namespace in COLLECTIVES,
        operator is _BATCH_NORM,
        name.startswith("aten::quantize_per"),
        name.removeprefix("aten::") in _LOWERED,
        any(has_kernel(operator.name(), f"Autocast{device}") for device in ("CPU", "CUDA")),
        written,
    )


def written_in(kind: OperatorKind, args: Sequence[Any], options: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments, or lists of them, that are written."""
    found: list[Any] = []
    for place in kind.written:
        if isinstance(place, str):
            found.append(options.get(place))
        elif place < len(args):
            found.append(args[place])
    if kind.averages and args[5]:
        found.extend(args[3:5])
    return found


# --- Arguments -------------------------------------------------------------------------------------------------------


Options = Mapping[str, Any]


def as_ref(tensor: torch.Tensor) -> Any:
    mark = mark_of(tensor)
    return tensor if mark is None else ref_of(tensor, mark)


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else meta_twin(tensor)


def map_options(change: Callable[[torch.Tensor], Any], options: Options) -> dict[str, Any]:
    return {name: map_tensors(change, one) for name, one in options.items()}


def on_meta(options: Options, *, makes: bool = False) -> dict[str, Any]:
    """Returns options for the same on meta tensors, which are not pinned, and draw nothing."""
    changed = {name: one for name, one in options.items() if name != "pin_memory"}
    if makes or changed.get("device") is not None:
        changed["device"] = META
    if changed.get("generator") is not None:
        changed["generator"] = None
    return changed


def with_arguments(result: Any, written: list[torch.Tensor]) -> Any:
    """Replaces values that in-place operators return by the fake arguments that they stand for."""
    if not written:
        return result
    found = list(tensors_in((result,)))
    if len(found) != len(written) or all(one.is_meta for one in found):
        return result
    by_id = {id(one): fake for one, fake in zip(found, written, strict=True)}
    return map_tensors(lambda one: by_id[id(one)], result)


def with_index(device: torch.device) -> torch.device:
    """Returns the device itself: "cuda" is the one that is current in this process. It doesn't initialize CUDA."""
    index = cast("int | None", device.index)  # torch says that it is never None
    if device.type != "cuda" or index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def device_of(tensors: Sequence[torch.Tensor], marks: Sequence[Mark | None]) -> torch.device:
    """Returns the device of an operator's results, if some arguments are fake.

    A number on the CPU goes to the others.
    """
    first: torch.device | None = None
    for one, mark in zip(tensors, marks, strict=True):
        if mark is not None:
            if mark.device.type != "cpu" or one.dim():
                return mark.device
            first = first or mark.device
    assert first is not None, "one is fake"
    return first


# --- `set_` and `.data =`: they change which storage a fake tensor shows, and write none -----------------------------


_source_tensor: Any = torch.ops.aten.set_.source_Tensor


def lend(tensor: torch.Tensor) -> None:
    """Notes that a tensor is moved from its storage, or was moved to it; views keep sharing its count of writes."""
    mark = mark_of(tensor)
    if mark is not None:
        mark.is_lent = True


def set_storage(operator: Any, args: tuple[Any, ...], lift: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Handles an overload of `set_` on a fake tensor.

    From real memory (`torch.load` has some) it gets the values of now.

    Args:
        lift: makes a fake tensor for a real one.
    """
    fake, source = args[0], args[1] if len(args) > 1 else None
    lend(fake)
    if isinstance(source, torch.UntypedStorage) and source.device.type != "meta":
        real = torch.empty(0, dtype=fake.dtype, device=source.device)
        operator(real, *args[1:])
        source = real
    elif not isinstance(source, torch.Tensor):
        operator(*args)
        lend(fake)
        return fake
    if not is_meta(source):
        source = lift(source)
    _source_tensor(fake, source)
    lend(fake)
    return fake


# --- The session -----------------------------------------------------------------------------------------------------


_CPU = torch.device("cpu")
_lift_fresh: Any = torch.ops.aten.lift_fresh.default


class _BusyThread(threading.local):
    busy = False  # an operator of a session runs: sessions around it let it pass


_busy_thread = _BusyThread()


class Session:
    """One mode on one thread, from its entry to its end.

    Args:
        recorder: of what is done with the tensors that are made; None: nothing is recorded.
        fake_cuda: tensors may claim CUDA where there is none.

    Attributes:
        claim: the device of the fake tensor that the torch function which runs now was given, if any.
        lifts: whether the torch function which runs now makes a tensor of Python's values.
        casts: whether torch.autocast is on for it.
        living: the fake tensors that it has seen.
    """

    def __init__(self, recorder: Recorder | None, *, fake_cuda: bool = False) -> None:
        self.recorder, self.fake_cuda = recorder, fake_cuda and not torch.cuda.is_available()
        self.claim: torch.device | None = None
        self.lifts = False
        self.casts = False
        self.living = LiveTensors()
        self.note = self.living.note

    # --- an operator --------------------------------------------------------------------------------------------------

    def run(self, operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if _busy_thread.busy:
            return operator(*args, **options)
        _busy_thread.busy = True
        try:
            return self._run(operator, args, options)
        finally:
            _busy_thread.busy = False

    def _run(self, operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        kind = kind_of(operator)
        tensors = list(tensors_in((*args, *options.values())))
        marks = [mark_of(one) for one in tensors]
        if any(one is not None for one in marks):
            return self._run_fakes(operator, kind, args, options, device_of(tensors, marks))
        if operator is _lift_fresh:
            return self.lift(args[0]) if self.lifts and not args[0].is_meta else operator(*args, **options)
        asked = options.get("device")
        # a plain meta tensor, and one like it is asked for elsewhere: `to_empty`, `skip_init`
        leaves_meta = kind.takes_shape and args[0].is_meta and asked is not None and asked.type != "meta"
        is_real = bool(marks) and not leaves_meta
        if is_real or not kind.makes or options.get("layout") not in (None, torch.strided):
            if kind.random and self.recorder is not None:
                return self.recorder.run_real(self.recorder.begin(operator, args, options))
            return operator(*args, **options)
        return self._make(operator, args, options)

    def _make(self, operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        device = self._device(options.get("device"))
        if device is None:
            return operator(*args, **options)
        recorder = self.recorder
        event = None if recorder is None else recorder.begin(operator, args, {**options, "device": device})
        try:
            result = operator(*args, **on_meta(options, makes=True))
        except (NotImplementedError, RuntimeError) as error:
            result = self._by_values(operator, kind_of(operator), event, recorder, error)
        return self._finish(operator, event, recorder, result, device, [])

    def lift(self, value: torch.Tensor) -> torch.Tensor:
        """Makes a fake tensor for a real one, whose values are kept as they are now."""
        recorder = self.recorder
        event = None if recorder is None else recorder.begin(torch.ops.aten.clone.default, (value.detach(),), {})
        is_claimed = self.fake_cuda and self.claim is not None and self.claim.type == "cuda"
        device = self.claim if is_claimed else value.device
        return self._finish("lift", event, recorder, meta_twin(value), device or _CPU, [])

    def _device(self, asked: torch.device | None) -> torch.device | None:
        """Returns the device that a new tensor claims; None if it was asked for on meta."""
        if asked is None or asked.type != "meta":
            return _CPU if asked is None else asked
        return self.claim

    # --- with fake arguments ------------------------------------------------------------------------------------------

    def _run_fakes(
        self, operator: Any, kind: OperatorKind, args: tuple[Any, ...], options: dict[str, Any], device: torch.device
    ) -> Any:
        if "device" in options and options["device"] is not None:
            chosen = self._device(options["device"])
            if chosen is None:
                return operator(*args, **options)  # `.to("meta")`
            device = chosen
        if kind.sets and mark_of(args[0]) is not None:
            return set_storage(operator, args, self.lift)
        written = list(tensors_in(written_in(kind, args, options)))
        marks_written = [mark_of(one) for one in written]
        recorder = self.recorder
        if recorder is None:  # tensors with a history keep theirs
            histories = [mark.history for mark in marks_written if mark is not None and mark.history is not None]
            recorder = histories[0].recorder() if histories else None
        if kind.collective and recorder is not None:
            raise UnsupportedValueError(
                f"{operator} is a collective, and can't be deferred: materialize what it is given first. "
                "parallelize_module and distribute_tensor call no collective with src_data_rank=None"
            )
        if kind.quantizes:
            raise UnsupportedValueError(f"{operator} returns a quantized tensor, which can't be fake: make it later")
        if self.casts and (kind.lowered or kind.autocast and any(one.dtype in _LOWER for one in tensors_in(args))):
            raise UnsupportedValueError(
                f"{operator} is called under autocast, which doesn't reach tensors that are fake or deferred: convert "
                "its arguments, or call it when they are real"
            )
        event = None
        if recorder is not None:
            named = {**options, "device": device} if options.get("device") is not None else options
            event = recorder.begin(operator, map_tensors(as_ref, args), map_options(as_ref, named))
        if written and None in marks_written:
            if recorder is None:
                raise UnsupportedValueError(
                    f"{operator} would write a fake tensor, which has no values, into a real one: make that in the "
                    "mode too"
                )
            return recorder.compute(event)
        if kind.by_values:
            result = self._by_values(operator, kind, event, recorder, None)
        else:
            try:
                result = operator(*map_tensors(as_meta, args), **on_meta(map_options(as_meta, options)))
            except Exception as error:
                result = self._by_values(operator, kind, event, recorder, error)
        result = with_arguments(result, written)
        finished = self._finish(operator, event, recorder, result, device, marks_written)
        for one, mark in zip(written, marks_written, strict=True):
            if mark is not None and is_apart(one):
                mark.writes_apart += 1
        return finished

    def _by_values(
        self, operator: Any, kind: OperatorKind, event: Any, recorder: Recorder | None, error: Exception | None
    ) -> Any:
        if recorder is not None:
            return recorder.compute(event)
        is_about_meta = isinstance(error, NotImplementedError) or "meta" in str(error)
        if error is not None and not kind.by_values and not is_about_meta:
            raise error
        raise UnsupportedValueError(
            f"{operator} needs values, and a fake tensor has none: leave it out, or use deferred_init, which has them"
        ) from error

    def _finish(
        self,
        operator: Any,
        event: Any,
        recorder: Recorder | None,
        result: Any,
        device: torch.device,
        written: list[Mark | None],
    ) -> Any:
        """Marks storages that are new, and records the event if there are any, or some were written."""
        made: list[tuple[int, TensorRef]] = []
        twins: dict[int, torch.Tensor] = {}
        for number, one in enumerate(tensors_in((result,))):
            form = form_of(one)
            if form:
                raise UnsupportedValueError(f"{operator} returns a {form} tensor, which can't be fake: make it later")
            twin = one if one.is_meta else meta_twin(one)
            if twin is not one:
                twins[id(one)] = twin
            mark = mark_of(twin)
            if mark is None:
                mark = Mark(device, None if recorder is None else recorder.new_history())
                set_mark(twin, mark)
                self.living.note_storage(twin)
                made.append((number, ref_of(twin, mark)))
            self.note(twin)
        if recorder is not None and (made or written):
            recorder.commit(event, made, [one for one in written if one is not None])
        return map_tensors(lambda one: twins.get(id(one), one), result) if twins else result


# --- The interface of recorders --------------------------------------------------------------------------------------
# The interface by which modes tell of what is done with fake tensors, and ask for it: `deferred_init` has one.
#
# For each operator that makes or changes storages of fake tensors:
#
# 1. `begin` is called before it runs on meta tensors: then arguments are still what they were.
# 2. `commit` after it, with the storages that are new and those that were written.
#
# Where meta tensors can't tell what an operator returns, `compute` runs it on values between the two.


class History(Protocol):
    """History of one storage: what was done with it."""

    def recorder(self) -> Recorder:
        """Returns a recorder for operators outside of the mode in which it was made."""
        ...


class Recorder(Protocol):
    """Recorder of operators on fake tensors, which also runs them on values."""

    def new_history(self) -> History: ...

    def begin(self, operator: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Begins an event, which isn't recorded yet.

        Args:
            args, options: of the operator, with refs instead of fake tensors.
        """
        ...

    def commit(self, event: Any, made: Sequence[tuple[int, TensorRef]], written: Sequence[Mark]) -> None:
        """Records an event.

        Args:
            made: the number, among the tensors that are returned, of each that has a new storage.
            written: the storages that it changes.
        """
        ...

    def compute(self, event: Any) -> Any:
        """Runs the event's operator on values, as of now, and returns what it returns."""
        ...

    def run_real(self, event: Any) -> Any:
        """Runs the operator of an event without fake tensors, with the random numbers that it is to get."""
        ...

    def values(self, ref: TensorRef) -> torch.Tensor:
        """Returns the values of a fake tensor, as of now, in memory of their own."""
        ...


# --- Tensors that live at the end of a session -----------------------------------------------------------------------


T = TypeVar("T")


class LiveTensors:
    """Fake tensors that a session has seen, and that live."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._storages: list[weakref.ref[Any]] = []

    def note(self, tensor: torch.Tensor) -> None:
        self._seen[id(tensor)] = weakref.ref(tensor)

    def noted(self, result: T) -> T:
        """Notes a function's result: a Parameter's copy is made by its class, which the modes don't see."""
        for one in tensors_in((result,)):
            self.note(one)
        return result

    def note_storage(self, tensor: torch.Tensor) -> None:
        """Notes that the session has made a storage."""
        self._storages.append(weakref.ref(storage_of(tensor)))

    def seen(self) -> list[torch.Tensor]:
        """Returns the tensors that were noted."""
        found = [ref() for ref in self._seen.values()]
        return [one for one in found if one is not None and mark_of(one) is not None]

    def all(self) -> list[torch.Tensor]:
        """Returns all tensors, also those that no mode has seen: `nn.Parameter(tensor)` puts all modes aside.

        If storages have more tensors than were noted, all objects of the process are looked through.
        """
        found = self.seen()
        counts = Counter(id(storage_of(one)) for one in found)  # one object for all tensors of a storage
        storages = [one for one in (ref() for ref in self._storages) if one is not None]
        ours = 1  # the storage's object is a user too
        unseen = {id(one) for one in storages if storage_use_count(one) > counts[id(one)] + ours}
        if unseen:
            known = set(map(id, found))
            found.extend(
                one
                for one in gc.get_objects()
                if issubclass(type(one), torch.Tensor)  # isinstance asks the object, which may be anybody's
                and id(one) not in known
                and is_meta(one)
                and mark_of(one) is not None
                and id(storage_of(one)) in unseen
            )
        return found
