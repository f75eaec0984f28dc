"""Files of other formats: `memstore put` copies one into the store, `attach` serves it in place, `export` writes one.

A store is only created for a file that is there and can be read, and a command that has created one says so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from typing import Any

import click

import memstore
from memstore.arguments import LARGEST_VERSION
from memstore.cli import looking, render
from memstore.cli.group import allow_pickle, as_json, cli, key, path, root
from memstore.cli.words import in_words
from memstore.engine import resource_errors
from memstore.errors import AlreadyExistsError
from memstore.keys import encode_key

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
    text = f"version {version}, {render.size(nbytes)} put{made}"
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
    text = f"version {version}, {render.size(nbytes)} {'copied' if copy else 'in place'}{made}"
    render.tell({"version": version, "nbytes": nbytes}, text, as_json=as_json)


def _put(
    root: str, key: str, file: str, format: Any, expect_version: int | None, *, allow_pickle: bool
) -> tuple[int, int, str]:
    """Returns the version, its bytes, and what is to be said of the store."""
    _check_order(root, key, file)
    with resource_errors(root, key):
        value = looking.loaded(key, file, format, allow_pickle=allow_pickle)
    made = _said_of_new(root)
    mode = "r+" if expect_version else "a"  # a new store has no version of it
    with left_over_told(root), memstore.open(root, mode, allow_pickle=allow_pickle) as store:
        version = store.put(key, value, expect_version=expect_version)
        return version, store.info(key).nbytes, made


def _attach(root: str, key: str, file: str, format: Any, *, allow_pickle: bool) -> tuple[int, int, str]:
    _check_order(root, key, file)
    made = _said_of_new(root)
    if made:
        with resource_errors(root, key):
            looking.check_served(key, file, format, allow_pickle=allow_pickle)
    with left_over_told(root), memstore.open(root, allow_pickle=allow_pickle) as store:
        version = store.attach(key, file, format=format)
        return version, store.info(key).nbytes, made


def _check_order(root: str, key: str, file: str) -> None:
    """Raises UsageError if the file is where ROOT or KEY should be, and no file is where it should be."""
    encode_key(key)
    if os.path.isfile(key) and not os.path.lexists(file):
        raise click.UsageError(f"there is no file {file!r}, but there is {key!r}: say ROOT, KEY, and then the file")
    store = next(filter(looking.is_store, (file, key)), None)
    if os.path.isfile(root) and store is not None:
        raise click.UsageError(f"{root!r} is a file, and {store!r} a store: say ROOT, KEY, and then the file")


@contextlib.contextmanager
def left_over_told(root: str) -> Generator[None]:
    """A command that has created a store, and fails, says that it stays: another may be using it by then."""
    is_there = looking.is_store(root)
    try:
        yield
    except BaseException:
        if not is_there and looking.is_store(root):
            render.complain(f"{os.path.abspath(root)} is a new store, and stays, although this failed")
        raise


def _said_of_new(root: str) -> str:
    """Of a store that is about to be created; empty if there is one."""
    return "" if looking.is_store(root) else f"; {render.printable(os.path.abspath(root))} is a new store"


@cli.command(short_help="Write a key to a file or folder of another format.")
@root
@key
@path
@click.option(
    "--format",
    type=click.Choice(["safetensors", "memmap", "torch"]),
    help="Default: torch if PATH ends with .pt, .pth, .bin or .ckpt; otherwise safetensors.",
)
@click.option("--max-shard-size", help='Write several files of at most this size: "5GB".')
@click.option("-f", "--force", is_flag=True, help="Replace a file that is there.")
@allow_pickle
@as_json
def export(
    root: str,
    key: str,
    path: str,
    format: Any,
    max_shard_size: str | None,
    force: bool,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Write KEY to the file or folder PATH, completely or not at all. A .npy file is written by `memstore get -o`."""
    if format is None:
        if path.endswith(".npy"):
            raise click.UsageError("a .npy file holds one tensor: `memstore get ROOT KEY LEAF -o FILE` writes it")
        format = "torch" if path.endswith((".pt", ".pth", ".bin", ".ckpt")) else "safetensors"
    _check_target(path, format, max_shard_size)
    if not force and os.path.lexists(path) and not os.path.isdir(path):
        raise AlreadyExistsError(f"{path} exists: --force replaces it, or say another file")
    with memstore.open(root, "r", allow_pickle=allow_pickle) as store, render.progress("exporting") as advance:
        store.export(key, path, format=format, max_shard_size=max_shard_size, progress=advance)
    nbytes = _size_of(path)
    render.tell(
        {"path": path, "nbytes": nbytes}, f"{render.size(nbytes)} written to {render.printable(path)}", as_json=as_json
    )


def _check_target(path: str, format: str, max_shard_size: str | None) -> None:
    """Raises UsageError for options that don't fit each other or the path."""
    from memstore.formats import check_export

    try:
        check_export(path, format, max_shard_size)
    except ValueError as error:
        raise click.UsageError(in_words(str(error))) from None


def _size_of(path: str) -> int:
    """Of a file, or of all files of a folder."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(parent, name)) for parent, _, names in os.walk(path) for name in names)
