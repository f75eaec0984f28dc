"""Marks and labels on an axis: round numbers, as many as fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor, log10

APART = 10.0  # points, at least, between two labels


def round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from the last one that is at most `low` to the first that is at least `high`."""
    if not 0 < low <= high:
        raise ValueError(f"a logarithmic axis from {low} to {high}")
    exponents = range(floor(log10(low)) - 1, floor(log10(high)) + 2)
    steps = [float(f"{digit}e{exponent}") for exponent in exponents for digit in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= low)
    last = min(i for i, step in enumerate(steps) if step >= high)
    return steps[first : max(last, first + 1) + 1]


def that_fit(numbers: Sequence[float], length: float, room: Callable[[float], float]) -> list[float]:
    """Of round numbers, which span a logarithmic axis of `length` points, as many as their labels leave room for.

    All of them; or powers of ten; or every second or third one of these; or the two ends.
    """
    tens = [number for number in numbers if f"{number:e}".startswith("1.000000e")]
    start, whole = log10(numbers[0]), log10(numbers[-1] / numbers[0])
    for few in (list(numbers), tens, tens[::2], tens[::3]):
        places = [(log10(number) - start) / whole * length for number in few]
        if len(few) > 1 and not overlap(places, [room(number) for number in few]):
            return few
    return [numbers[0], numbers[-1]]


def overlap(places: Sequence[float], rooms: Sequence[float]) -> bool:
    """Whether any of these labels, centred on their places, comes too near to the next."""
    pairs = zip(places, places[1:], rooms, rooms[1:], strict=False)
    return any(after - before < (one + other) / 2 + APART for before, after, one, other in pairs)


def staggered(labels: Sequence[str], places: Sequence[float], rooms: Sequence[float]) -> list[str]:
    """What would run into the label before stands on a line of its own, below; what fits on neither is left out."""
    ends = [float("-inf"), float("-inf")]  # of the two lines
    found: list[str] = []
    for label, place, room in zip(labels, places, rooms, strict=True):
        line = next((line for line in (0, 1) if place - room / 2 >= ends[line]), None)
        if line is None:
            found.append("")
            continue
        found.append("\n" * line + label)
        ends[line] = place + room / 2 + APART
    return found


def spread_out(places: Sequence[float], rooms: Sequence[float], length: float) -> list[float]:
    """Places as near to those that are wanted as their order and rooms allow, between 0 and `length`.

    Who would overlap becomes a block, which lies where it is, on average, nearest to what its members want.
    """
    blocks: list[tuple[float, list[int]]] = []  # where it begins, and who is in it, from below
    for i in sorted(range(len(places)), key=lambda i: places[i]):
        block = (_begin([i], places, rooms, length), [i])
        while blocks and blocks[-1][0] + sum(rooms[k] for k in blocks[-1][1]) > block[0]:
            members = [*blocks.pop()[1], *block[1]]
            block = (_begin(members, places, rooms, length), members)
        blocks.append(block)
    found = list(places)
    for begin, members in blocks:
        for i in members:
            found[i] = begin + rooms[i] / 2
            begin += rooms[i]
    return found


def _begin(members: Sequence[int], places: Sequence[float], rooms: Sequence[float], length: float) -> float:
    before, wanted = 0.0, 0.0
    for i in members:
        wanted += places[i] - rooms[i] / 2 - before
        before += rooms[i]
    return max(0.0, min(wanted / len(members), length - before))
