"""Requests of a kind, made at random: each field has what its type permits, and often what the home knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from msgspec import inspect

from memstore.distributed.rules.messages import Lookup, Replicate

_MOST_ITEMS, _MOST_BYTES = 4, 64
_LONGEST_WAIT = 20  # milliseconds: no test waits for longer


@dataclass(frozen=True)
class Known:
    """What there is at the home, and other values that are more than random.

    Attributes:
        numbers: versions, sessions, put ids, sizes, and the largest ones.
        texts: ids, keys, bodies of records.
    """

    numbers: tuple[int, ...]
    texts: tuple[bytes, ...]


def requests(kind: type[Any], known: Known) -> st.SearchStrategy[Any]:
    return _values(inspect.type_info(kind), known)


def _values(kind: inspect.Type, known: Known) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.StructType():
            fields = {field.name: _field(field, known) for field in kind.fields}
            if kind.cls is Replicate:  # as many versions as keys, or none
                return st.fixed_dictionaries(fields).map(lambda found: _fitting(Replicate, found, "kept", "rows"))
            if kind.cls is Lookup:
                return st.fixed_dictionaries(fields).map(lambda found: _fitting(Lookup, found, "versions", "keys"))
            return st.builds(kind.cls, **fields)
        case inspect.UnionType():
            return st.one_of([_values(one, known) for one in kind.types])
        case inspect.VarTupleType():
            least = kind.min_length or 0
            return st.lists(_values(kind.item_type, known), min_size=least, max_size=_MOST_ITEMS).map(tuple)
        case inspect.TupleType():
            return st.tuples(*[_values(one, known) for one in kind.item_types])
        case inspect.IntType():
            return _numbers(kind, known)
        case inspect.BytesType():
            return _bytes(kind, known)
        case inspect.StrType():
            return st.text(min_size=kind.min_length or 0, max_size=min(kind.max_length or _MOST_BYTES, _MOST_BYTES))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case _:
            raise TypeError(f"no values of {kind}")


def _fitting(kind: type[Any], fields: dict[str, Any], some: str, others: str) -> Any:
    count = len(fields[others])
    return kind(**fields | {some: (fields[some] * count)[:count]})


def _field(field: inspect.Field, known: Known) -> st.SearchStrategy[Any]:
    return st.integers(0, _LONGEST_WAIT) if field.name == "milliseconds" else _values(field.type, known)


def _numbers(kind: inspect.IntType, known: Known) -> st.SearchStrategy[int]:
    least = kind.ge if kind.ge is not None else -(1 << 63)
    most = kind.le if kind.le is not None else kind.lt - 1 if kind.lt is not None else (1 << 63) - 1
    fitting = [number for number in known.numbers if least <= number <= most]
    return st.one_of(st.sampled_from(fitting or [least]), st.integers(int(least), int(most)))


def _bytes(kind: inspect.BytesType, known: Known) -> st.SearchStrategy[bytes]:
    least, most = kind.min_length or 0, kind.max_length if kind.max_length is not None else 1 << 20
    fitting = [text for text in known.texts if least <= len(text) <= most]
    random = st.binary(min_size=least, max_size=max(least, min(most, _MOST_BYTES)))
    return st.one_of(st.sampled_from(fitting), random) if fitting else random
