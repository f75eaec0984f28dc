"""Commands about keys: `ls` and `tree` list them, `info` shows one, `rm` deletes and `cp` copies some.

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
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import click

import memstore
from memstore import _wording as wording
from memstore._arguments import encode_key
from memstore._info import EntryInfo, PendingInfo
from memstore.cli import inspection, render
from memstore.cli.codes import MISSING
from memstore.cli.files import left_over_told
from memstore.cli.group import (
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
from memstore.engine import files_of, has_settings, index
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
                yield one.key, one.type, one.content, one.kind, f"{one.nbytes:,}", str(one.version), created
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
    with memstore.open(root, "r+") as store:
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
                rows, capacity = inspection.rows_of(opened(store), key, found["kind"])
                found |= {"rows": rows, "capacity": capacity}
            render.print_json(found)
        return
    with open_keyspace(root, "r") as keyspace:
        record = index.find(opened(keyspace), encode_key(key))
        if record is None:
            raise no_value(opened(keyspace), encode_key(key))
        files, nbytes = files_of(opened(keyspace), record), value_bytes(record)
        rows = f"{inspection.filled(opened(keyspace), key, record)}, " if record.is_mutable else ""
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
    render.head(f"[bold]{render.printable(key)}[/]  {rows}version {record.version}, {size}, {age} old")
    for file in files:
        render.console.print(f"[dim]{render.printable(file)}[/]")
    layouts = number_layouts(described.leaves if described is not None else ())
    render.print_whole(render.leaf_tree(structure, leaves, layouts.notes))
    for line in layouts.pictures(render.console.width):
        render.console.print(render.printable(line))


def _describe(root: str, key: str) -> EntryInfo:
    with memstore.open(root, "r") as store:
        return store.info(key)


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
