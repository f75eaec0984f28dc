"""A session: one mode, from its entry to its end, on one thread. Here: what becomes of an operator.

1. No argument is fake, and it makes no tensor: it runs as it is.
2. It makes one out of nothing: a meta tensor, whose storage gets a mark with the device that was asked for.
3. Some are fake: it runs on meta tensors. Storages that are new get a mark; the rest are views of what was there.
4. Meta tensors can't tell what it returns: the recorder runs it on values. Without a recorder that is an error.

While a session lasts, its fakes are plain meta tensors of the classes that the code inside has given them: so
Parameter, lazy modules and classes of anybody's work as they are. At its end those that live become of a class that
says what it is by itself (`tensors.py`).
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from memstore.errors import UnsupportedValueError
from memstore.fake.marks import (
    META,
    Mark,
    Ref,
    is_strided,
    map_tensors,
    mark_of,
    meta_twin,
    ref_of,
    set_mark,
    tensors_in,
)
from memstore.fake.operators import Kind, kind_of, written_in
from memstore.fake.recorder import Recorder

_CPU = torch.device("cpu")
_lift_fresh: Any = torch.ops.aten.lift_fresh.default
Options = Mapping[str, Any]


class _Thread(threading.local):
    busy = False  # an operator of a session runs: sessions around it let it pass


_thread = _Thread()


class Session:
    """
    Args:
        recorder: of what is done with the tensors that are made; None: nothing is recorded.
        fake_cuda: tensors may claim CUDA where there is none.

    Attributes:
        claim: the device of the fake tensor that the torch function which runs now was given, if any.
        lifts: whether the torch function which runs now makes a tensor of Python's values.
    """

    def __init__(self, recorder: Recorder | None, *, fake_cuda: bool = False) -> None:
        self.recorder, self.fake_cuda = recorder, fake_cuda and not torch.cuda.is_available()
        self.claim: torch.device | None = None
        self.lifts = False
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """Remembers a fake tensor for the end."""
        self._seen[id(tensor)] = weakref.ref(tensor)

    def living(self) -> list[torch.Tensor]:
        found = [ref() for ref in self._seen.values()]
        return [one for one in found if one is not None]

    # --- an operator --------------------------------------------------------------------------------------------------

    def run(self, operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if _thread.busy:
            return operator(*args, **options)
        _thread.busy = True
        try:
            return self._run(operator, args, options)
        finally:
            _thread.busy = False

    def _run(self, operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        kind = kind_of(operator)
        marks = [mark_of(one) for one in tensors_in((*args, *options.values()))]
        fakes = [one for one in marks if one is not None]
        if fakes:
            return self._run_fakes(operator, kind, args, options, fakes)
        if operator is _lift_fresh:
            return self.lift(args[0]) if self.lifts else operator(*args, **options)
        if marks or not kind.makes or options.get("layout") not in (None, torch.strided):
            return self._run_reals(operator, kind, args, options)
        return self._make(operator, args, options)

    def _run_reals(self, operator: Any, kind: Kind, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if kind.random and self.recorder is not None:
            return self.recorder.run_real(self.recorder.begin(operator, args, options))
        return operator(*args, **options)

    def _make(self, operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        device = self._device(options.get("device"))
        if device is None:
            return operator(*args, **options)
        recorder = self.recorder
        event = None if recorder is None else recorder.begin(operator, args, {**options, "device": device})
        try:
            result = operator(*args, **_on_meta(options, makes=True))
        except (NotImplementedError, RuntimeError) as error:
            result = self._by_values(operator, kind_of(operator), event, recorder, error)
        return self._finish(operator, event, recorder, result, device, [])

    def lift(self, value: torch.Tensor) -> torch.Tensor:
        """A fake tensor for a real one; its values are kept as they are now."""
        recorder = self.recorder
        event = None if recorder is None else recorder.begin(torch.ops.aten.clone.default, (value.detach(),), {})
        return self._finish("lift", event, recorder, meta_twin(value), value.device, [])

    def _device(self, asked: torch.device | None) -> torch.device | None:
        """What a new tensor claims; None: it was asked for on meta."""
        if asked is None or asked.type != "meta":
            return _with_index(asked) if asked is not None else _CPU
        return self.claim

    # --- with fake arguments ------------------------------------------------------------------------------------------

    def _run_fakes(
        self, operator: Any, kind: Kind, args: tuple[Any, ...], options: dict[str, Any], fakes: list[Mark]
    ) -> Any:
        device = fakes[0].device
        if "device" in options and options["device"] is not None:
            chosen = self._device(options["device"])
            if chosen is None:
                return operator(*args, **options)  # `.to("meta")`
            device = chosen
        written = list(tensors_in(written_in(kind, args, options)))
        marks_written = [mark_of(one) for one in written]
        recorder = self._recorder_for(marks_written)
        event = None
        if recorder is not None:
            named = {**options, "device": device} if options.get("device") is not None else options
            event = recorder.begin(operator, map_tensors(_as_ref, args), _map_options(_as_ref, named))
        if written and None in marks_written:
            return self._write_real(operator, event, recorder)
        if kind.by_values:
            result = self._by_values(operator, kind, event, recorder, None)
        else:
            try:
                result = operator(*map_tensors(_as_meta, args), **_on_meta(_map_options(_as_meta, options)))
            except Exception as error:
                result = self._by_values(operator, kind, event, recorder, error)
        result = _with_arguments(result, written)
        if kind.sets:
            lend(args[0])
            return result
        return self._finish(operator, event, recorder, result, device, marks_written)

    def _recorder_for(self, written: list[Mark | None]) -> Recorder | None:
        """In a mode that records nothing, what has a history is written by its recorder still."""
        if self.recorder is None:
            for mark in written:
                if mark is not None and mark.history is not None:
                    return mark.history.recorder()
        return self.recorder

    def _by_values(
        self, operator: Any, kind: Kind, event: Any, recorder: Recorder | None, error: Exception | None
    ) -> Any:
        if recorder is not None:
            return recorder.compute(event)
        if error is not None and not kind.by_values and not _is_about_meta(error):
            raise error
        raise UnsupportedValueError(
            f"{operator} needs values, and a fake tensor has none: leave it out, or use deferred_init, which has them"
        ) from error

    def _write_real(self, operator: Any, event: Any, recorder: Recorder | None) -> Any:
        if recorder is None:
            raise UnsupportedValueError(
                f"{operator} would write a fake tensor, which has no values, into a real one: make that in the mode too"
            )
        return recorder.compute(event)

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
        made: list[tuple[int, Ref]] = []
        twins: dict[int, torch.Tensor] = {}
        for number, one in enumerate(tensors_in((result,))):
            if not is_strided(one):
                raise UnsupportedValueError(f"{operator} returns a sparse tensor, which can't be fake: make it later")
            twin = one if one.is_meta else meta_twin(one)
            if twin is not one:
                twins[id(one)] = twin
            mark = mark_of(twin)
            if mark is None:
                mark = Mark(device, None if recorder is None else recorder.new_history())
                set_mark(twin, mark)
                made.append((number, ref_of(twin, mark)))
            self.note(twin)
        if recorder is not None and (made or written):
            recorder.commit(event, made, [one for one in written if one is not None])
        return map_tensors(lambda one: twins.get(id(one), one), result) if twins else result


def lend(tensor: torch.Tensor) -> None:
    """Notes that a tensor was moved to another storage."""
    mark = mark_of(tensor)
    if mark is not None:
        mark.is_lent = True


def _as_ref(tensor: torch.Tensor) -> Any:
    mark = mark_of(tensor)
    return tensor if mark is None else ref_of(tensor, mark)


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else meta_twin(tensor)


def _map_options(change: Any, options: Options) -> dict[str, Any]:
    return {name: map_tensors(change, one) for name, one in options.items()}


def _on_meta(options: Options, *, makes: bool = False) -> dict[str, Any]:
    """Options for the same on meta tensors, which are not pinned, and draw nothing."""
    changed = {name: one for name, one in options.items() if name != "pin_memory"}
    if makes or changed.get("device") is not None:
        changed["device"] = META
    if changed.get("generator") is not None:
        changed["generator"] = None
    return changed


def _with_arguments(result: Any, written: list[torch.Tensor]) -> Any:
    """In place operators computed on values return those, in place of their fake arguments."""
    if not written:
        return result
    found = list(tensors_in((result,)))
    if len(found) != len(written) or all(one.is_meta for one in found):
        return result
    by_id = {id(one): fake for one, fake in zip(found, written, strict=True)}
    return map_tensors(lambda one: by_id[id(one)], result)


def _with_index(device: torch.device) -> torch.device:
    return torch.device("cuda:0") if device == torch.device("cuda") else device


def _is_about_meta(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "meta" in str(error)
