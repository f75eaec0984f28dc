"""What can be asked for. Exit codes: 0 done; 1 damage was found, or something was lost; 2 the call is wrong; 3 memstore
refused (the message says why); 4 there is no such key."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

import memstore
from memstore.cli import render
from memstore.engine.lookup import files_of
from memstore.entries import find
from memstore.errors import KeyNotFoundError, MemstoreError
from memstore.keys import encode_key
from memstore.listing import COLUMNS, Leaf, UnknownKindError, cells, entries, outline

DAMAGED, REFUSED, MISSING = 1, 3, 4
Function = TypeVar("Function", bound=Callable[..., Any])


def run() -> NoReturn:
    try:
        cli.main(prog_name="memstore", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except KeyNotFoundError as error:
        _fail(error, MISSING)
    except BrokenPipeError:  # `memstore ls ROOT | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (MemstoreError, OSError, ValueError, TypeError) as error:
        _fail(error, REFUSED)
    sys.exit(0)


def _fail(error: Exception, code: int) -> NoReturn:
    render.errors.print(f"[bold red]memstore:[/] {render.printable(str(error))}")
    sys.exit(code)


def _complete_key(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    try:
        with memstore.open(context.params["root"], "r", timeout=1.0) as store:
            return [found.key for found, _ in zip(entries(store, incomplete), range(100), strict=False)]
    except (MemstoreError, OSError, KeyError):
        return []


root = click.argument("root", type=click.Path())
key = click.argument("key", shell_complete=_complete_key)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(memstore.__version__, prog_name="memstore")
def cli() -> None:
    """Look into a memstore folder, and take care of it. ROOT is the folder, first everywhere.

    Exit codes: 0 done, 1 damage or loss, 2 wrong usage, 3 refused, 4 no such key.
    """


@cli.command()
@root
@click.argument("prefix", default="")
@as_json
def ls(root: str, prefix: str, as_json: bool) -> None:
    """List the keys that start with PREFIX."""
    with memstore.open(root, "r") as store:
        found = entries(store, prefix)
        if as_json:
            render.print_json(list(found))
            return
        rows = list(map(cells, found))
    render.console.print(render.table(COLUMNS, rows, right=("version", "leaves", "size", "age")))


@cli.command()
@root
@key
@as_json
def info(root: str, key: str, as_json: bool) -> None:
    """Show one entry: its leaves with shapes and dtypes, its bytes and files."""
    with memstore.open(root, "r") as store:
        if as_json:
            render.print_json(store.info(key))
            return
        record = find(store._opened(), encode_key(key))  # pyright: ignore[reportPrivateUsage]
        if record is None:
            raise KeyNotFoundError(f"no key {key!r}", key=key)
        files = files_of(store._opened(), record)  # pyright: ignore[reportPrivateUsage]
        try:
            structure, leaves = outline(record.description)
        except UnknownKindError:  # only torch can tell
            found = store.info(key)
            structure = found.structure
            leaves = [Leaf(leaf.name, str(leaf.dtype).removeprefix("torch."), leaf.shape) for leaf in found.leaves]
    size, age = render.size(record.nbytes), render.age(record.created)
    render.console.print(f"[bold]{render.printable(key)}[/]  version {record.version}, {size}, {age} old")
    for path in files:
        render.console.print(f"[dim]{render.printable(path)}[/]")
    render.console.print(render.leaf_tree(structure, leaves))


@cli.command()
@root
@as_json
def stats(root: str, as_json: bool) -> None:
    """Show what the store takes, and who holds what was replaced."""
    with memstore.open(root, "r") as store:
        found = store.stats()
    if as_json:
        render.print_json(found)
        return
    pids = ", ".join(map(str, found.pinned_by))
    rows = [
        ("keys", f"{found.keys:,}"),
        ("live", render.size(found.live_bytes)),
        ("kept for reuse", render.size(found.reusable_bytes)),
        ("replaced, but held", render.size(found.pinned_bytes) + (f" by pid {pids}" if pids else "")),
        ("being written", render.size(found.filling_bytes)),
        ("catalog", render.size(found.catalog_bytes)),
        ("capacity", "no limit" if found.capacity is None else render.size(found.capacity)),
    ]
    render.console.print(render.table(("", ""), rows))


@cli.command()
@root
@click.argument("keys", nargs=-1, shell_complete=_complete_key)
@as_json
def verify(root: str, keys: tuple[str, ...], as_json: bool) -> None:
    """Compare everything, or KEYS, with its checksums. Exit code 1 if anything is damaged."""
    with memstore.open(root, "r+") as store, render.progress("verifying") as advance:
        report = store.verify(keys or None, progress=advance)
    if as_json:
        render.print_json(report)
    else:
        for error in report.damaged:
            render.console.print(f"[bold red]damaged[/]  {render.printable(str(error))}")
        unchecked = f", {report.unchecked:,} have no checksums" if report.unchecked else ""
        render.console.print(f"{report.checked:,} checked{unchecked}, {len(report.damaged):,} damaged")
    if not report.ok:
        sys.exit(DAMAGED)


@cli.command()
@root
@click.option("--timeout", default=30.0, show_default=True, help="Seconds to wait for processes that use the store.")
@as_json
def repair(root: str, timeout: float, as_json: bool) -> None:
    """Make a new catalog of all that is whole. Nobody else may use the store. Exit code 1 if something was lost."""
    with render.progress("repairing") as advance:
        report = memstore.repair(root, timeout=timeout, progress=advance)
    if as_json:
        render.print_json(report)
    else:
        for name in report.lost:
            render.console.print(f"[bold red]lost[/]  {render.printable(name)}")
        freed = render.size(report.swept_bytes)
        render.console.print(f"{len(report.recovered):,} keys recovered, {len(report.lost):,} lost, {freed} given back")
    if report.lost:
        sys.exit(DAMAGED)


@cli.command()
@root
@as_json
def gc(root: str, as_json: bool) -> None:
    """Give back what nobody holds: replaced versions, files kept for reuse, what dead writers left."""
    with memstore.open(root, "r+") as store:
        freed = store.gc()
    if as_json:
        render.print_json({"freed_bytes": freed})
    else:
        render.console.print(f"{render.size(freed)} given back")


@cli.command()
@root
@click.argument("keys", nargs=-1, required=True, shell_complete=_complete_key)
@click.option("--prefix", is_flag=True, help="KEYS are prefixes: delete all that start so.")
@click.option("--missing-ok", is_flag=True, help="Keys that aren't there are no error.")
@as_json
def rm(root: str, keys: tuple[str, ...], prefix: bool, missing_ok: bool, as_json: bool) -> None:
    """Delete KEYS, all of them or, if one is missing, none."""
    with memstore.open(root, "r+") as store:
        names = [one.key for start in keys for one in entries(store, start)] if prefix else list(keys)
        deleted = store.delete_many(names, missing_ok=missing_ok or prefix) if names else 0
    if as_json:
        render.print_json({"deleted": deleted})
    else:
        render.console.print(f"{deleted:,} deleted")


@cli.command()
@root
@key
@click.argument("target", type=click.Path())
@click.argument("target_key", default="")
@click.option("--prefix", is_flag=True, help="KEY is a prefix: copy all that start so.")
@click.option(
    "--allow-pickle", is_flag=True, help="Copy leaves that are pickles, too: they run code. Trust both stores."
)
@as_json
def cp(root: str, key: str, target: str, target_key: str, prefix: bool, allow_pickle: bool, as_json: bool) -> None:
    """Copy KEY, under the same key or TARGET_KEY, into the store TARGET, which is created if need be."""
    if prefix and target_key:
        raise click.UsageError("with --prefix all keep their keys")
    copied: dict[str, int] = {}
    with (
        memstore.open(root, "r+", allow_pickle=allow_pickle) as source,
        memstore.open(target, allow_pickle=allow_pickle) as store,
        render.progress("copying") as advance,
    ):
        chosen = [(one.key, one.nbytes) for one in entries(source, key)] if prefix else [(key, source.info(key).nbytes)]
        total, done = sum(nbytes for _, nbytes in chosen), 0
        for name, nbytes in chosen:
            copied[target_key or name] = store.put(target_key or name, source.get(name))
            advance(done := done + nbytes, total)
    if as_json:
        render.print_json(copied)
    else:
        render.console.print(f"{len(copied):,} copied, {render.size(total)}")


@cli.command()
@root
@key
@click.argument("path", type=click.Path())
@click.option("--format", type=click.Choice(["safetensors", "memmap", "torch", "npy"]), help="Else told by the name.")
@click.option("--copy", is_flag=True, help="Copy the bytes into the store, instead of serving the file in place.")
@click.option("--allow-pickle", is_flag=True, help="Read leaves that are pickles, which run code: trust the file.")
@as_json
def attach(root: str, key: str, path: str, format: Any, copy: bool, allow_pickle: bool, as_json: bool) -> None:
    """Serve the file or folder PATH under KEY: safetensors, checkpoints of them, memmap folders, torch.save, .npy."""
    with memstore.open(root, allow_pickle=allow_pickle) as store:
        version = store.attach(key, path, format=format, copy=copy)
        nbytes = store.info(key).nbytes
    if as_json:
        render.print_json({"version": version, "nbytes": nbytes})
    else:
        render.console.print(f"version {version}, {render.size(nbytes)} {'copied' if copy else 'in place'}")


@cli.command()
@root
@key
@click.argument("path", type=click.Path())
@click.option(
    "--format", type=click.Choice(["safetensors", "memmap", "torch"]), default="safetensors", show_default=True
)
@click.option("--max-shard-size", help='Of a checkpoint of several files, as "5GB".')
@as_json
def export(root: str, key: str, path: str, format: Any, max_shard_size: str | None, as_json: bool) -> None:
    """Write KEY to the file or folder PATH, whole or not at all."""
    with memstore.open(root, "r") as store, render.progress("exporting") as advance:
        store.export(key, path, format=format, max_shard_size=max_shard_size, progress=advance)
        nbytes = store.info(key).nbytes
    if as_json:
        render.print_json({"path": path, "nbytes": nbytes})
    else:
        render.console.print(f"{render.size(nbytes)} written to {render.printable(path)}")


@cli.command()
@root
@click.argument("prefix", default="")
@click.option("--interval", default=0.5, show_default=True, help="Seconds between looks.")
@click.option("--count", default=0, help="Looks, then end; 0: until interrupted.")
@as_json
def watch(root: str, prefix: str, interval: float, count: int, as_json: bool) -> None:
    """Follow the keys that start with PREFIX: versions, sizes, puts a second. With --json a line a look."""
    from memstore.cli.watch import follow

    with memstore.open(root, "r") as store:
        follow(store, prefix, interval, count, as_json=as_json)


@cli.command()
@click.argument("root", type=click.Path(), default="/dev/shm")
@as_json
def bench(root: str, as_json: bool) -> None:
    """Try this machine: put, get and wake beside a memcpy, in a store that is made under ROOT and removed again."""
    from memstore.cli.selftest import measure, show

    with render.progress("measuring"):
        found = measure(root)
    if as_json:
        render.print_json(found)
    else:
        show(found)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell: eval "$(memstore completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "memstore", "_MEMSTORE_COMPLETE").source())
