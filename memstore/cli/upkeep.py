"""Commands about a store as a whole, and about this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Generator

import click

import memstore
from memstore.cli import columns, nowhere, render
from memstore.cli.codes import DAMAGED
from memstore.cli.group import Seconds, as_json, cli, complete_key, complete_prefix, opened_to_read, root
from memstore.cli.listing import tell_pattern
from memstore.cli.words import in_words, told
from memstore.engine import is_served
from memstore.errors import CorruptionError, NotAStoreError, StoreTimeoutError
from memstore.info import Progress, RepairReport, VerifyReport, rows_of_space
from memstore.listing import GLOB, has_keys, open_keyspace, opened
from memstore.wording import count_of

_PATIENCE = 1.0  # seconds before a wait is told


@cli.command(short_help="Show the space it takes, and who holds replaced versions.")
@root
@as_json
def stats(root: str, as_json: bool) -> None:
    """Show the space that the store takes, and which processes hold replaced versions."""
    with open_keyspace(root, "r") as store:
        found = store.stats()
        here = "with their home on this host" if is_served(opened(store)) else ""
    if as_json:
        render.print_json(found)
        return
    rows = [("keys", f"{found.keys:,}", here), *rows_of_space(found)]
    columns.write(("", "", ""), rows, is_headed=False)


@cli.command(short_help="Compare everything with its checksums.")
@root
@click.argument("keys", nargs=-1, shell_complete=complete_key)
@as_json
def verify(root: str, keys: tuple[str, ...], as_json: bool) -> None:
    """Compare everything, or KEYS, with its checksums. Exit code 1 if anything is damaged."""
    try:
        with opened_to_read(root) as store, render.progress("verifying") as advance:
            for name in keys:
                store.version(name)  # else a missing key would be told as damage
            report = store.verify(keys or None, progress=advance)
    except CorruptionError as error:  # it keeps the store from being opened
        report = VerifyReport(0, 0, (error,), False)
    except NotAStoreError as error:
        report = VerifyReport(0, 0, (_damage(root, error),), False)
    if as_json:
        render.print_json(report)
    else:
        for error in report.damaged:
            render.console.print(f"[bold red]damaged[/]  {render.printable(told(error))}")
        unchecked = f", {report.unchecked:,} without checksums" if report.unchecked else ""
        render.console.print(f"{report.checked:,} checked{unchecked}, {len(report.damaged):,} damaged")
    if not report.ok:
        sys.exit(DAMAGED)


def _damage(root: str, error: NotAStoreError) -> CorruptionError:
    """What is wrong with the memstore.json of a store that can't be opened. Raises the error if there is no store."""
    path = os.path.join(os.path.abspath(root), "memstore.json")
    if nowhere.has_lost_settings(os.path.dirname(path)):
        return CorruptionError(path=path, detail=f"missing: {nowhere.PUT_BACK}")
    if re.search(r"memstore\.json is (foreign or )?damaged", str(error)):
        return CorruptionError(str(error), path=path)
    raise error


@cli.command(short_help="Make a new catalog of all intact entries.")
@root
@click.option(
    "--timeout",
    default=30.0,
    show_default=True,
    type=Seconds(0.0),
    help="Seconds to wait for processes that use the store.",
)
@as_json
def repair(root: str, timeout: float, as_json: bool) -> None:
    """Make a new catalog of all intact entries. No other process may use the store.

    Exit code 1 if keys were lost, or may have been without anybody knowing which.
    """
    with render.progress("repairing") as advance, _warnings() as warned:
        report = _repair(root, timeout, advance)
    may_have_lost = any("lost" in text for text in warned)
    if as_json:
        render.print_json({**render.plain(report), "may_have_lost_more": may_have_lost, "warnings": warned})
    else:
        for text in warned:
            render.complain(text)
        for name in report.lost:
            render.console.print(f"[bold red]lost[/]  {render.printable(name)}")
        recovered = count_of(len(report.recovered), "key", "keys")
        more = ", and perhaps others" if may_have_lost else ""
        freed = render.size(report.swept_bytes)
        render.console.print(f"{recovered} recovered, {len(report.lost):,} lost{more}, {freed} given back")
    if report.lost or may_have_lost:
        sys.exit(DAMAGED)


@contextlib.contextmanager
def _warnings() -> Generator[list[str]]:
    """What the library warns of meanwhile, which it would else write to standard error by itself."""
    found: list[str] = []
    handler, log = logging.Handler(logging.WARNING), logging.getLogger("memstore")
    handler.emit = lambda record: found.append(record.getMessage())
    log.addHandler(handler)
    try:
        yield found
    except BaseException:
        for text in found:
            render.complain(text)
        raise
    finally:
        log.removeHandler(handler)


def _repair(root: str, timeout: float, advance: Progress) -> RepairReport:
    """Says after a second for whom it waits. A repair that has waited in vain has changed nothing."""
    if timeout > _PATIENCE:
        try:
            return memstore.repair(root, timeout=_PATIENCE, progress=advance)
        except StoreTimeoutError as error:
            timeout -= _PATIENCE
            render.complain(f"{in_words(str(error))}. It waits up to {timeout:.3g} s more")
    return memstore.repair(root, timeout=timeout, progress=advance)


@cli.command(short_help="Free the files that nobody holds.")
@root
@as_json
def gc(root: str, as_json: bool) -> None:
    """Free the files that nobody holds: replaced versions, files kept to be used again, files of dead writers."""
    with open_keyspace(root, "r+") as store:
        freed = store.gc()
    render.tell({"freed_bytes": freed}, f"{render.size(freed)} given back", as_json=as_json)


@cli.command(short_help="Follow keys: how often each is put, and how many bytes.")
@root
@click.argument("prefix", default="", shell_complete=complete_prefix)
@click.option("--interval", default=0.5, show_default=True, type=Seconds(0.01, 86_400), help="Seconds between looks.")
@click.option("--count", default=0, type=click.IntRange(0), help="End after so many looks; 0: run until interrupted.")
@as_json
def watch(root: str, prefix: str, interval: float, count: int, as_json: bool) -> None:
    """Follow the keys that start with PREFIX: how often each is put, how many bytes. With --json one line a look."""
    from memstore.cli.watch import follow

    with open_keyspace(root, "r") as store:
        if GLOB.intersection(prefix) and not has_keys(store, prefix):
            tell_pattern(prefix)
        follow(store, prefix, interval, count, as_json=as_json)


@cli.command(short_help="Measure this machine: put, get and memcpy.")
@click.argument("root", type=click.Path(exists=True, file_okay=False), default="/dev/shm")
@as_json
def bench(root: str, as_json: bool) -> None:
    """Measure this machine: put, get and memcpy, in a store that is created under ROOT (/dev/shm) and removed again."""
    from memstore.cli.selftest import measure, show

    with render.progress("measuring"):
        found = measure(root)
    if as_json:
        render.print_json(found)
    else:
        show(found)
