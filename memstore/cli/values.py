"""`memstore get`: one value, shown or written to a file."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import memstore
from memstore.cli import columns, looking, render
from memstore.cli.group import allow_pickle, as_json, cli, complete_leaf, key, root
from memstore.errors import AlreadyExistsError, UnsupportedValueError
from memstore.info import Progress

if TYPE_CHECKING:
    import torch

_ENDINGS = {".npy": "npy", ".pt": "torch", ".pth": "torch", ".safetensors": "safetensors"}


@cli.command(short_help="Show the elements of a value, or write it to a file.")
@root
@key
@click.argument("leaf", default="", shell_complete=complete_leaf)
@click.option(
    "-o", "--output", type=click.Path(readable=False), help="Write it to this .npy, .pt or .safetensors instead."
)
@click.option(
    "--bins", default=10, show_default=True, type=click.IntRange(1, 1000), help="Number of bins of the histogram."
)
@click.option("-f", "--force", is_flag=True, help="With -o: replace a file that is there.")
@allow_pickle
@as_json
def get(
    root: str, key: str, leaf: str, output: str | None, bins: int, force: bool, allow_pickle: bool, as_json: bool
) -> None:
    """Show the value of KEY, or its leaf LEAF: first elements, minimum, mean, maximum, NaNs and a histogram.

    LEAF is a name as in `memstore info`, with its parts joined by "/" or "."; it may stand for all leaves below it.
    """
    _check_options(output, allow_pickle=allow_pickle, force=force)
    if output is not None:
        _write(root, key, leaf, output, allow_pickle=allow_pickle, as_json=as_json)
        return
    with looking.key_of(root, key) as found:
        shown = found.below(leaf) if leaf else found
        if as_json:
            render.print_json(_described(key, shown, bins))
        else:
            _show(key, leaf, shown, bins)


def _check_options(output: str | None, *, allow_pickle: bool, force: bool) -> None:
    """Refuses what would have no effect, and what would replace a file unasked."""
    if output is None and force:
        raise click.UsageError("--force is for -o, which writes a file: leave it out")
    if output is not None and not force and os.path.lexists(output):
        raise AlreadyExistsError(f"{output} exists: --force replaces it, or say another file")
    if output is None and allow_pickle:
        raise click.UsageError("--allow-pickle is for -o: what is shown is never unpickled, so leave it out")
    source = click.get_current_context().get_parameter_source("bins")
    if output is not None and source is ParameterSource.COMMANDLINE:
        raise click.UsageError("--bins is for what is shown, and -o writes a file: leave one of them out")


def _show(key: str, leaf: str, found: looking.Looked, bins: int) -> None:
    from memstore import figures
    from memstore.cli import figures as shown

    record = found.record
    assert record is not None, "of a key"
    age = f"version {record.version}, {render.age(record.created)} old"
    names = [*found.tensors, *found.objects]
    is_bare = names == [()] and not record.is_mutable
    told = [found.structure] if not leaf and not is_bare else []
    leaf = looking.text_of(names[0]) if len(names) == 1 and names[0] else leaf
    if len(found.tensors) == 1 == len(names):
        (tensor,) = found.tensors.values()
        told += [shown.content(tensor), render.size(tensor.numel() * tensor.itemsize)]
    title = f"[bold]{render.printable(' '.join([key, *([leaf] if leaf else [])]))}[/]"
    render.head(f"{title}  {render.printable(', '.join([*told, age]))}")
    if len(names) == 1:
        for tensor in found.tensors.values():
            summary = figures.summarize(tensor)
            shown.show(tensor, summary, figures.histogram(tensor, summary, bins) if summary else [])
    elif found.tensors:
        widths = shown.widths(found.tensors.items(), found.objects)
        columns.write(shown.TITLES, shown.rows(found.tensors.items()), right=shown.RIGHT, widths=widths, page=1)
    if len(names) == 1:
        for value in found.objects.values():
            render.console.print(render.printable(shown.shown_object(value, is_whole=True)))
        return
    rows = [(looking.text_of(name), shown.shown_object(value)) for name, value in found.objects.items()]
    label = max([len("leaf") * bool(found.tensors), *(columns.width(looking.text_of(name)) for name in names)])
    columns.write(("", ""), rows, widths=(label,), is_headed=False)


def _described(key: str, found: looking.Looked, bins: int) -> dict[str, Any]:
    from memstore import figures

    record = found.record
    leaves: list[dict[str, Any]] = []
    for name, tensor in found.tensors.items():
        summary = figures.summarize(tensor)
        counted = None if summary is None else dataclasses.asdict(summary)
        drawn = figures.histogram(tensor, summary, bins) if summary is not None else []
        about = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}
        leaves.append({"name": name, **about, "statistics": counted, "histogram": drawn})
    return {
        "key": key,
        "version": None if record is None else record.version,
        "structure": found.structure,
        "leaves": leaves,
        "objects": [{"name": name, "value": repr(value)} for name, value in found.objects.items()],
    }


# --- files ------------------------------------------------------------------------------------------------------------


def _write(root: str, key: str, leaf: str, output: str, *, allow_pickle: bool, as_json: bool) -> None:
    ending = os.path.splitext(output)[1]
    kind: Any = _ENDINGS.get(ending)
    if kind is None:
        raise click.UsageError(f"-o writes {', '.join(_ENDINGS)}, and {output!r} ends with none of them")
    with render.progress("writing") as advance:
        if leaf or kind == "npy":
            _write_leaf(root, key, leaf, output, advance)
        elif not _write_rows(root, key, output, advance):
            with memstore.open(root, "r", allow_pickle=allow_pickle) as store:
                store.export(key, output, format=kind, progress=advance)
        nbytes = os.path.getsize(output)
    text = f"{render.size(nbytes)} written to {render.printable(output)}"
    render.tell({"path": output, "nbytes": nbytes}, text, as_json=as_json)


def _write_rows(root: str, key: str, output: str, advance: Progress) -> bool:
    """Writes the rows that a dataset or replay buffer has now; whether the key is one of these."""
    with looking.key_of(root, key) as found:
        if found.record is None or not found.record.is_mutable:
            return False
        from memstore.formats import write_tensors

        write_tensors(output, {name: _without_free_slots(one, found) for name, one in found.tensors.items()}, advance)
    return True


def _without_free_slots(tensor: torch.Tensor, found: looking.Looked) -> torch.Tensor:
    """Of a replay buffer, whose tensors torch.save would write with all slots."""
    record = found.record
    return tensor.clone() if record is not None and record.is_mutable and record.mutable_kind == "buffer" else tensor


def _write_leaf(root: str, key: str, leaf: str, output: str, advance: Progress) -> None:
    from memstore.formats import write_tensor

    with looking.key_of(root, key) as found:
        shown = found.below(leaf) if leaf else found
        names = [looking.text_of(name) for name in (*shown.tensors, *shown.objects)]
        if len(names) != 1 or not shown.tensors:
            what = f"{leaf!r} of {key!r}" if leaf else f"{key!r}"
            some = ", ".join([*names[:5], "..."] if len(names) > 5 else names)
            if len(names) == 1:
                text = f"{what} is no tensor, and this file takes one: without LEAF, -o FILE.pt takes the whole value"
            else:
                whole = ", or leave LEAF out: -o FILE.pt takes the whole value"
                which = f"say one of these as LEAF{whole}" if leaf else "say which LEAF"
                text = f"{what} has {shown.count()} ({some}), and this file takes a single tensor: {which}"
            raise UnsupportedValueError(text, key=key)
        ((name, tensor),) = shown.tensors.items()
        write_tensor(output, ".".join(map(str, name)) or "tensor", _without_free_slots(tensor, found), advance)
