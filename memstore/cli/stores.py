"""Commands about whole stores.

stats, verify, repair, gc, bench    the upkeep of one, and what this machine does
top                                 which process holds what
stores, clear, destroy              the stores of this machine, and the end of one, or of its keys
metrics, ui                         its figures, for Prometheus and for people
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import secrets
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib import metadata

import click

import memstore
from memstore import _wording as wording
from memstore._info import Progress, RepairReport, StoreSummary, VerifyReport, rows_of_space
from memstore.cli import messages, render
from memstore.cli.group import (
    DAMAGED,
    REFUSED,
    Seconds,
    as_json,
    cli,
    complete_key,
    complete_prefix,
    opened_to_read,
    root,
)
from memstore.cli.keys import tell_pattern
from memstore.cli.messages import in_words, message_of
from memstore.engine import (
    Creation,
    Holding,
    close_root,
    command_of,
    destroy_root,
    is_served,
    open_root,
    resource_errors,
    who_holds,
)
from memstore.errors import CorruptionError, MemstoreError, NotAStoreError, StoreTimeoutError
from memstore.listing import entries, open_keyspace, opened

# --- What `memstore bench` measures: this machine, in a few seconds. For figures to quote, see tests/benchmarks -------


_PACKAGES = ("tensordict", "lmdb", "msgspec", "numpy")
_LARGE = 64 << 20  # bytes
_SECONDS = 0.3  # a measurement


@dataclass(frozen=True, slots=True)
class Measurement:
    """A call's median time in seconds. `limit` is what the machine alone takes for it."""

    what: str
    seconds: float
    nbytes: int = 0
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Selftest:
    root: str
    filesystem: str
    huge_pages: bool  # whether large values get them
    cores: int
    memory: int  # bytes
    system: str
    versions: dict[str, str]  # of Python and of what takes part
    results: list[Measurement]


def _median(call: Callable[[], object]) -> float:
    call()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        kept = call()
        times.append(time.perf_counter() - start)
        del kept
    return statistics.median(times)


def measure_machine(root: str) -> Selftest:
    import torch

    from memstore.engine import filesystem_name, syscalls

    folder = tempfile.mkdtemp(prefix="memstore-bench-", dir=root)
    try:
        with memstore.open(f"{folder}/store") as store:
            small, large = torch.randn(256), torch.randn(_LARGE // 4)
            other = torch.empty_like(large)
            copy = _median(lambda: other.copy_(large))
            total = _median(lambda: large.sum())
            results = [
                Measurement("put of 1 KiB", _median(lambda: store.put("small", small))),
                Measurement("get of 1 KiB", _median(lambda: store.get("small"))),
                Measurement("overwrite of 64 MiB", _median(lambda: store.put("large", large)), _LARGE, copy),
                Measurement("get of 64 MiB, the call", _median(lambda: store.get("large"))),
                Measurement("get of 64 MiB, until summed", _median(lambda: store.get("large").sum()), _LARGE, total),
            ]
            held = store.get("large")
            held.sum()
            huge = store.stats().huge_page_bytes > _LARGE // 2
            del held
        name = filesystem_name(syscalls.filesystem_type(folder))
        return Selftest(
            root=root,
            filesystem=name,
            huge_pages=huge,
            cores=len(os.sched_getaffinity(0)),
            memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            versions=_versions(),
            results=results,
        )
    finally:
        shutil.rmtree(folder)


def _versions() -> dict[str, str]:
    import torch

    found = {"memstore": memstore.__version__, "python": platform.python_version()}
    found["torch"] = str(torch.__version__)  # it says for which CUDA it was built; its package's own version doesn't
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def show_bench(found: Selftest) -> None:
    pages = "huge pages" if found.huge_pages else "small pages"
    render.console.print(f"{found.root}: {found.filesystem}, {pages}, {found.cores} cores")
    render.console.print(f"{found.system}, {wording.size(found.memory)}")
    render.console.print(", ".join(f"{name} {version}" for name, version in found.versions.items()))
    rows = [
        (
            one.what,
            _time(one.seconds),
            f"{one.nbytes / one.seconds / 1e9:.1f} GB/s" if one.nbytes else "",
            f"{one.limit / one.seconds:.2f} of {_time(one.limit)}" if one.limit else "",
        )
        for one in found.results
    ]
    render.write_rows(("", "time", "bandwidth", "of the machine's"), rows, right=("time", "bandwidth"))


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


# --- stats, verify, repair, gc, bench --------------------------------------------------------------------------------


_PATIENCE = 1.0  # seconds before a wait is told
_OPEN_WITHIN = 30.0  # seconds, as `memstore.open`


@cli.command(short_help="Show the space it takes, and who holds replaced versions.")
@root
@as_json
def stats(root: str, as_json: bool) -> None:
    """Show the space that the store takes, and which processes hold replaced versions."""
    with open_keyspace(root, "r") as store:
        found = store.stats()
        here = "that this host owns" if is_served(opened(store)) else ""
    if as_json:
        render.print_json(found)
        return
    rows = [("keys", f"{found.keys:,}", here), *rows_of_space(found)]
    render.write_rows(("", "", ""), rows, is_headed=False)


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
            render.console.print(f"[bold red]damaged[/]  {render.printable(message_of(error))}")
        unchecked = f", {report.unchecked:,} without checksums" if report.unchecked else ""
        render.console.print(f"{report.checked:,} checked{unchecked}, {len(report.damaged):,} damaged")
    if not report.ok:
        sys.exit(DAMAGED)


def _damage(root: str, error: NotAStoreError) -> CorruptionError:
    """Returns what is wrong with a memstore.json that keeps a store closed. Raises the error if there is no store."""
    path = os.path.join(os.path.abspath(root), "memstore.json")
    if messages.has_lost_settings(os.path.dirname(path)):
        return CorruptionError(path=path, detail=f"missing: {messages.PUT_BACK}")
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
        recovered = wording.count_of(len(report.recovered), "key", "keys")
        more = ", and perhaps others" if may_have_lost else ""
        freed = wording.size(report.swept_bytes)
        render.console.print(f"{recovered} recovered, {len(report.lost):,} lost{more}, {freed} given back")
    if report.lost or may_have_lost:
        sys.exit(DAMAGED)


@contextlib.contextmanager
def _warnings() -> Generator[list[str]]:
    """Collects what the library warns of meanwhile, which it would else write to standard error by itself."""
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
    """Repairs, and says after a second for whom it waits. A repair that has waited in vain has changed nothing."""
    if timeout > _PATIENCE:
        try:
            return memstore.repair(root, timeout=_PATIENCE, progress=advance)
        except StoreTimeoutError as error:
            timeout -= _PATIENCE
            render.complain(f"{in_words(str(error))}. It waits up to {timeout:.3g} s more")
    return memstore.repair(root, timeout=timeout, progress=advance)


@cli.command(short_help="Show or set how many bytes the keys with a prefix may take.")
@root
@click.argument("prefix", required=False, shell_complete=complete_prefix)
@click.argument("size", required=False)
@click.option("--end", is_flag=True, help="End the quota of PREFIX.")
@as_json
def quota(root: str, prefix: str | None, size: str | None, end: bool, as_json: bool) -> None:
    """List the quotas of a store; or, with PREFIX and SIZE ("8GiB"), set how many bytes keys that start so may take."""
    if end and (prefix is None or size is not None):
        raise click.UsageError("--end ends the quota of PREFIX: say that, and no SIZE")
    if prefix is not None and size is None and not end:
        raise click.UsageError("say SIZE, such as 8GiB, to set the quota of PREFIX; --end ends it")
    with open_keyspace(root, "r" if prefix is None else "r+") as store:
        if prefix is not None:
            store.set_quota(prefix, size)
        found = store.quotas()
    if as_json:
        render.print_json(found)
        return
    rows = ((one.prefix, wording.size(one.used), wording.size(one.quota)) for one in found)
    if not render.write_rows(("prefix", "used", "quota"), rows, right=("used", "quota")):
        render.console.print("no quotas")


@cli.command(short_help="Show or set the folder to which values move when there is no room.")
@root
@click.argument("path", required=False, type=click.Path())
@as_json
def spill(root: str, path: str | None, as_json: bool) -> None:
    """Show what values a store has moved to a disk; or set PATH, the folder to which they move when there is no room.

    Values that nobody has read for longest move there, and are read from there.
    """
    if path is not None:
        with resource_errors(root):
            close_root(open_root(root, "r+", Creation(spill=os.path.abspath(path)), _OPEN_WITHIN))
    with open_keyspace(root, "r") as store:
        folder, nbytes = opened(store).storage.spill_folder(), store.stats().spilled_bytes
        moved = sum(one.spilled for one in entries(store)) if nbytes else 0
    free = 0 if folder is None else shutil.disk_usage(folder).free
    said = "no folder is set: values stay in the store's own"
    if folder is not None:
        count = wording.count_of(moved, "value", "values")
        said = f"{count} of {wording.size(nbytes)} in {folder}, which has {wording.size(free)} free"
    found = {"folder": folder, "values": moved, "nbytes": nbytes, "free_bytes": free}
    render.tell(found, said, as_json=as_json)


@cli.command(short_help="Free the files that nobody holds.")
@root
@as_json
def gc(root: str, as_json: bool) -> None:
    """Free the files that nobody holds: replaced versions, files kept to be used again, files of dead writers."""
    with open_keyspace(root, "r+") as store:
        freed = store.gc()
    render.tell({"freed_bytes": freed}, f"{wording.size(freed)} given back", as_json=as_json)


@cli.command(short_help="Measure this machine: put, get and memcpy.")
@click.argument("root", type=click.Path(exists=True, file_okay=False), default="/dev/shm")
@as_json
def bench(root: str, as_json: bool) -> None:
    """Measure this machine: put, get and memcpy, in a store that is created under ROOT (/dev/shm) and removed again."""

    with render.progress("measuring"):
        found = measure_machine(root)
    if as_json:
        render.print_json(found)
    else:
        show_bench(found)


# --- top -------------------------------------------------------------------------------------------------------------


_COMMAND = 16  # columns of a command, at least
_KEYS = 30  # columns of keys that a command leaves free, as far as there are such keys
_LONGEST = 200  # of a command in a file or a pipe
_NAMED = 3  # keys
_HOLDER_TITLES = ("pid", "held", "replaced", "command", "keys")


@cli.command(short_help="Show which process holds what.")
@root
@as_json
def top(root: str, as_json: bool) -> None:
    """Show the processes that have the store open, or hold values of it; the one that holds most comes first.

    "replaced" are bytes of versions that were replaced or deleted, and stay as long as the process holds them.
    """
    with open_keyspace(root, "r") as store:
        found = [one for one in who_holds(opened(store)) if one.pid != os.getpid()]
    if as_json:
        render.print_json([{**render.plain(one), "command": command_of(one.pid)} for one in found])
        return
    if not render.write_rows(
        _HOLDER_TITLES, _fitted(list(map(_holder_cells, found))), right=("pid", "held", "replaced")
    ):
        render.console.print("no process has the store open or holds one of its values, as far as /proc shows")


def _holder_cells(one: Holding) -> tuple[str, ...]:
    program, space, arguments = command_of(one.pid).partition(" ")
    command = f"{os.path.basename(program)}{space}{arguments}"
    live = wording.size(one.live_bytes) if one.keys else "-"
    replaced = wording.size(one.replaced_bytes) if one.replaced else "-"
    return str(one.pid), live, replaced, command, _held_names(one)


def _fitted(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Cuts commands to what the other columns leave room for."""
    room = _LONGEST
    if render.console.is_terminal and rows:
        pids, held, replaced, _, keys = (
            max(map(render.cell_width, map(wording.escaped, cells)))
            for cells in zip(_HOLDER_TITLES, *rows, strict=True)
        )
        others = (
            max(pids, render.LEAST_FIRST) + held + replaced + min(keys, _KEYS) + render.gap_width(len(_HOLDER_TITLES))
        )
        room = max(_COMMAND, render.console.width - others)
    return [(*row[:3], render.cut_cell(row[3], room), row[4]) for row in rows]


def _held_names(one: Holding) -> str:
    keys = [*dict.fromkeys(one.keys), *(f"{key} (replaced)" for key in dict.fromkeys(one.replaced))]
    return wording.first_of(keys, _NAMED) if keys else "(open)"


# --- stores, clear, destroy ------------------------------------------------------------------------------------------


_REMOVED_WITHIN = 30.0  # seconds
_STORE_TITLES = ("root", "size", "age", "changed", "open in")
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
    if not as_json and not render.write_rows(_STORE_TITLES, map(_store_cells, found), right=("size", "age", "changed")):
        render.console.print("no store on /dev/shm, and none that is open")
    if not remove:
        if as_json:
            render.print_json([render.plain(one) for one in found])
        return
    kept = len(found) - len(chosen)
    if kept and not as_json:
        render.console.print(
            f"{wording.count_of(kept, 'store stays', 'stores stay')}: open, served, or a member of a cluster"
        )
    if chosen:
        ask(
            f"Remove {wording.count_of(len(chosen), 'store', 'stores')}, {_total_size(chosen)}, with all values?",
            yes=yes,
        )
    removed, failed = _removed(chosen, even_used=force)
    render.tell(
        {"removed": [one.root for one in removed], "nbytes": sum(one.nbytes for one in removed)},
        f"{wording.count_of(len(removed), 'store', 'stores')} removed, {_total_size(removed)}",
        as_json=as_json,
    )
    if failed:
        sys.exit(REFUSED)


def may_go(one: StoreSummary, *, force: bool) -> bool:
    """Returns whether `--remove` removes it: what is served never goes."""
    return not one.is_served and (force or not (one.pids or one.is_member))


def _removed(chosen: list[StoreSummary], *, even_used: bool) -> tuple[list[StoreSummary], int]:
    """Returns the stores that were removed, and how many couldn't be; standard error gets the reasons.

    A process may have opened one since the stores were listed, or out of sight, as in a container.
    """
    removed: list[StoreSummary] = []
    for one in chosen:
        try:
            with resource_errors(one.root):
                gone = destroy_root(one.root, _REMOVED_WITHIN, even_used=even_used)
        except MemstoreError as error:
            render.complain(message_of(error))
            continue
        if gone:
            removed.append(one)
        else:
            render.complain(f"{one.root} stays: a process has it open by now, or it became a member of a cluster")
    return removed, len(chosen) - len(removed)


def _store_cells(one: StoreSummary) -> tuple[str, ...]:
    pids = ", ".join(map(str, one.pids)) or "-"
    member = " (served)" if one.is_served else " (member)" if one.is_member else ""
    return (
        one.root,
        wording.size(one.nbytes),
        wording.age(one.created),
        f"{wording.age(one.changed)} ago",
        pids + member,
    )


def _total_size(some: list[StoreSummary]) -> str:
    return wording.size(sum(one.nbytes for one in some))


def ask(question: str, *, yes: bool) -> None:
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
        ask(f"Delete {wording.count_of(count, 'key', 'keys')}{start} of {os.path.abspath(root)}?", yes=yes)
    with open_keyspace(root, "r+") as store, warnings.catch_warnings():
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
        ask(f"Remove the store {path} with all values?", yes=yes)
    memstore.destroy(root)
    render.tell({"removed": path}, f"{render.printable(path)} removed", as_json=as_json)


# --- metrics, ui -----------------------------------------------------------------------------------------------------


_checkpoints = click.option(
    "--checkpoints",
    multiple=True,
    metavar="PATH",
    help="The folder of a CheckpointManager, or a URL, whose steps are told too. May be given several times.",
)


@cli.command(short_help="Print figures for Prometheus.")
@root
@click.option("--keys", default=1000, show_default=True, type=click.IntRange(0), help="Keys with figures of their own.")
@_checkpoints
def metrics(root: str, keys: int, checkpoints: tuple[str, ...]) -> None:
    """Print the figures of the store as text for Prometheus: versions, bytes, ages, processes, hosts, buffers."""
    from memstore.metrics import prometheus

    with open_keyspace(root, "r") as store:
        text = prometheus(store, keys=keys, checkpoints=checkpoints)
    click.echo(text, nl=False)


@cli.command(short_help="Serve a live page of the store.")
@root
@click.option("--port", default=8600, show_default=True, type=click.IntRange(0, 65535), help="0: any free one.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address at which to listen: 0.0.0.0 for other hosts."
)
@click.option(
    "--token",
    envvar="MEMSTORE_UI_TOKEN",
    help="What everybody has to know who looks. Beyond this host one is made if it isn't given.",
)
@_checkpoints
def ui(root: str, port: int, host: str, token: str | None, checkpoints: tuple[str, ...]) -> None:
    """Serve a live page of the store, until Ctrl-C: keys, versions, bytes, who holds what, hosts, replay buffers.

    The page only reads. It also has /metrics for Prometheus.
    """
    from memstore.ui import server

    open_keyspace(root, "r").close()  # a wrong ROOT is told here
    if token is None and not server.is_loopback(host):
        token = secrets.token_urlsafe(16)
    try:
        page = server.serve(root, host=host, port=port, token=token, checkpoints=checkpoints)
    except OSError as error:
        if isinstance(error, NotAStoreError):
            raise
        raise click.UsageError(f"{host}:{port}: {error.strerror}: say another --port, or 0 for any") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with page:
        render.console.print(render.printable(page.url), soft_wrap=True)
        page.wait()
