"""Commands about snapshots: to look into their folders, verify and compare them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import click

import memstore
from memstore.cli import columns, render
from memstore.cli.codes import DAMAGED, DIFFERENT
from memstore.cli.group import as_json, cli, path
from memstore.errors import CorruptionError
from memstore.snapshot import load_manifest
from memstore.wording import count_of

_NAMED = 3  # files


@cli.group(short_help="Look into a snapshot, verify it, compare two.")
def snapshot() -> None:
    """Look into the folder of a snapshot, verify it, compare two of them."""


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
            rows.append((name, f"{dtype} {list(entry.shape)}", render.size(entry.nbytes), ", ".join(entry.files)))
        else:
            rows.append((name, f"{entry.value!r:.60}", "", ""))
    titles = ("path", "value", "size", "files")
    end = None if columns.fit(titles, rows) else -1  # without files, which the last line names
    columns.write(titles[:end], [row[:end] for row in rows], right=("size",))
    render.head(render.printable(_total(found.values())))


def _total(found: Iterable[object]) -> str:
    """ "50 leaves and 3 objects in model.safetensors, state.safetensors": as elsewhere, leaves are tensors."""
    from memstore.snapshot import TensorEntry

    entries = list(found)
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    others = len(entries) - len(tensors)
    leaves, objects = count_of(len(tensors), "leaf", "leaves"), count_of(others, "object", "objects")
    what = f"{leaves} and {objects}" if tensors and others else objects if others else leaves
    files = list(dict.fromkeys(file for entry in tensors for file in entry.files))
    where = ", ".join(files) if len(files) <= _NAMED else f"{len(files):,} files"
    return f"{what} in {where}" if files else what


@snapshot.command(short_help="Show when it was taken, by how many ranks.")
@path
@as_json
def info(path: str, as_json: bool) -> None:
    """Show a snapshot as a whole: when it was taken, by how many ranks, and its files."""
    found = load_manifest(os.path.abspath(path))
    ranks = [sorted(values) for values in found.ranks]
    checksum = any(file.sums for file in found.files)
    if as_json:
        render.print_json(
            {
                "id": found.id,
                "created": found.created,
                "writer": found.writer,
                "world_size": found.world_size,
                "nbytes": found.nbytes,
                "checksum": checksum,
                "files": {file.name: file.size for file in found.files},
                "ranks": ranks,
            }
        )
        return
    many = "1 rank" if found.world_size == 1 else f"{found.world_size:,} ranks"
    title = f"{render.size(found.nbytes)} of {many}, {render.age(found.created)} old, by {found.writer}"
    render.console.print(render.printable(title + ("" if checksum else ", without checksums")))
    names = dict.fromkeys(name for values in ranks for name in values)
    render.console.print(render.printable(f"app state: {', '.join(names)}"))
    rows = [(file.name, render.size(file.size)) for file in found.files]
    columns.write(("file", "size"), rows, right=("size",))


@snapshot.command()
@path
@as_json
def verify(path: str, as_json: bool) -> None:
    """Compare all files with their checksums and the manifest. Exit code 1 if anything is damaged."""
    try:
        with render.progress("verifying") as advance:
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
        columns.write(("path", "difference"), rows)
    else:
        render.console.print("equal")
    if found:
        sys.exit(DIFFERENT)
