"""The command that makes a checkpoint of one format into one of another."""

from __future__ import annotations

import click

from memstore.cli import render
from memstore.cli.group import as_json, cli

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
@as_json
def convert(
    source: str,
    target: str,
    source_as: str | None,
    target_as: str | None,
    allow_pickle: bool,
    untie: bool,
    max_expanded: str,
    as_json: bool,
) -> None:
    """Convert a checkpoint to another format.

    DST appears whole, and compared with SRC, or not at all. A FORMAT is dcp, huggingface, memmap, memstore-dcp,
    safetensors, snapshot or torch; SRC may also be torchsnapshot.
    """
    from memstore.convert import convert as run

    with render.progress("converting") as advance:
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
    text = f"{done.source_format} to {done.target_format}: {many}, {render.size(done.nbytes)}, compared"
    render.tell(done, render.printable(text), as_json=as_json)
