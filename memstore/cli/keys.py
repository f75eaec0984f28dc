"""Commands about keys: `ls`, `tree` and `watch` list them, `info` and `versions` show one, `rm` deletes and `cp` copies
some.

`abort` gives up a sharded put that waits for other ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import shlex
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.cells import set_cell_size
from rich.text import Text

import memstore
from memstore import _wording as wording
from memstore._arguments import encode_key
from memstore._info import EntryInfo, PendingInfo
from memstore.cli import render
from memstore.cli.files import left_over_told
from memstore.cli.group import (
    MISSING,
    Seconds,
    as_json,
    cli,
    complete_attempt,
    complete_key,
    complete_pending,
    complete_prefix,
    key,
    opened_to_read,
    root,
)
from memstore.cli.render import number_layouts
from memstore.cli.values import filled, rows_of
from memstore.engine import Root, files_of, has_settings, index, is_served
from memstore.errors import AlreadyExistsError, KeyNotFoundError, MemstoreError
from memstore.listing import (
    COLUMNS,
    GLOB,
    Keyspace,
    ListedEntry,
    OutlineLeaf,
    UnknownKindError,
    cells,
    entries,
    has_keys,
    key_tree,
    no_value,
    open_keyspace,
    opened,
    outline,
    value_bytes,
    version_entries,
)

# --- Lists: ls, tree -------------------------------------------------------------------------------------------------


_LONG_COLUMNS = ("key", "type", "content", "kind", "bytes", "version", "created")

_SORTS: dict[str, Callable[[ListedEntry], Any]] = {
    "key": lambda one: one.key.encode(),
    "size": lambda one: -one.nbytes,
    "age": lambda one: -one.created,
    "version": lambda one: -one.version,
    "type": lambda one: one.type,
}


@cli.command(short_help="List keys: type, shape or leaves, size, version, age.")
@root
@click.argument("prefix", default="", shell_complete=complete_prefix)
@click.option("--pending", is_flag=True, help="List the sharded puts that wait for the parts of other ranks.")
@click.option(
    "--sort",
    type=click.Choice(list(_SORTS)),
    help="Sort by size, largest first; by age or version, newest first; by type.",
)
@click.option("-r", "--reverse", is_flag=True, help="Reverse the order.")
@click.option(
    "-l", "--long", "is_long", is_flag=True, help="Also show where the bytes are, how many, and when it was put."
)
@as_json
def ls(root: str, prefix: str, pending: bool, sort: str | None, reverse: bool, is_long: bool, as_json: bool) -> None:
    """List the keys that start with PREFIX: type and content of their values, size, version, age."""
    asked = {"--sort": sort is not None, "--reverse": reverse, "--long": is_long}
    ignored = [option for option, is_given in asked.items() if is_given]
    if pending and ignored:
        raise click.UsageError(f"--pending lists puts by their keys: leave {' and '.join(ignored)} out")
    with open_keyspace(root, "r") as store:
        if pending:
            _list_pending(store, prefix, as_json=as_json)
            return
        found: Iterable[ListedEntry] = entries(store, prefix)  # page by page
        if sort is not None or reverse:
            found = sorted(found, key=_SORTS[sort or "key"], reverse=reverse)
        if as_json:
            render.print_items(found)
        else:
            _list_keys(found, prefix, is_long=is_long)


@cli.command(short_help="Draw the keys as a tree, split at each /.")
@root
@click.argument("prefix", default="", shell_complete=complete_prefix)
@as_json
def tree(root: str, prefix: str, as_json: bool) -> None:
    """Draw the keys that start with PREFIX as a tree, split at each "/". With --json the keys are listed, as by ls."""
    with open_keyspace(root, "r") as store:
        if as_json:
            render.print_items(entries(store, prefix))
            return
        drawn = key_tree(store, prefix)
    if len(drawn):
        for line in str(drawn).splitlines():
            render.console.print(render.printable(line), soft_wrap=True)
    else:
        _say_none("keys", prefix)


def _list_keys(found: Iterable[ListedEntry], prefix: str, *, is_long: bool) -> None:
    nbytes = 0

    def rows() -> Iterator[tuple[str, ...]]:
        nonlocal nbytes
        for one in found:
            nbytes += one.nbytes
            if is_long:  # in this machine's time
                created = datetime.datetime.fromtimestamp(one.created).isoformat(" ", "seconds")
                kind = f"{one.kind}, on disk" if one.spilled else one.kind
                yield one.key, one.type, one.content, kind, f"{one.nbytes:,}", str(one.version), created
            else:
                yield cells(one)

    titles, right = (_LONG_COLUMNS, ("bytes", "version")) if is_long else (COLUMNS, ("size", "version", "age"))
    count = render.write_rows(titles, rows(), right=right)
    if count:
        render.console.print(f"{wording.count_of(count, 'key', 'keys')}, {wording.size(nbytes)}")
    else:
        _say_none("keys", prefix)


def _say_none(what: str, prefix: str) -> None:
    if not prefix:
        render.console.print(f"no {what}")
        return
    render.console.print(f"no {what} that start with {render.printable(repr(prefix))}")
    tell_pattern(prefix)


def tell_pattern(prefix: str) -> None:
    """Says of a prefix that looks like a pattern, and that no key starts with, what a prefix is."""
    place = min((prefix.find(char) for char in GLOB if char in prefix), default=-1)
    if place >= 0:
        start = f"{prefix[:place]!r} means all keys that start so" if place else "all keys start with none"
        render.complain(f"a prefix is plain text, and not a pattern: {start}")


def _list_pending(store: Keyspace, prefix: str, *, as_json: bool) -> None:
    found = [one for one in store.pending() if one.key.startswith(prefix)]
    if as_json:
        render.print_json(found)
        return
    titles = ("key", "attempt", "parts", "missing", "size", "expires in")
    if not render.write_rows(titles, map(_pending_cells, found), right=("parts", "size", "expires in")):
        _say_none("sharded puts that wait, under keys" if prefix else "sharded puts that wait", prefix)


def _pending_cells(one: PendingInfo) -> tuple[str, ...]:
    missing = sorted(set(range(one.world_size)) - set(one.ranks))
    parts, left = f"{len(one.ranks)} of {one.world_size}", f"{max(one.expires - time.time(), 0):.0f} s"
    return one.key, one.attempt, parts, wording.runs(missing), wording.size(one.nbytes), left


# --- Single keys: abort, info, rm, cp --------------------------------------------------------------------------------


_IN_PLACE = ("dataset", "buffer")  # kinds whose rows are written in place, and aren't copied


@cli.command(short_help="Give up a sharded put that waits for other ranks.")
@root
@click.argument("key", shell_complete=complete_pending)
@click.argument("attempt", shell_complete=complete_attempt)
@as_json
def abort(root: str, key: str, attempt: str, as_json: bool) -> None:
    """Give up a sharded put that waits for parts, for all its ranks: `memstore ls --pending` lists them."""
    with open_keyspace(root, "r+") as store:
        is_given_up = store.abort(key, attempt)
        waiting = [] if is_given_up else [one.attempt for one in store.pending() if one.key == key]
    if is_given_up or as_json:
        render.tell({"aborted": is_given_up}, "given up", as_json=as_json)
    if not is_given_up:
        others = f"of this key {', '.join(map(repr, waiting))} {'does' if len(waiting) == 1 else 'do'}"
        advice = others if waiting else "`memstore ls ROOT --pending` lists what does"
        render.complain(f"no attempt {attempt!r} of {key!r} waits for parts: {advice}")
        sys.exit(MISSING)


@cli.command(short_help="Show one entry: its leaves, bytes and files.")
@root
@key
@as_json
def info(root: str, key: str, as_json: bool) -> None:
    """Show one entry: its leaves with shapes and dtypes, its bytes and files."""
    if as_json:
        with memstore.open(root, "r") as store:
            found = render.plain(store.info(key))
            if found["kind"] in _IN_PLACE:
                rows, capacity = rows_of(opened(store), key, found["kind"])
                found |= {"rows": rows, "capacity": capacity}
            render.print_json(found)
        return
    with open_keyspace(root, "r") as keyspace:
        record = index.find(opened(keyspace), encode_key(key))
        if record is None:
            raise no_value(opened(keyspace), encode_key(key))
        files, nbytes = files_of(opened(keyspace), record), value_bytes(record)
        is_spilled = index.is_spilled(opened(keyspace), record)
        rows = f"{filled(opened(keyspace), key, record)}, " if record.is_mutable else ""
        described: EntryInfo | None = None
        try:
            structure, leaves = outline(record.description, record.objects)
        except UnknownKindError:  # only torch can tell
            described = _describe(root, key)
            structure = described.structure
            leaves = [
                OutlineLeaf(leaf.name, str(leaf.dtype).removeprefix("torch."), leaf.shape) for leaf in described.leaves
            ]
        if record.boxes is not None:
            described = described or _describe(root, key)
    size, age = wording.size(nbytes), wording.age(record.created)
    where = ", moved to a disk" if is_spilled else ""
    render.head(f"[bold]{render.printable(key)}[/]  {rows}version {record.version}, {size}, {age} old{where}")
    for file in files:
        render.console.print(f"[dim]{render.printable(file)}[/]")
    layouts = number_layouts(described.leaves if described is not None else ())
    render.print_whole(render.leaf_tree(structure, leaves, layouts.notes))
    for line in layouts.pictures(render.console.width):
        render.console.print(render.printable(line))


def _describe(root: str, key: str) -> EntryInfo:
    with memstore.open(root, "r") as store:
        return store.info(key)


@cli.command(short_help="List the versions of a key that can be read.")
@root
@key
@as_json
def versions(root: str, key: str, as_json: bool) -> None:
    """List the versions of KEY that can be read by `memstore get ROOT KEY --version V`: the last is the current one."""
    with open_keyspace(root, "r") as store:
        found = version_entries(store, key)
        if not found:
            raise no_value(opened(store), encode_key(key))
    if as_json:
        render.print_json(found)
        return
    titles, right = ("version", "type", "content", "size", "age"), ("version", "size", "age")
    rows = ((version, *shown, nbytes, age) for _, *shown, nbytes, version, age in map(cells, found))
    render.write_rows(titles, rows, right=right)


@cli.command(short_help="Delete keys, all of them or none.")
@root
@click.argument("keys", nargs=-1, required=True, shell_complete=complete_key)
@click.option("--prefix", is_flag=True, help="KEYS are prefixes: delete all keys that start with one.")
@click.option("--missing-ok", is_flag=True, help="Keys that aren't there are no error.")
@as_json
def rm(root: str, keys: tuple[str, ...], prefix: bool, missing_ok: bool, as_json: bool) -> None:
    """Delete KEYS, all of them or, if one is missing, none."""
    if prefix and "" in keys:
        raise click.UsageError("an empty prefix would delete every key; to start anew, remove the folder ROOT")
    with open_keyspace(root, "r+") as store:
        found = {start: [one.key for one in entries(store, start)] for start in keys} if prefix else {}
        names = list(itertools.chain.from_iterable(found.values())) if prefix else list(keys)
        with _prefix_advised(store):
            deleted = store.delete_many(names, missing_ok=missing_ok or prefix) if names else 0
    render.tell({"deleted": deleted}, f"{deleted:,} deleted", as_json=as_json)
    for start, there in found.items():
        if not there:
            tell_pattern(start)


@contextlib.contextmanager
def _prefix_advised(store: Keyspace) -> Generator[None]:
    """Says in the error of a key that isn't there, and is a prefix of others, what it is."""
    try:
        yield
    except KeyNotFoundError as error:
        if error.key and has_keys(store, error.key):
            error.message += f". With --prefix, {error.key!r} means all keys that start so"
        raise


@contextlib.contextmanager
def _key_named(key: str) -> Generator[None]:
    """Makes errors about one of many keys say which."""
    try:
        yield
    except MemstoreError as error:
        if repr(key) not in error.message:
            error.message = f"{key!r}: {error.message}"
        raise


@cli.command(short_help="Copy a key, into another store or to another key.")
@root
@key
@click.argument("target", type=click.Path(readable=False))
@click.argument("target_key", default="")
@click.option("--prefix", is_flag=True, help="KEY is a prefix: copy all keys that start with it.")
@click.option(
    "--allow-pickle", is_flag=True, help="Copy leaves that are pickles, too: they run code. Trust both stores."
)
@click.option("-f", "--force", is_flag=True, help="Replace keys that TARGET has.")
@as_json
def cp(
    root: str, key: str, target: str, target_key: str, prefix: bool, allow_pickle: bool, force: bool, as_json: bool
) -> None:
    """Copy KEY, under the same key or TARGET_KEY, into the store TARGET, which is created if need be.

    A key that TARGET has is replaced only with --force.

    Within one store, TARGET is ROOT: `memstore cp ROOT KEY ROOT TARGET_KEY`.
    """
    if prefix and target_key:
        raise click.UsageError("with --prefix all keys keep their names: leave TARGET_KEY out")
    if os.path.realpath(root) == os.path.realpath(target) and target_key in ("", key):
        what, other = ("each key", "TARGET") if prefix else (repr(key), "TARGET or TARGET_KEY")
        raise click.UsageError(f"this would copy {what} onto itself: say another {other}")
    if target_key:
        encode_key(target_key)
    copied: dict[str, int] = {}
    is_new = not has_settings(target)
    with opened_to_read(root, allow_pickle=allow_pickle) as source:
        chosen = _chosen(source, key, is_prefix=prefix)
        if not force and not is_new:
            _refuse_replaced(target, [target_key or name for name, _ in chosen])
        total, done, store = sum(nbytes for _, nbytes in chosen), 0, None
        with contextlib.ExitStack() as stack, render.progress("copying") as advance:
            stack.enter_context(left_over_told(target))
            stack.enter_context(_part_told(copied, len(chosen)))
            for name, nbytes in chosen:
                with _key_named(name):
                    value = source.get(name)
                    if store is None:  # created only for a value that could be read
                        store = stack.enter_context(memstore.open(target, allow_pickle=allow_pickle))
                    expected = None if force else 0
                    copied[target_key or name] = store.put(target_key or name, value, expect_version=expected)
                advance(done := done + nbytes, total)
    place = render.printable(os.path.abspath(target))
    into = f"; {place} is a new store" if is_new else f", into {place}"
    none = f"no keys that start with {render.printable(repr(key))}: nothing was copied"
    render.tell(copied, f"{len(copied):,} copied, {wording.size(total)}{into}" if copied else none, as_json=as_json)
    if prefix and not copied:
        tell_pattern(key)
    if copied and is_new and not prefix and not target_key and os.sep not in target:
        meant = shlex.join(["memstore", "cp", root, key, root, target])
        render.complain(f"{target!r} was taken as the folder of a store: to copy to a key of ROOT, say `{meant}`")


def _refuse_replaced(target: str, names: list[str]) -> None:
    """Refuses keys that the target has, before anything is copied."""
    with open_keyspace(target, "r") as store:
        there = [name for name in names if name in store]
    if there:
        more = f" and {len(there) - 1:,} more" if len(there) > 1 else ""
        raise AlreadyExistsError(
            f"{target} has {there[0]!r}{more} already: --force replaces {'them' if more else 'it'}; nothing was copied"
        )


def _chosen(source: memstore.Store, key: str, *, is_prefix: bool) -> list[tuple[str, int]]:
    """Returns keys and their bytes.

    Raises what would keep any of them from being copied, as far as nothing has to be read.
    """
    if not is_prefix:
        with _prefix_advised(source):
            return [(key, source.info(key).nbytes)]
    found = list(entries(source, key))
    for one in found:
        with _key_named(one.key):
            if one.kind in _IN_PLACE:
                source.get(one.key)  # which refuses it
            source.view(one.key)
    return [(one.key, one.nbytes) for one in found]


@contextlib.contextmanager
def _part_told(copied: dict[str, int], chosen: int) -> Generator[None]:
    """Says, where a copy ends early, how many keys it had copied."""
    try:
        yield
    except BaseException:
        if copied:
            render.complain(
                f"it ended after {len(copied):,} of {wording.count_of(chosen, 'key', 'keys')} had been copied"
            )
        raise


# --- watch: a live table of keys, versions and rates, which fits into its window -------------------------------------
# Rates     counts puts. Each put changes its key's word of the doorbell by one, so none is missed between two looks.
#           Several keys may have one word; which of them was put is then told by their versions, which are looked at
#           more often


_WATCH_TITLES = ("key", "version", "size", "age", "puts/s", "bytes/s")
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
        # another one after each change of the catalog here; other hosts may own keys too
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
    from rich.live import Live

    looks = itertools.islice(samples(store, prefix, interval), count or None)
    if as_json:
        for look in looks:
            render.print_json(look)
    elif not render.console.is_terminal:
        for look in looks:
            for line in watch_lines(look, _ROWS, 0):
                render.console.print(render.printable(line))
    else:
        with Live(console=render.console, auto_refresh=False, vertical_overflow="crop") as live:
            for look in looks:
                size = render.console.size
                shown = watch_lines(look, size.height - 1, size.width)
                live.update(Text("\n".join(shown), no_wrap=True, overflow="crop"), refresh=True)


def watch_lines(look: WatchSample, height: int, width: int) -> list[str]:
    """Draws the busiest keys, sorted, and what there is of all: at most `height` lines, of `width` columns (0: any)."""
    busiest = sorted(look.entries, key=lambda one: (-look.rates.get(one.key, 0.0), -one.version))
    shown = sorted(busiest[: max(height - _FRAME, 0)], key=lambda one: one.key.encode())
    rows = [_WATCH_TITLES, *(_watch_cells(one, look.rates.get(one.key)) for one in shown)]
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
    for least in map(_WATCH_TITLES.index, _LEAST):
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


def _watch_cells(one: ListedEntry, rate: float | None) -> tuple[str, ...]:
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


@cli.command(short_help="Follow keys: how often each is put, and how many bytes.")
@root
@click.argument("prefix", default="", shell_complete=complete_prefix)
@click.option("--interval", default=0.5, show_default=True, type=Seconds(0.01, 86_400), help="Seconds between looks.")
@click.option("--count", default=0, type=click.IntRange(0), help="End after so many looks; 0: run until interrupted.")
@as_json
def watch(root: str, prefix: str, interval: float, count: int, as_json: bool) -> None:
    """Follow the keys that start with PREFIX: how often each is put, how many bytes. With --json one line a look."""
    with open_keyspace(root, "r") as store:
        if GLOB.intersection(prefix) and not has_keys(store, prefix):
            tell_pattern(prefix)
        follow(store, prefix, interval, count, as_json=as_json)


# --- Rates -----------------------------------------------------------------------------------------------------------


_WINDOW = 5.0  # seconds that a rate is an average of
_OFTEN = 0.02  # seconds between looks at words that several keys have
_WORD = 1 << 32


class Rates:
    """The puts of each key a second, over the last seconds.

    Of a store on several hosts the words stand at the owner of a key. Of each key is told there how often it was
    seen to have another version, at most once a look.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._by_words = not is_served(root)
        self._versions: dict[str, int] = {}
        self._words: Sequence[int] = ()
        self._counted: defaultdict[int, int] = defaultdict(int)  # puts by word that were counted before it was read
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
            for name, count in puts.items():
                totals[name] += count
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
        for name, version in versions.items():
            if version and self._versions.get(name) != version:
                changed[self._root.doorbell.bell(name.encode())].append(name)
        for bell, keys in changed.items():
            rung = (words[bell] - self._words[bell]) % _WORD - self._counted.pop(bell, 0) if self._by_words else 0
            count = max(rung, len(keys))
            if self._by_words and count > rung:
                self._counted[bell] = count - rung
            for i, name in enumerate(keys):
                self._puts[name] += (count + i) // len(keys)
            there = self._sharing.setdefault(bell, [])
            there += [name for name in keys if name not in there]
