"""Commands about whole stores.

stats, verify, repair, gc, bench    the upkeep of one, and what this machine does
top                                 which process holds what
stores, clear, destroy              the stores of this machine, and the end of one, or of its keys
serve, status, remove               a store on several hosts
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import click

import memstore
from memstore import _wording as wording
from memstore._info import ClusterStatus, HostStatus, Progress, RepairReport, StoreSummary, VerifyReport, rows_of_space
from memstore.cli import messages, render
from memstore.cli.group import (
    DAMAGED,
    REFUSED,
    SILENT,
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
from memstore.errors import CorruptionError, MemstoreError, NotAStoreError, NotServedError, StoreTimeoutError
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


# --- serve, status, remove -------------------------------------------------------------------------------------------


_SAID_EVERY = 2.0  # seconds
_HOST_TITLES = ("address", "name", "alive", "epoch", "starts", "keys", "live", "by", "sent", "received")


def _open_fd(context: click.Context, option: click.Parameter, fd: int | None) -> int | None:
    """Refuses a number that is no open file's: it would be found out when the host is a member."""
    try:
        if fd is not None:
            os.fstat(fd)
    except OSError:
        raise click.BadParameter(
            f"{fd} is no open file descriptor: open one, as {fd}>FILE behind the command does in a shell",
            context,
            option,
        ) from None
    return fd


@cli.command(short_help="Serve the store to other hosts.")
@root
@click.option(
    "--address",
    required=True,
    help="Where other hosts reach this one: tcp://IP:PORT. Another one than before: --moved.",
)
@click.option(
    "--join",
    "named",
    multiple=True,
    help="The address of a member, or several. Hosts of a first boot name each other. A member needs none.",
)
@click.option("--new", is_flag=True, help="A store without a cluster makes one at once.")
@click.option("--moved", is_flag=True, help="The store was served at another address, and isn't there any more.")
@click.option("--no-owner", is_flag=True, help="Another host owns what is put here first: for hosts that come and go.")
@click.option(
    "--insecure", is_flag=True, help="Serve without a secret: whoever can connect may read and change the store."
)
@click.option(
    "--shared", is_flag=True, help="ROOT is on storage that all hosts mount: each reads there what others put."
)
@click.option(
    "--maps", is_flag=True, help="With --shared, for a new store: gets map files, which that storage must keep."
)
@click.option(
    "--transport",
    type=click.Choice(("auto", "rdma", "tcp", "monarch")),
    default="auto",
    show_default=True,
    help="How large values are sent between hosts with the same setting. rdma is experimental, and runs Monarch: "
    "whoever can connect to it may run code; monarch is rdma without its hardware, for tests; auto is tcp.",
)
@click.option(
    "--ready-fd",
    type=click.IntRange(min=0),
    callback=_open_fd,
    help="A file descriptor: a line is written to it when the host is a member, or is refused.",
)
@click.option(
    "--hang-after",
    type=Seconds(min=0.5),
    default=10.0,
    show_default=True,
    help="Seconds until an index process counts as hung.",
)
@click.option(
    "--promote-after",
    type=Seconds(min=1.0, max=86_400.0),
    help="Seconds for which a majority may not hear the seed: then a deputy takes over by itself. Without: never.",
)
@click.option(
    "--remove-after",
    type=Seconds(min=30.0, max=86_400.0),
    help="Seconds of a host's silence, after which the seed removes it. Hosts that hear no majority for so long refuse "
    "all calls. Without: never.",
)
@click.option(
    "--replicas",
    type=click.Choice(("1", "2", "async")),
    help="On how many hosts each value is to lie, from now on: with 2 a put waits for the second one. Without: as the "
    "store has it; memstore policy states it for a group.",
)
@click.option(
    "--on-missing",
    type=click.Choice(("fail", "warn")),
    default="fail",
    show_default=True,
    help="With --replicas: what becomes of a put that finds no second host.",
)
def serve(
    root: str,
    address: str,
    named: tuple[str, ...],
    new: bool,
    moved: bool,
    no_owner: bool,
    insecure: bool,
    shared: bool,
    maps: bool,
    transport: str,
    ready_fd: int | None,
    hang_after: float,
    promote_after: float | None,
    remove_after: float | None,
    replicas: str | None,
    on_missing: str,
) -> None:
    """Serve the store to other hosts, until SIGTERM, SIGINT or SIGHUP. MEMSTORE_SECRET_FILE names the secret of all.

    Whoever knows the secret may read and change the store. The network is trusted beyond that.
    """
    if maps and not shared:
        raise click.UsageError("--maps is for storage that hosts share: say --shared too, or leave --maps out")
    from memstore.distributed.serving import serve as serve_root

    serve_root(
        root,
        address,
        join=named,
        new=new,
        moved=moved,
        owner=not no_owner,
        insecure=insecure,
        shared=shared,
        maps=maps,
        transport=transport,
        ready_fd=ready_fd,
        hang_after=hang_after,
        promote_after=promote_after,
        remove_after=remove_after,
        replicas=replicas or "",
        on_missing=on_missing,
    )


@cli.command(short_help="State on how many hosts values are to lie.")
@root
@click.argument("group", default="")
@click.option(
    "--replicas",
    type=click.Choice(("1", "2", "async", "default")),
    required=True,
    help="2: a put waits for the second host; async: it doesn't; default: as the whole store.",
)
@click.option(
    "--on-missing",
    type=click.Choice(("fail", "warn")),
    default="fail",
    show_default=True,
    help="What becomes of a put that finds no second host.",
)
@as_json
def policy(root: str, group: str, replicas: str, on_missing: Literal["fail", "warn"], as_json: bool) -> None:
    """State on how many hosts the values of a GROUP are to lie, the text of keys before their first "/".

    Without GROUP: those of the whole store. ROOT is the store's folder on a host, or the address of one,
    tcp://IP:PORT.
    """
    from memstore.distributed.serving import cluster_of

    number: int | Literal["async"] | None = None
    if replicas != "default":
        number = "async" if replicas == "async" else int(replicas)
    cluster_of(root).set_policy(group, replicas=number, on_missing=on_missing)
    of = f"group {group!r}" if group else "the whole store"
    render.tell({"group": group, "replicas": replicas}, f"{of}: replicas {replicas}", as_json=as_json)


@cli.command(short_help="Show the hosts that serve the store, and how they are.")
@root
@as_json
def status(root: str, as_json: bool) -> None:
    """Show the hosts that serve the store, and how they are. Exit code 1 unless all of them answer.

    ROOT is the store's folder on one of them, or the address of one, tcp://IP:PORT, from anywhere.
    """
    from memstore.distributed.serving import cluster_of

    try:
        found = cluster_of(root).status()
    except NotServedError:
        found = None
    if as_json:
        render.print_json({"served": False} if found is None else {"served": True, **render.plain(found)})
    elif found is None:
        render.console.print(f"{render.printable(root)} is not served")
    else:
        _show_status(found)
    if found is None or not all(host.alive for host in found.hosts):
        sys.exit(SILENT)


def _show_status(found: ClusterStatus) -> None:
    render.write_rows(
        _HOST_TITLES, map(_host_cells, found.hosts), right=("epoch", "starts", "keys", "live", "sent", "received")
    )
    for host in found.hosts:
        if not host.alive:
            render.console.print(render.printable(f"{host.address} does not answer: {host.trouble}"), soft_wrap=True)
        if host.draining:
            render.console.print(render.printable(f"{host.address} is drained: {host.draining}"), soft_wrap=True)
        if host.lacking:
            keys = wording.shown(host.lacking, "key", "keys")
            render.console.print(render.printable(f"{host.address} owns {keys} that lack a replica"), soft_wrap=True)
    for line in found.recovering:
        render.console.print(render.printable(line), soft_wrap=True)
    for who in dict.fromkeys(found.lost.values()):
        names = ", ".join(repr(name) for name, one in found.lost.items() if one == who)
        render.console.print(render.printable(f"{who} was removed, and what lay there alone is lost, of: {names}"))
    alive = [host for host in found.hosts if host.alive]
    deputies = f", deputies {' '.join(found.deputies)}" if found.deputies else ""
    answers = f"{len(alive)} of {len(found.hosts)} hosts answer"
    render.console.print(f"epoch {found.epoch}, seed {found.seed}{deputies}: {answers}", soft_wrap=True)
    versions: dict[str, list[str]] = {}
    for host in alive:
        text = f"memstore {host.memstore}, torch {host.torch or 'missing'}, monarch {host.monarch or 'missing'}"
        versions.setdefault(text, []).append(host.address)
    for text, addresses in versions.items():
        where = f" at {', '.join(addresses)}" if len(versions) > 1 else ""
        render.console.print(render.printable(f"{text}{where}"))


def _host_cells(host: HostStatus) -> tuple[str, ...]:
    if not host.alive:
        return (host.address, host.name, "no", *[""] * 7)
    return (
        host.address,
        host.name,
        "yes",
        str(host.epoch),
        str(host.incarnation),
        f"{host.keys:,}",
        wording.size(host.live_bytes),
        host.transport,
        wording.size(host.sent),
        wording.size(host.received),
    )


@cli.command(short_help="Remove a dead host from the cluster.")
@root
@click.argument("host")
@click.option("--force", is_flag=True, help="Also if it answers: what it has put is lost.")
@as_json
def remove(root: str, host: str, force: bool, as_json: bool) -> None:
    """Remove a HOST that is dead from the cluster: its address, name or id. What it has put is gone.

    ROOT is the store's folder on another host, or the address of one, tcp://IP:PORT, from anywhere.
    """
    from memstore.distributed.serving import cluster_of, remove_member

    removed = remove_member(cluster_of(root), host, force=force)
    render.tell({"removed": removed.address, "id": removed.id.hex()}, f"{removed.address} removed", as_json=as_json)


@cli.command(short_help="Move all that a host has to others, and let it leave.")
@root
@click.argument("host")
@click.option("--to", default="", help="The host that is to own its groups; without it, those that stay share them.")
@click.option("--timeout", default=600.0, show_default=True, type=Seconds(min=0.0), help="Seconds to wait for its end.")
@click.option("--cancel", is_flag=True, help="Let it stay: what has moved stays moved, and it goes on as before.")
@as_json
def drain(root: str, host: str, to: str, timeout: float, cancel: bool, as_json: bool) -> None:
    """Move all that HOST has to other hosts, and let it leave the cluster: its address, name or id.

    Its agent removes its folder then, and ends. ROOT is the store's folder on any host, or the address of one,
    tcp://IP:PORT, from anywhere. After a timeout, an error or Ctrl-C the drain goes on: the same command waits for it.
    """
    if cancel and to:
        raise click.UsageError("--to says who takes the groups, and with --cancel nobody does: leave one of them out")
    from memstore.distributed.serving import cluster_of

    if cancel:
        stays = cluster_of(root).cancel_drain(host, timeout=timeout)
        render.tell({"stays": stays}, f"{stays} stays", as_json=as_json)
        return
    said_at, said = 0.0, ""

    def progress(groups: int, nbytes: int) -> None:
        nonlocal said_at, said
        text = f"{host}: {wording.count_of(groups, 'group', 'groups')} and {wording.size(nbytes)} are left"
        if time.monotonic() - said_at >= _SAID_EVERY and text != said:
            said_at, said = time.monotonic(), text
            render.errors.print(render.printable(text), soft_wrap=True)

    try:
        left = cluster_of(root).drain(host, to=to, timeout=timeout, progress=progress)
    except KeyboardInterrupt:
        render.complain(f"{host} is drained all the same; the same command waits for it, and with --cancel ends it")
        raise
    render.tell({"drained": left}, f"{left} is drained, and has left", as_json=as_json)


@cli.command(short_help="Make another host the seed, since that one is lost.")
@root
@click.argument("host", required=False, default="")
@click.option(
    "--force",
    is_flag=True,
    help="Also without a majority of the hosts, or at one without a copy of the directory: see docs/hosts.md.",
)
@as_json
def promote(root: str, host: str, force: bool, as_json: bool) -> None:
    """Make HOST the seed: its address, name or id. Without it, the first deputy that answers.

    ROOT is the store's folder on one of the hosts, or the address of one, tcp://IP:PORT, from anywhere. With --force,
    what the old seed has said last is lost: it must not come back.
    """
    from memstore.distributed.serving import cluster_of

    seed = cluster_of(root).promote(host, force=force)
    render.tell({"seed": seed}, f"{seed} is the seed", as_json=as_json)
