"""memstore's snapshots: any value, with its containers, objects, and tensors that share memory."""

from __future__ import annotations

from typing import Any, cast

from memstore.convert.leaves import Found
from memstore.convert.rules import Rules
from memstore.convert.sources.snapshots import WHOLE
from memstore.formats import Meter
from memstore.snapshot.planned import write_values


def app_state_of(value: Any) -> dict[str, Any]:
    """A dict of dicts is an app state by itself; what is none, or would be taken for one, stands under one name."""
    if type(value) is not dict:
        return {WHOLE: value}
    entries = cast("dict[Any, Any]", value)
    is_state = all(type(key) is str and isinstance(entry, dict) for key, entry in entries.items())
    return entries if is_state and set(entries) not in (set(), {WHOLE}) else {WHOLE: value}


def write_snapshot(found: Found, rules: Rules, folder: str, name: str, meter: Meter) -> None:
    write_values(
        folder,
        app_state_of(found.value),
        lambda tensor: found.leaf(tensor).cut(),
        durable=True,
        allow_pickle=rules.allow_pickle,
        done=meter.add,
    )
