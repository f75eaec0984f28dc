"""Commands about entries: to look at one, delete and copy them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sys
from collections.abc import Generator

import click

import memstore
from memstore.cli import looking, render
from memstore.cli.codes import MISSING
from memstore.cli.files import left_over_told
from memstore.cli.group import as_json, cli, complete_attempt, complete_key, complete_pending, key, opened_to_read, root
from memstore.cli.listing import tell_pattern
from memstore.cli.shards import number_layouts
from memstore.engine import files_of, index
from memstore.errors import AlreadyExistsError, KeyNotFoundError, MemstoreError
from memstore.info import EntryInfo
from memstore.keys import encode_key
from memstore.listing import (
    Keyspace,
    Leaf,
    UnknownKindError,
    entries,
    has_keys,
    no_value,
    open_keyspace,
    opened,
    outline,
    value_bytes,
)
from memstore.wording import count_of

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
                rows, capacity = looking.rows_of(store, key, found["kind"])
                found |= {"rows": rows, "capacity": capacity}
            render.print_json(found)
        return
    with open_keyspace(root, "r") as keyspace:
        record = index.find(opened(keyspace), encode_key(key))
        if record is None:
            raise no_value(opened(keyspace), encode_key(key))
        files, nbytes = files_of(opened(keyspace), record), value_bytes(record)
        rows = f"{looking.filled(opened(keyspace), key, record)}, " if record.is_mutable else ""
        described: EntryInfo | None = None
        try:
            structure, leaves = outline(record.description, record.objects)
        except UnknownKindError:  # only torch can tell
            described = _describe(root, key)
            structure, leaves = described.structure, _leaves(described)
        if record.boxes is not None:
            described = described or _describe(root, key)
    size, age = render.size(nbytes), render.age(record.created)
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


def _leaves(found: EntryInfo) -> list[Leaf]:
    return [Leaf(leaf.name, str(leaf.dtype).removeprefix("torch."), leaf.shape) for leaf in found.leaves]


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
    """Of a key that isn't there and is a prefix of others, the error says so."""
    try:
        yield
    except KeyNotFoundError as error:
        if error.key and has_keys(store, error.key):
            error.message += f". With --prefix, {error.key!r} means all keys that start so"
        raise


@contextlib.contextmanager
def _key_named(key: str) -> Generator[None]:
    """Errors about one of many keys say which."""
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
    is_new = not looking.is_store(target)
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
    render.tell(copied, f"{len(copied):,} copied, {render.size(total)}{into}" if copied else none, as_json=as_json)
    if prefix and not copied:
        tell_pattern(key)
    if copied and is_new and not prefix and not target_key and os.sep not in target:
        meant = shlex.join(["memstore", "cp", root, key, root, target])
        render.complain(f"{target!r} was taken as the folder of a store: to copy to a key of ROOT, say `{meant}`")


def _refuse_replaced(target: str, names: list[str]) -> None:
    """Before anything is copied."""
    with open_keyspace(target, "r") as store:
        there = [name for name in names if name in store]
    if there:
        more = f" and {len(there) - 1:,} more" if len(there) > 1 else ""
        raise AlreadyExistsError(
            f"{target} has {there[0]!r}{more} already: --force replaces {'them' if more else 'it'}; nothing was copied"
        )


def _chosen(source: memstore.Store, key: str, *, is_prefix: bool) -> list[tuple[str, int]]:
    """Keys and their bytes. Raises what would keep any of them from being copied, as far as nothing has to be read."""
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
    """A copy that ends early says how many keys it had copied."""
    try:
        yield
    except BaseException:
        if copied:
            render.complain(f"it ended after {len(copied):,} of {count_of(chosen, 'key', 'keys')} had been copied")
        raise
