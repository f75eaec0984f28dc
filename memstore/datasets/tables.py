"""Rows that are written in place, as a table of their leaves: for a terminal, and for a notebook."""

from __future__ import annotations

from collections.abc import Iterator

from memstore.structure import Plan
from memstore.wording import shown, size, table_html, table_text

_COLUMNS = ("leaf", "dtype", "shape of a row", "size of a row")


def rows_text(plan: Plan, title: str) -> str:
    return table_text(_COLUMNS, _cells(plan), f"{title}{_in_all(plan)}")


def rows_html(plan: Plan, title: str) -> str:
    return table_html(_COLUMNS, _cells(plan), f"{title}{_in_all(plan)}; {shown(len(plan.leaves), 'leaf', 'leaves')}")


def _cells(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    for leaf in plan.leaves:
        count, *shape = leaf.shape
        yield ".".join(map(str, leaf.name)), leaf.dtype, str(shape), size(leaf.nbytes // count)


def _in_all(plan: Plan) -> str:
    """What all rows take that there is room for."""
    return f", {size(sum(leaf.nbytes for leaf in plan.leaves))}"
