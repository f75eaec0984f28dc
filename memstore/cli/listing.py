"""`memstore ls`: keys, and sharded puts that wait for other ranks."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from memstore.cli import columns, render
from memstore.cli.group import as_json, cli, complete_prefix, root
from memstore.info import PendingInfo
from memstore.listing import COLUMNS, GLOB, Keyspace, Listed, cells, entries, key_tree, open_keyspace
from memstore.wording import count_of

_LONG = ("key", "type", "content", "kind", "bytes", "version", "created")

_SORTS: dict[str, Callable[[Listed], Any]] = {
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
        found = _sorted(entries(store, prefix), sort, reverse=reverse)
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


def _sorted(found: Iterator[Listed], sort: str | None, *, reverse: bool) -> Iterable[Listed]:
    """In the order of the catalog they come page by page."""
    if sort is None and not reverse:
        return found
    return sorted(found, key=_SORTS[sort or "key"], reverse=reverse)


def _list_keys(found: Iterable[Listed], prefix: str, *, is_long: bool) -> None:
    nbytes = 0

    def rows() -> Iterator[tuple[str, ...]]:
        nonlocal nbytes
        for one in found:
            nbytes += one.nbytes
            yield _long_cells(one) if is_long else cells(one)

    titles, right = (_LONG, ("bytes", "version")) if is_long else (COLUMNS, ("size", "version", "age"))
    count = columns.write(titles, rows(), right=right)
    if count:
        render.console.print(f"{count_of(count, 'key', 'keys')}, {render.size(nbytes)}")
    else:
        _say_none("keys", prefix)


def _long_cells(one: Listed) -> tuple[str, ...]:
    created = datetime.datetime.fromtimestamp(one.created).isoformat(" ", "seconds")  # this machine's time
    return one.key, one.type, one.content, one.kind, f"{one.nbytes:,}", str(one.version), created


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
    if not columns.write(titles, map(_pending_cells, found), right=("parts", "size", "expires in")):
        _say_none("sharded puts that wait, under keys" if prefix else "sharded puts that wait", prefix)


def _pending_cells(one: PendingInfo) -> tuple[str, ...]:
    missing = sorted(set(range(one.world_size)) - set(one.ranks))
    parts, left = f"{len(one.ranks)} of {one.world_size}", f"{max(one.expires - time.time(), 0):.0f} s"
    return one.key, one.attempt, parts, render.runs(missing), render.size(one.nbytes), left
