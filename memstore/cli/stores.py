"""Commands about whole stores: those of this machine, and the end of one, or of its keys."""

from __future__ import annotations

import os
import sys
import warnings

import click

import memstore
from memstore.cli import columns, render
from memstore.cli.codes import REFUSED
from memstore.cli.group import as_json, cli, complete_prefix, root
from memstore.cli.listing import tell_pattern
from memstore.cli.words import told
from memstore.errors import MemstoreError
from memstore.info import StoreSummary
from memstore.listing import entries, open_keyspace
from memstore.wording import count_of

_TITLES = ("root", "size", "age", "changed", "open in")
yes = click.option("-y", "--yes", is_flag=True, help="Don't ask.")


@cli.command(short_help="List the stores of this machine; --remove those that nobody has open.")
@click.option("--remove", is_flag=True, help="Remove those that no process has open, after a question.")
@click.option(
    "--force", is_flag=True, help="With --remove: also those that processes have open, or that were served to hosts."
)
@yes
@as_json
def stores(remove: bool, force: bool, yes: bool, as_json: bool) -> None:
    """List the stores on /dev/shm, and those that a process has open: size, age, last change, and pids.

    A store that is served to other hosts is never removed here: end its agent first.
    """
    if (force or yes) and not remove:
        raise click.UsageError(f"{'--force' if force else '--yes'} is for --remove: say that too, or leave it out")
    found = memstore.stores()
    chosen = [one for one in found if may_go(one, force=force)] if remove else []
    if not as_json and not columns.write(_TITLES, map(_cells, found), right=("size", "age", "changed")):
        render.console.print("no store on /dev/shm, and none that is open")
    if not remove:
        if as_json:
            render.print_json([render.plain(one) for one in found])
        return
    kept = len(found) - len(chosen)
    if kept and not as_json:
        render.console.print(f"{count_of(kept, 'store stays', 'stores stay')}: open, served, or a member of a cluster")
    if chosen:
        _ask(f"Remove {count_of(len(chosen), 'store', 'stores')}, {_total(chosen)}, with all values?", yes=yes)
    removed, failed = _removed(_still(chosen, force=force))
    render.tell(
        {"removed": [one.root for one in removed], "nbytes": sum(one.nbytes for one in removed)},
        f"{count_of(len(removed), 'store', 'stores')} removed, {_total(removed)}",
        as_json=as_json,
    )
    if failed:
        sys.exit(REFUSED)


def may_go(one: StoreSummary, *, force: bool) -> bool:
    """Whether `--remove` removes it: what is served never goes."""
    return not one.is_served and (force or not (one.pids or one.is_member))


def _still(chosen: list[StoreSummary], *, force: bool) -> list[StoreSummary]:
    """Looks again which of them may go: nobody knows how long the question stood there."""
    now = {one.root: one for one in memstore.stores()}
    left = [now[one.root] for one in chosen if one.root in now and may_go(now[one.root], force=force)]
    for path in {one.root for one in chosen} & now.keys() - {one.root for one in left}:
        render.complain(f"{path} stays: somebody has opened it meanwhile")
    return left


def _removed(chosen: list[StoreSummary]) -> tuple[list[StoreSummary], int]:
    """Removes them. Returns those that went, and how many couldn't; standard error gets the reasons."""
    removed: list[StoreSummary] = []
    for one in chosen:
        try:
            memstore.destroy(one.root)
            removed.append(one)
        except MemstoreError as error:
            render.complain(told(error))
    return removed, len(chosen) - len(removed)


def _cells(one: StoreSummary) -> tuple[str, ...]:
    pids = ", ".join(map(str, one.pids)) or "-"
    member = " (served)" if one.is_served else " (member)" if one.is_member else ""
    return one.root, render.size(one.nbytes), render.age(one.created), f"{render.age(one.changed)} ago", pids + member


def _total(some: list[StoreSummary]) -> str:
    return render.size(sum(one.nbytes for one in some))


def _ask(question: str, *, yes: bool) -> None:
    """Ends the command unless the answer is yes. Where nobody can answer, the option has to."""
    if yes:
        return
    if not sys.stdin or not sys.stdin.isatty():
        raise click.UsageError("this asks before it removes anything, and standard input is no terminal: say --yes")
    if not click.confirm(question, err=True):
        render.complain("nothing was removed")
        sys.exit(REFUSED)


@cli.command(short_help="Delete all keys, or those that start with PREFIX.")
@root
@click.argument("prefix", default="", shell_complete=complete_prefix)
@yes
@as_json
def clear(root: str, prefix: str, yes: bool, as_json: bool) -> None:
    """Delete all keys that start with PREFIX, or all. The store stays, and who has it open goes on."""
    with open_keyspace(root, "r+") as store:
        count = sum(1 for _ in entries(store, prefix))
    start = f" that start with {prefix!r}" if prefix else ""
    if count:
        _ask(f"Delete {count_of(count, 'key', 'keys')}{start} of {os.path.abspath(root)}?", yes=yes)
    with memstore.open(root, "r+") as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a pattern, which is told below
        deleted = store.clear(prefix)
    render.tell({"deleted": deleted}, f"{deleted:,} deleted", as_json=as_json)
    if not deleted:
        tell_pattern(prefix)


@cli.command(short_help="Remove the whole store ROOT, and its folder.")
@root
@yes
@as_json
def destroy(root: str, yes: bool, as_json: bool) -> None:
    """Remove the whole store ROOT with all values, and its folder. Who has it open keeps the values that it got.

    (`memstore rm` deletes keys, and `memstore remove` takes a dead host out of a cluster.)
    """
    path = os.path.abspath(root)
    if os.path.lexists(f"{path}/memstore.json"):
        _ask(f"Remove the store {path} with all values?", yes=yes)
    memstore.destroy(root)
    render.tell({"removed": path}, f"{render.printable(path)} removed", as_json=as_json)
