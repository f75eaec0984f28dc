"""Commands about values: `memstore get` shows one or writes it to a file, `memstore diff` compares two leaf by leaf."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

import memstore
from memstore import _wording as wording
from memstore._info import Progress
from memstore.cli import inspection, render
from memstore.cli.codes import DIFFERENT
from memstore.cli.group import allow_pickle, as_json, cli, complete_leaf, key, keys_of, root
from memstore.engine import Path, has_settings
from memstore.errors import AlreadyExistsError, KeyNotFoundError, UnsupportedValueError

if TYPE_CHECKING:
    import torch


# --- get -------------------------------------------------------------------------------------------------------------


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
    with inspection.inspect_key(root, key) as found:
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


def _show(key: str, leaf: str, found: inspection.InspectedValue, bins: int) -> None:
    from memstore import figures
    from memstore.cli import figures as shown

    record = found.record
    assert record is not None, "of a key"
    age = f"version {record.version}, {wording.age(record.created)} old"
    names = [*found.tensors, *found.objects]
    is_bare = names == [()] and not record.is_mutable
    told = [found.structure] if not leaf and not is_bare else []
    leaf = inspection.leaf_text(names[0]) if len(names) == 1 and names[0] else leaf
    if len(found.tensors) == 1 == len(names):
        (tensor,) = found.tensors.values()
        told += [shown.content(tensor), wording.size(tensor.numel() * tensor.itemsize)]
    title = f"[bold]{render.printable(' '.join([key, *([leaf] if leaf else [])]))}[/]"
    render.head(f"{title}  {render.printable(', '.join([*told, age]))}")
    if len(names) == 1:
        for tensor in found.tensors.values():
            summary = figures.summarize(tensor)
            shown.show(tensor, summary, figures.histogram(tensor, summary, bins) if summary else [])
    elif found.tensors:
        widths = shown.widths(found.tensors.items(), found.objects)
        render.write_rows(shown.TITLES, shown.rows(found.tensors.items()), right=shown.RIGHT, widths=widths, page=1)
    if len(names) == 1:
        for value in found.objects.values():
            render.console.print(render.printable(shown.shown_object(value, is_whole=True)))
        return
    rows = [(inspection.leaf_text(name), shown.shown_object(value)) for name, value in found.objects.items()]
    label = max([len("leaf") * bool(found.tensors), *(render.cell_width(inspection.leaf_text(name)) for name in names)])
    render.write_rows(("", ""), rows, widths=(label,), is_headed=False)


def _described(key: str, found: inspection.InspectedValue, bins: int) -> dict[str, Any]:
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
    text = f"{wording.size(nbytes)} written to {render.printable(output)}"
    render.tell({"path": output, "nbytes": nbytes}, text, as_json=as_json)


def _write_rows(root: str, key: str, output: str, advance: Progress) -> bool:
    """Writes the rows that a dataset or replay buffer has now. Returns whether the key is one of these."""
    with inspection.inspect_key(root, key) as found:
        if found.record is None or not found.record.is_mutable:
            return False
        from memstore.formats import write_tensors

        write_tensors(output, {name: _without_free_slots(one, found) for name, one in found.tensors.items()}, advance)
    return True


def _without_free_slots(tensor: torch.Tensor, found: inspection.InspectedValue) -> torch.Tensor:
    """Copies a replay buffer's tensor, which torch.save would write with all slots."""
    record = found.record
    return tensor.clone() if record is not None and record.is_mutable and record.mutable_kind == "buffer" else tensor


def _write_leaf(root: str, key: str, leaf: str, output: str, advance: Progress) -> None:
    from memstore.formats import write_tensor

    with inspection.inspect_key(root, key) as found:
        shown = found.below(leaf) if leaf else found
        names = [inspection.leaf_text(name) for name in (*shown.tensors, *shown.objects)]
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


# --- diff ------------------------------------------------------------------------------------------------------------


_SHOWN = 60  # characters of an object


class LeafDifference(NamedTuple):
    """A leaf, and how what two values have there differs."""

    leaf: Path
    what: str


class ComparedSide(NamedTuple):
    """A key of a store; or a file, if there is no key."""

    path: str
    key: str | None = None

    @property
    def title(self) -> str:
        return self.path if self.key is None else f"{self.key!r} of {self.path}"


def _complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    before: tuple[str, ...] = context.params.get("names") or ()
    keys = keys_of(before[0], incomplete) if before else []
    return [CompletionItem(key) for key in keys] or [CompletionItem(incomplete, type="file")]


@cli.command(short_help="Compare two keys or files, leaf by leaf.")
@click.argument("names", nargs=-1, metavar="ROOT KEY OTHER", shell_complete=_complete)
@allow_pickle
@as_json
def diff(names: tuple[str, ...], allow_pickle: bool, as_json: bool) -> None:
    """Compare two values leaf by leaf: which differ, and by how much. Exit code 1 if any do.

    \b
    ROOT KEY OTHER                  another key, a file, or another store with KEY
    ROOT KEY OTHER_ROOT OTHER_KEY   keys of two stores
    FILE OTHER                      two files, or folders of checkpoints

    Elements are equal if their bits are. Of two snapshots, `memstore snapshot diff` compares all ranks.
    """
    one, other = _sides(names)
    with (
        _opened_side(one, allow_pickle=allow_pickle) as ours,
        _opened_side(other, allow_pickle=allow_pickle) as theirs,
        render.progress("comparing") as advance,
    ):
        found = differences(ours, theirs, (one.title, other.title), advance)
        count = ours.count()
    if as_json:
        render.print_json([one._asdict() for one in found])
    elif found:
        render.write_rows(("leaf", "difference"), [(inspection.leaf_text(one.leaf), one.what) for one in found])
    else:
        render.console.print(f"equal: {count}")
    if found:
        sys.exit(DIFFERENT)


def _sides(names: tuple[str, ...]) -> tuple[ComparedSide, ComparedSide]:
    if len(names) == 2 and has_settings(names[0]):
        raise click.UsageError(f"{names[0]!r} is a store: say its KEY, and then the key or file to compare with")
    if len(names) == 2:
        return ComparedSide(names[0]), ComparedSide(names[1])
    if len(names) == 4:
        return ComparedSide(names[0], names[1]), ComparedSide(names[2], names[3])
    if len(names) != 3:
        raise click.UsageError("say ROOT KEY OTHER, ROOT KEY OTHER_ROOT OTHER_KEY, or FILE OTHER")
    root, key, other = names
    if os.path.isfile(key) and inspection.has_key(root, other) and not inspection.has_key(root, key):
        raise click.UsageError(f"{key!r} is a file, and {other!r} a key of {root}: say ROOT, KEY, and then the file")
    if inspection.has_key(root, other) or not os.path.lexists(other):
        return ComparedSide(root, key), ComparedSide(root, other)
    return ComparedSide(root, key), ComparedSide(other, key) if has_settings(other) else ComparedSide(other)


@contextlib.contextmanager
def _opened_side(side: ComparedSide, *, allow_pickle: bool) -> Generator[inspection.InspectedValue]:
    if side.key is not None:
        with contextlib.ExitStack() as stack:
            try:
                found = stack.enter_context(inspection.inspect_key(side.path, side.key))
            except KeyNotFoundError as error:  # of which of the two
                error.message = f"{side.path}: {error.message}"
                raise
            yield found
        return
    if has_settings(side.path):
        raise UnsupportedValueError(f"{side.path} is a store: say which KEY of it is meant")
    yield inspection.inspect_file(side.path, allow_pickle=allow_pickle)


def differences(
    ours: inspection.InspectedValue,
    theirs: inspection.InspectedValue,
    titles: tuple[str, str],
    done: Callable[[int, int], None] = lambda done, total: None,
) -> list[LeafDifference]:
    """Compares two values by leaf, in the order of the first one.

    Args:
        titles: what the two are called.
        done: called with the bytes that have been compared, and those in all.
    """
    here_objects, there_objects = dict(_spread(ours.objects)), dict(_spread(theirs.objects))
    names = list(dict.fromkeys([*ours.tensors, *here_objects, *theirs.tensors, *there_objects]))
    total = sum(tensor.numel() * tensor.itemsize for tensor in ours.tensors.values())
    compared, found = 0, list[LeafDifference]()
    for name in names:
        here = name in ours.tensors or name in here_objects
        there = name in theirs.tensors or name in there_objects
        if not (here and there):
            what = f"only in {titles[0] if here else titles[1]}"
        elif name in ours.tensors and name in theirs.tensors:
            what = _between_tensors(ours.tensors[name], theirs.tensors[name])
        elif name in here_objects and name in there_objects:
            what = _between_objects(here_objects[name], there_objects[name])
        else:
            what = "a tensor in one, an object in the other"
        if what:
            found.append(LeafDifference(name, what))
        if name in ours.tensors:
            compared += ours.tensors[name].numel() * ours.tensors[name].itemsize
            done(compared, total)
    return found


def _spread(objects: Mapping[Path, Any]) -> Iterator[tuple[Path, Any]]:
    """Yields objects, those in dicts one by one: a dict without tensors is one in a put, and many in a snapshot."""
    for name, value in objects.items():
        if type(value) is dict and value:
            items = cast("dict[Any, Any]", value)
            yield from _spread({(*name, part): inner for part, inner in items.items()})
        else:
            yield name, value


def _between_tensors(one: torch.Tensor, other: torch.Tensor) -> str:
    """Says how two tensors differ; "" if they are equal."""
    from memstore import figures
    from memstore.cli.figures import content

    kinds = "" if (one.dtype, one.shape) == (other.dtype, other.shape) else f"{content(one)} and {content(other)}"
    if one.shape != other.shape:
        return kinds
    unequal = figures.compare(one, other)
    return "; ".join(filter(None, [kinds, str(unequal) if unequal else ""]))


def _between_objects(one: Any, other: Any) -> str:
    """Says how two objects differ; "" if they are equal. What was stored with pickle is compared as bytes."""
    try:
        same = type(one) is type(other) and bool(one == other or (one != one and other != other))
    except (TypeError, ValueError, RuntimeError):  # of arrays
        same = repr(one) == repr(other)
    if same:
        return ""
    ours, theirs = repr(one), repr(other)
    if ours == theirs:
        return f"both are {_cut_repr(ours)}, as other bytes"
    if _cut_repr(ours) != _cut_repr(theirs):
        return f"{_cut_repr(ours)} and {_cut_repr(theirs)}"
    first = len(os.path.commonprefix([ours, theirs]))
    return f"from character {first:,} on: {_cut_repr(ours, first)} and {_cut_repr(theirs, first)}"


def _cut_repr(text: str, start: int = 0) -> str:
    """Cuts a text to as much as is shown, with marks where more is left out."""
    return f"{'...' if start else ''}{text[start : start + _SHOWN]}{'...' if len(text) > start + _SHOWN else ''}"
