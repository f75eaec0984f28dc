"""`memstore watch`: a live table of keys, versions and rates, which fits into its window.

follow    prints the table, or JSON, at each look
Rates     counts puts. Each put changes its key's word of the doorbell by one, so none is missed between two looks.
          Several keys may have one word; which of them was put is then told by their versions, which are looked at
          more often
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import set_cell_size
from rich.live import Live
from rich.text import Text

from memstore import _wording as wording
from memstore.cli import render
from memstore.engine import Root, is_served
from memstore.listing import Keyspace, ListedEntry, entries, opened

_TITLES = ("key", "version", "size", "age", "puts/s", "bytes/s")
_LEAST = ("age", "version", "size", "bytes/s")  # columns that a narrow window does without, in this order
_KEY = 16  # columns of it
_LEAST_KEY = 6  # where other columns were left out already
_FRAME = 2  # lines: titles and footer
_ROWS = 1000  # of a look that goes to a file


@dataclass(frozen=True, slots=True)
class WatchSample:
    """One look at the store.

    Attributes:
        time: in Unix seconds.
        puts: of all these keys, a second; `nbytes` by the sizes that their values have now.
        rates: of each key, puts a second; without those that weren't put lately.
    """

    time: float
    puts: float
    nbytes: float
    entries: list[ListedEntry]
    rates: dict[str, float]


def samples(store: Keyspace, prefix: str, interval: float) -> Iterator[WatchSample]:
    rates = Rates(opened(store))
    moment: int | None = None
    found: list[ListedEntry] = []

    def read() -> dict[str, int]:
        nonlocal moment, found
        root = opened(store)
        # another one after each change of the catalog here; keys may have their homes on other hosts too
        now = None if is_served(root) else root.catalog.view(lambda transaction: transaction.moment)
        if now is None or now != moment:  # else nothing was put or deleted
            found = list(entries(store, prefix))
        moment = now
        return {one.key: one.version for one in found}

    while True:
        started = time.monotonic()
        puts = rates.look(read)
        sizes = {one.key: one.nbytes for one in found}
        nbytes = sum(rate * sizes[key] for key, rate in puts.items())
        yield WatchSample(time.time(), sum(puts.values()), nbytes, found, puts)
        rates.sleep(max(interval - (time.monotonic() - started), 0.0))


def follow(store: Keyspace, prefix: str, interval: float, count: int, *, as_json: bool) -> None:
    """Prints a table, or JSON, at each of `count` looks; 0: until it is interrupted."""
    looks = itertools.islice(samples(store, prefix, interval), count or None)
    if as_json:
        for look in looks:
            render.print_json(look)
    elif not render.console.is_terminal:
        for look in looks:
            for line in lines(look, _ROWS, 0):
                render.console.print(render.printable(line))
    else:
        with Live(console=render.console, auto_refresh=False, vertical_overflow="crop") as live:
            for look in looks:
                size = render.console.size
                shown = lines(look, size.height - 1, size.width)
                live.update(Text("\n".join(shown), no_wrap=True, overflow="crop"), refresh=True)


def lines(look: WatchSample, height: int, width: int) -> list[str]:
    """Draws the busiest keys, sorted, and what there is of all: at most `height` lines, of `width` columns (0: any)."""
    busiest = sorted(look.entries, key=lambda one: (-look.rates.get(one.key, 0.0), -one.version))
    shown = sorted(busiest[: max(height - _FRAME, 0)], key=lambda one: one.key.encode())
    rows = [_TITLES, *(_cells(one, look.rates.get(one.key)) for one in shown)]
    wide = [max(map(render.cell_width, column)) for column in zip(*rows, strict=True)]
    chosen = _fitting(wide, width)
    room = width - sum(wide[i] + 2 for i in chosen)
    wide[0] = min(wide[0], max(room, 1)) if width else wide[0]
    made = ["  ".join([_cut(row[0], wide[0]), *(f"{row[i]:>{wide[i]}}" for i in chosen)]) for row in rows]
    footer = _footer(look, len(shown), width)
    return [line[: width or None] for line in [*made[: max(height - 1, 0)], footer]]


def _fitting(widths: Sequence[int], width: int) -> list[int]:
    """Returns the columns behind the key that a window has room for; the rates stay longest."""
    chosen = list(range(1, len(widths)))
    for least in map(_TITLES.index, _LEAST):
        if width and sum(widths[i] + 2 for i in chosen) + min(widths[0], _KEY) > width:
            chosen.remove(least)
    if width and sum(widths[i] + 2 for i in chosen) + min(widths[0], _LEAST_KEY) > width:
        return []
    return chosen


def _footer(look: WatchSample, shown: int, width: int) -> str:
    """Says what there is of all keys: as much of it as the window has room for."""
    keys = wording.count_of(len(look.entries), "key", "keys") if look.entries else "no keys"
    left_out = f", the {shown:,} busiest shown" if shown < len(look.entries) else ""
    rates = f"{look.puts:.1f} puts/s, {wording.size(look.nbytes)}/s"
    texts = (f"{keys}{left_out}; {rates}", f"{keys}; {rates}", f"{keys}; {look.puts:.1f} puts/s")
    return next((text for text in texts if not width or len(text) <= width), keys)


def _cells(one: ListedEntry, rate: float | None) -> tuple[str, ...]:
    rates = ("", "") if not rate else (f"{rate:.1f}", wording.size(rate * one.nbytes))
    return (wording.escaped(one.key), str(one.version), wording.size(one.nbytes), wording.age(one.created), *rates)


def _cut(text: str, width: int) -> str:
    """Fits a text into just so many columns: of what is too long the start and the end, by which keys differ."""
    missing = width - render.cell_width(text)
    if missing >= 0:
        return text + " " * missing
    start = (width - 1) // 2
    end = set_cell_size(text[::-1], width - 1 - start)[::-1]
    return set_cell_size(text, start) + render.left_out() + end


# --- Rates -----------------------------------------------------------------------------------------------------------


_WINDOW = 5.0  # seconds that a rate is an average of
_OFTEN = 0.02  # seconds between looks at words that several keys have
_WORD = 1 << 32


class Rates:
    """The puts of each key a second, over the last seconds.

    Of a store on several hosts the words stand where a key has its home. Of each key is told there how often it was
    seen to have another version, at most once a look.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._by_words = not is_served(root)
        self._versions: dict[str, int] = {}
        self._words: Sequence[int] = ()
        self._ahead: defaultdict[int, int] = defaultdict(int)  # puts by word that were counted before it was read
        self._sharing: dict[int, list[str]] = {}  # keys that were put, by their word
        self._puts: defaultdict[str, int] = defaultdict(int)  # since the last look
        self._looks: deque[tuple[float, Mapping[str, int]]] = deque()

    def look(self, read: Callable[[], Mapping[str, int]]) -> dict[str, float]:
        """Returns the rates of all keys that were put lately. `read` gives the versions that keys have now."""
        now, words = time.monotonic(), self._root.doorbell.words()
        versions = read()
        if self._looks:
            self._count(words, versions)
        self._words, self._versions = words, dict(versions)
        self._looks.append((now, dict(self._puts)))
        self._puts.clear()
        while len(self._looks) > 2 and now - self._looks[1][0] >= _WINDOW:
            self._looks.popleft()
        start, *later = self._looks
        totals: defaultdict[str, int] = defaultdict(int)
        for _, puts in later:
            for key, count in puts.items():
                totals[key] += count
        return {key: count / (now - start[0]) for key, count in totals.items() if key in versions}

    def sleep(self, seconds: float) -> None:
        """Sleeps. Meanwhile it tells apart who is put of keys that have one word."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            shared = {bell: keys for bell, keys in self._sharing.items() if len(keys) > 1}
            time.sleep(min(left, _OFTEN) if shared else left)
            changed = [bell for bell in shared if self._root.doorbell.load(bell) != self._words[bell]]
            if changed:
                words = list(self._words)
                for bell in changed:
                    words[bell] = self._root.doorbell.load(bell)
                read = self._root.catalog.read
                records = {key: read(key.encode()) for bell in changed for key in shared[bell]}
                versions = {key: 0 if record is None else record.version for key, record in records.items()}
                self._count(words, versions)
                self._words = words
                self._versions.update(versions)

    def _count(self, words: Sequence[int], versions: Mapping[str, int]) -> None:
        """Counts the puts since the last time. `words` were read before `versions`."""
        changed: defaultdict[int, list[str]] = defaultdict(list)
        for key, version in versions.items():
            if version and self._versions.get(key) != version:
                changed[self._root.doorbell.bell(key.encode())].append(key)
        for bell, keys in changed.items():
            rung = (words[bell] - self._words[bell]) % _WORD - self._ahead.pop(bell, 0) if self._by_words else 0
            count = max(rung, len(keys))
            if self._by_words and count > rung:
                self._ahead[bell] = count - rung
            for i, key in enumerate(keys):
                self._puts[key] += (count + i) // len(keys)
            there = self._sharing.setdefault(bell, [])
            there += [key for key in keys if key not in there]
