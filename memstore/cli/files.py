"""Commands about files of other formats: `put`, `attach` and `export`, `convert` and `snapshot`.

A store is only created for a file that is there and can be read, and a command that has created one says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Iterable
from typing import Any

import click

import memstore
from memstore import _wording as wording
from memstore._arguments import LARGEST_VERSION, encode_key
from memstore.cli import render
from memstore.cli.group import DAMAGED, DIFFERENT, allow_pickle, as_json, cli, key, path, root
from memstore.cli.messages import in_words
from memstore.engine import has_settings, resource_errors
from memstore.errors import AlreadyExistsError, CorruptionError
from memstore.snapshot import load_manifest
from memstore.snapshot.buckets import is_url, path_or_url
from memstore.snapshot.increments import sharing_of
from memstore.snapshot.publishing import prune as prune_snapshot

# --- put, attach, export ---------------------------------------------------------------------------------------------


progress = click.option(
    "--progress", is_flag=True, help="Tell how far it is in lines, too, where there is no terminal for a bar."
)
format_of_file = click.option(
    "--format", type=click.Choice(["safetensors", "memmap", "torch", "npy"]), help="Default: recognized by the files."
)


@cli.command(short_help="Put the value of a file.")
@root
@key
@click.argument("file", type=click.Path(readable=False))
@format_of_file
@click.option(
    "--expect-version",
    type=click.IntRange(0, LARGEST_VERSION),
    help="The version that KEY must have; 0: it must not exist.",
)
@allow_pickle
@as_json
def put(
    root: str, key: str, file: str, format: Any, expect_version: int | None, allow_pickle: bool, as_json: bool
) -> None:
    """Put what is in FILE as the new version of KEY; ROOT is created if need be.

    FILE is a .safetensors, .npy or .pt, a checkpoint of several, a memmap folder, or a snapshot. Its bytes are copied:
    `memstore attach` serves them where they are.
    """
    version, nbytes, made = _put(root, key, file, format, expect_version, allow_pickle=allow_pickle)
    text = f"version {version}, {wording.size(nbytes)} put{made}"
    render.tell({"version": version, "nbytes": nbytes}, text, as_json=as_json)


@cli.command(short_help="Serve an existing file under a key, in place.")
@root
@key
@path
@format_of_file
@click.option("--copy", is_flag=True, help="Copy the bytes into the store, instead of serving the file in place.")
@allow_pickle
@as_json
def attach(root: str, key: str, path: str, format: Any, copy: bool, allow_pickle: bool, as_json: bool) -> None:
    """Serve the file or folder PATH under KEY: safetensors, checkpoints of them, memmap folders, torch.save, .npy."""
    if copy:
        version, nbytes, made = _put(root, key, path, format, None, allow_pickle=allow_pickle)
    else:
        version, nbytes, made = _attach(root, key, path, format, allow_pickle=allow_pickle)
    text = f"version {version}, {wording.size(nbytes)} {'copied' if copy else 'in place'}{made}"
    render.tell({"version": version, "nbytes": nbytes}, text, as_json=as_json)


def _put(
    root: str, key: str, file: str, format: Any, expect_version: int | None, *, allow_pickle: bool
) -> tuple[int, int, str]:
    """Returns the version, its bytes, and what is to be said of the store."""
    from memstore.store.values import load_to_copy

    _check_order(root, key, file)
    with resource_errors(root, key):
        value = load_to_copy(key, file, format, allow_pickle=allow_pickle)
    made = _said_of_new(root)
    mode = "r+" if expect_version else "a"  # a new store has no version of it
    with left_over_told(root), memstore.open(root, mode, allow_pickle=allow_pickle) as store:
        version = store.put(key, value, expect_version=expect_version)
        return version, store.info(key).nbytes, made


def _attach(root: str, key: str, file: str, format: Any, *, allow_pickle: bool) -> tuple[int, int, str]:
    from memstore.store.values import content_in_place

    _check_order(root, key, file)
    made = _said_of_new(root)
    if made:  # no store is created for a file that can't be served
        with resource_errors(root, key):
            content_in_place(key, file, format, allow_pickle=allow_pickle)
    with left_over_told(root), memstore.open(root, allow_pickle=allow_pickle) as store:
        version = store.attach(key, file, format=format)
        return version, store.info(key).nbytes, made


def _check_order(root: str, key: str, file: str) -> None:
    """Raises UsageError if the file is where ROOT or KEY should be, and no file is where it should be."""
    encode_key(key)
    if os.path.isfile(key) and not os.path.lexists(file):
        raise click.UsageError(f"there is no file {file!r}, but there is {key!r}: say ROOT, KEY, and then the file")
    store = next(filter(has_settings, (file, key)), None)
    if os.path.isfile(root) and store is not None:
        raise click.UsageError(f"{root!r} is a file, and {store!r} a store: say ROOT, KEY, and then the file")


@contextlib.contextmanager
def left_over_told(root: str) -> Generator[None]:
    """Says of a new store that it stays, if the command that created it fails: another may be using it by then."""
    is_there = has_settings(root)
    try:
        yield
    except BaseException:
        if not is_there and has_settings(root):
            render.complain(f"{os.path.abspath(root)} is a new store, and stays, although this failed")
        raise


def _said_of_new(root: str) -> str:
    """Returns what is said of a store that is about to be created; empty if there is one."""
    return "" if has_settings(root) else f"; {render.printable(os.path.abspath(root))} is a new store"


@cli.command(short_help="Write a key to a file or folder of another format.")
@root
@key
@path
@click.option(
    "--format",
    type=click.Choice(["safetensors", "memmap", "torch", "huggingface"]),
    help="Default: torch if PATH ends with .pt, .pth, .bin or .ckpt; huggingface with --config; otherwise safetensors.",
)
@click.option("--max-shard-size", help='Write several files of at most this size: "5GB".')
@click.option("--config", type=click.Path(), help="Of huggingface: config.json, or a folder with it and a tokenizer.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), help="Of huggingface: cast to it.")
@click.option("--prefix", help="Of huggingface: removed from names; tensors without it are left out.")
@click.option("--link", is_flag=True, help="Of huggingface: hard links to attached files, where possible.")
@click.option("-f", "--force", is_flag=True, help="Replace a file that is there.")
@allow_pickle
@as_json
def export(
    root: str,
    key: str,
    path: str,
    format: Any,
    max_shard_size: str | None,
    config: str | None,
    dtype: str | None,
    prefix: str | None,
    link: bool,
    force: bool,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Write KEY to the file or folder PATH, completely or not at all. A .npy file is written by `memstore get -o`.

    `huggingface` is a folder of weights as from_pretrained, SGLang and llama.cpp's converter read it.
    """
    given = {"--config": config, "--dtype": dtype, "--prefix": prefix, "--link": link}
    if format is None and config is not None:
        format = "huggingface"
    if format != "huggingface" and any(given.values()):
        name = next(name for name, value in given.items() if value)
        raise click.UsageError(f"{name} is for --format huggingface")
    if format is None:
        if path.endswith(".npy"):
            raise click.UsageError("a .npy file holds one tensor: `memstore get ROOT KEY LEAF -o FILE` writes it")
        format = "torch" if path.endswith((".pt", ".pth", ".bin", ".ckpt")) else "safetensors"
    _check_target(path, "safetensors" if format == "huggingface" else format, max_shard_size)
    if not force and os.path.lexists(path) and not os.path.isdir(path):
        raise AlreadyExistsError(f"{path} exists: --force replaces it, or say another file")
    with memstore.open(root, "r", allow_pickle=allow_pickle) as store, render.progress("exporting") as advance:
        if format == "huggingface":
            import torch

            store.export_hf(
                key,
                path,
                config=config,
                max_shard_size=max_shard_size or "5GB",
                dtype=None if dtype is None else getattr(torch, dtype),
                prefix=prefix or "",
                link=link,
                progress=advance,
            )
        else:
            store.export(key, path, format=format, max_shard_size=max_shard_size, progress=advance)
    files = [os.path.join(parent, name) for parent, _, names in os.walk(path) for name in names]  # none: it is a file
    nbytes = sum(map(os.path.getsize, files or [path]))
    render.tell(
        {"path": path, "nbytes": nbytes}, f"{wording.size(nbytes)} written to {render.printable(path)}", as_json=as_json
    )


def _check_target(path: str, format: str, max_shard_size: str | None) -> None:
    """Raises UsageError for options that don't fit each other or the path."""
    from memstore.formats import check_export

    try:
        check_export(path, format, max_shard_size)
    except ValueError as error:
        raise click.UsageError(in_words(str(error))) from None


# --- convert ---------------------------------------------------------------------------------------------------------


FORMATS = ("dcp", "huggingface", "memmap", "memstore-dcp", "safetensors", "snapshot", "torch", "torchsnapshot")
TARGETS = tuple(name for name in FORMATS if name != "torchsnapshot")


@cli.command()
@click.argument("source", metavar="SRC", type=click.Path(readable=False))
@click.argument("target", metavar="DST", type=click.Path(readable=False))
@click.option(
    "--from",
    "source_as",
    type=click.Choice(FORMATS),
    metavar="FORMAT",
    help="The format of SRC. Default: recognized by its files.",
)
@click.option(
    "--to",
    "target_as",
    type=click.Choice(TARGETS),
    metavar="FORMAT",
    help="The format of DST. Default: that of its suffix (.safetensors, .pt, .pth, .bin, .ckpt); else a snapshot.",
)
@click.option("--allow-pickle", is_flag=True, help="Read and write objects that need pickle, which can run code.")
@click.option("--untie", is_flag=True, help="Store tensors that share memory separately, if DST can't keep them tied.")
@click.option(
    "--max-expanded",
    default="16GiB",
    show_default=True,
    metavar="SIZE",
    help="The most that expanded tensors may take in DST beyond what they take in SRC.",
)
@progress
@as_json
def convert(
    source: str,
    target: str,
    source_as: str | None,
    target_as: str | None,
    allow_pickle: bool,
    untie: bool,
    max_expanded: str,
    progress: bool,
    as_json: bool,
) -> None:
    """Convert a checkpoint to another format.

    DST appears whole, and compared with SRC, or not at all. A FORMAT is dcp, huggingface, memmap, memstore-dcp,
    safetensors, snapshot or torch; SRC may also be torchsnapshot.
    """
    from memstore.convert import convert as run

    with render.progress("converting", lines=progress) as advance:
        done = run(
            source,
            target,
            source_as=source_as,
            target_as=target_as,
            allow_pickle=allow_pickle,
            untie=untie,
            max_expanded=max_expanded,
            progress=advance,
        )
    many = "1 tensor" if done.tensors == 1 else f"{done.tensors:,} tensors"
    text = f"{done.source_format} to {done.target_format}: {many}, {wording.size(done.nbytes)}, compared"
    render.tell(done, render.printable(text), as_json=as_json)


# --- snapshot ls, info, verify, diff ---------------------------------------------------------------------------------


_NAMED_FILES = 3  # files


@cli.group(short_help="Look into a snapshot, verify it, compare two.")
def snapshot() -> None:
    """Look into a snapshot (a folder, or s3://, gs://, az://), verify it, compare two of them."""


@snapshot.command("ls", short_help="List the leaves: dtype, shape, size, files.")
@path
@click.argument("prefix", default="")
@as_json
def list_leaves(path: str, prefix: str, as_json: bool) -> None:
    """List the leaves whose paths start with PREFIX: "0/model/" are those of rank 0's model."""
    from memstore.snapshot import TensorEntry

    manifest = memstore.Snapshot(path).get_manifest()
    found = {name: entry for name, entry in manifest.items() if name.startswith(prefix)}
    if as_json:
        render.print_json(found)
        return
    if not found:
        render.console.print(f"no leaves whose paths start with {render.printable(repr(prefix))}")
        return
    rows: list[tuple[str, str, str, str]] = []
    for name, entry in found.items():
        if isinstance(entry, TensorEntry):
            dtype = str(entry.dtype).removeprefix("torch.")
            rows.append((name, f"{dtype} {list(entry.shape)}", wording.size(entry.nbytes), ", ".join(entry.files)))
        else:
            rows.append((name, f"{entry.value!r:.60}", "", ""))
    titles = ("path", "value", "size", "files")
    end = None if render.rows_fit(titles, rows) else -1  # without files, which the last line names
    render.write_rows(titles[:end], [row[:end] for row in rows], right=("size",))
    render.head(render.printable(_snapshot_total(found.values())))


def _snapshot_total(found: Iterable[object]) -> str:
    """Counts leaves and objects, and names their files. As elsewhere, leaves are tensors."""
    from memstore.snapshot import TensorEntry

    entries = list(found)
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    others = len(entries) - len(tensors)
    leaves, objects = wording.count_of(len(tensors), "leaf", "leaves"), wording.count_of(others, "object", "objects")
    what = f"{leaves} and {objects}" if tensors and others else objects if others else leaves
    files = list(dict.fromkeys(file for entry in tensors for file in entry.files))
    where = ", ".join(files) if len(files) <= _NAMED_FILES else f"{len(files):,} files"
    return f"{what} in {where}" if files else what


@snapshot.command(short_help="Show when it was taken, by how many ranks.")
@path
@as_json
def info(path: str, as_json: bool) -> None:
    """Show a snapshot as a whole: when it was taken, by how many ranks, and its files."""
    found = load_manifest(path_or_url(path))
    ranks = [sorted(values) for values in found.ranks]
    checksum = any(file.sums for file in found.files)
    sharing = sharing_of(path_or_url(path), found)
    if as_json:
        render.print_json(
            {
                "id": found.id,
                "created": found.created,
                "writer": found.writer,
                "world_size": found.world_size,
                "nbytes": found.nbytes,
                "checksum": checksum,
                "shared": sharing.shared,
                "unused": sharing.unused,
                "files": {file.name: file.size for file in found.files},
                "ranks": ranks,
            }
        )
        return
    many = "1 rank" if found.world_size == 1 else f"{found.world_size:,} ranks"
    title = f"{wording.size(found.nbytes)} of {many}, {wording.age(found.created)} old, by {found.writer}"
    render.console.print(render.printable(title + ("" if checksum else ", without checksums")))
    if sharing.shared or sharing.unused:
        unused = f"; {wording.size(sharing.unused)} in them are earlier values" if sharing.unused else ""
        told = f"{wording.size(sharing.shared)} of it in files that other snapshots have, too{unused}"
        render.console.print(render.printable(told))
    names = dict.fromkeys(name for values in ranks for name in values)
    render.console.print(render.printable(f"app state: {', '.join(names)}"))
    rows = [(file.name, wording.size(file.size)) for file in found.files]
    render.write_rows(("file", "size"), rows, right=("size",))


@snapshot.command(short_help="Copy a snapshot, whole.")
@path
@click.argument("target", metavar="DST", type=click.Path(readable=False))
@progress
@as_json
def copy(path: str, target: str, progress: bool, as_json: bool) -> None:
    """Copy a snapshot to the folder, or URL, DST, which appears completely or not at all.

    The copy is whole: it shares no file with other snapshots, as an increment does, and has no earlier values.
    """
    with render.progress("copying", lines=progress) as advance:
        memstore.Snapshot(path).copy(target, progress=advance)
    found = load_manifest(path_or_url(target))
    render.tell(
        {"path": target, "nbytes": found.nbytes},
        f"{wording.size(found.nbytes)} copied to {render.printable(target)}",
        as_json=as_json,
    )


@snapshot.command()
@path
@progress
@as_json
def verify(path: str, progress: bool, as_json: bool) -> None:
    """Compare all files with their checksums and the manifest. Exit code 1 if anything is damaged."""
    try:
        with render.progress("verifying", lines=progress) as advance:
            found = memstore.Snapshot(path)
            found.verify(progress=advance)
            compared = all(file.sums or not file.size for file in load_manifest(found.path).files)
    except CorruptionError as error:
        if as_json:
            render.print_json({"ok": False, "path": error.path, "detail": error.detail})
        else:
            render.console.print(f"[bold red]damaged[/]  {render.printable(str(error))}")
        sys.exit(DAMAGED)
    what = (
        "whole" if compared else "all files are there, without checksums: their bytes were not compared with anything"
    )
    render.tell({"ok": True, "compared": compared}, what, as_json=as_json)


@snapshot.command(short_help="Remove what takes that died have left at a URL.")
@path
@click.option(
    "--older-than",
    default=24.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="HOURS",
    help="Remove nothing while some of it is younger: a take may go on.",
)
@as_json
def prune(path: str, older_than: float, as_json: bool) -> None:
    """Remove objects of takes that died, at the URL of a snapshot: what its manifest doesn't name.

    In a folder the next take does so by itself.
    """
    url = path_or_url(path)
    if not is_url(url):
        raise click.UsageError(f"{path!r} is a folder, in which the next take removes such files: say a URL")
    done = prune_snapshot(url, older_than=older_than * 3600)
    many = wording.count_of(done.objects, "object", "objects")
    text = f"{many} removed, {wording.size(done.nbytes)}"
    if done.kept:
        text = f"nothing removed: {done.young} is younger than {older_than:g} h, so a take may go on"
    render.tell(done._asdict(), render.printable(text), as_json=as_json)


@snapshot.command()
@path
@click.argument("other", type=click.Path(readable=False))
@as_json
def diff(path: str, other: str, as_json: bool) -> None:
    """Compare two snapshots leaf by leaf. Exit code 1 if they differ."""
    from memstore.snapshot import differences

    with render.progress("comparing") as advance:
        found = differences(memstore.Snapshot(path), memstore.Snapshot(other), advance)
    if as_json:
        render.print_json(found)
    elif found:
        rows = [(one.path, one.what) for one in found]
        render.write_rows(("path", "difference"), rows)
    else:
        render.console.print("equal")
    if found:
        sys.exit(DIFFERENT)
