"""Commands about values: `get` shows or writes one, `diff` compares two.

InspectedValue    a key or a file, taken apart: its tensors and objects by name. Nothing is unpickled unasked
show, rows        tensors as text: first elements, statistics, a histogram in characters
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

import memstore
from memstore import _wording as wording
from memstore._arguments import encode_key
from memstore._info import Progress
from memstore.cli import render
from memstore.cli.group import DIFFERENT, allow_pickle, as_json, cli, complete_leaf, key, keys_of, root
from memstore.engine import (
    Path,
    PinOptions,
    Record,
    Root,
    deadline_after,
    has_settings,
    hold,
    hold_version_of,
    resource_errors,
)
from memstore.errors import AlreadyExistsError, KeyNotFoundError, UnsupportedValueError
from memstore.listing import near, no_value, open_keyspace, opened, version_gone

if TYPE_CHECKING:
    import numpy as np
    import torch

    from memstore.figures import Bin, Summary

# --- Values taken apart ----------------------------------------------------------------------------------------------


_TIMEOUT = 30.0  # seconds
_NAMED_LEAVES = 8  # leaves, in a message


@dataclass(frozen=True, slots=True)
class InspectedValue:
    """A value, taken apart.

    Attributes:
        title: of a key its version and age, of a file its path.
        structure: "dict of 2 leaves".
        tensors: lazy, or mapped.
        objects: all other leaves.
    """

    title: str
    structure: str
    tensors: Mapping[Path, torch.Tensor]
    objects: Mapping[Path, Any]
    record: Record | None = None

    def below(self, leaf: str) -> InspectedValue:
        """Returns just the leaf of this name, or all leaves below it. Raises KeyNotFoundError."""
        names = leaves_below([*self.tensors, *self.objects], leaf)
        if not names:
            raise KeyNotFoundError(f"{self.title} has no leaf {leaf!r}: {self._has(leaf)}")
        tensors = {name: self.tensors[name] for name in names if name in self.tensors}
        objects = {name: self.objects[name] for name in names if name in self.objects}
        return InspectedValue(self.title, self.structure, tensors, objects, self.record)

    def count(self) -> str:
        """Counts tensors and objects: "2 leaves and 1 object". As elsewhere, leaves are tensors."""
        leaves = wording.count_of(len(self.tensors), "leaf", "leaves")
        objects = wording.count_of(len(self.objects), "object", "objects")
        return f"{leaves} and {objects}" if self.tensors and self.objects else objects if self.objects else leaves

    def _has(self, leaf: str) -> str:
        names = [leaf_text(name) for name in (*self.tensors, *self.objects)]
        if names == ["value"]:
            return "its value is a single leaf"
        alike = near(leaf, names) if len(names) > _NAMED_LEAVES else []
        if alike:
            return f"did you mean {' or '.join(map(repr, alike))}?"
        more = (
            f", and {len(names) - _NAMED_LEAVES:,} more: `memstore info` lists them"
            if len(names) > _NAMED_LEAVES
            else ""
        )
        return f"it has {', '.join(map(repr, names[:_NAMED_LEAVES]))}{more}"


def leaf_text(name: Path) -> str:
    """Writes a leaf's name as LEAF is written: "layer/w"."""
    return "/".join(map(str, name)) if name else "value"


def leaves_below(names: Sequence[Path], leaf: str) -> list[Path]:
    """Returns the names that `leaf` is, or is a start of: as it stands, else as parts joined by "/", else by "."."""
    found = [name for name in names if name and str(name[0]) == leaf]
    for joiner in "/.":
        starts = ((name, (joiner.join(map(str, name[:end])) for end in range(1, len(name) + 1))) for name in names)
        found = found or [name for name, some in starts if leaf in some]
    return found or [name for name in names if leaf_text(name) == leaf]  # "value", of a value that is a single leaf


@contextlib.contextmanager
def inspect_key(root: str, key: str, version: int | None = None) -> Generator[InspectedValue]:
    """Takes a version of a key apart, and holds it meanwhile.

    Args:
        version: None: the current one.

    Raises KeyNotFoundError, VersionGoneError.
    """
    with open_keyspace(root, "r") as store:
        with resource_errors(root, key):
            found = _inspect(opened(store), key, version)
        yield found


def _inspect(root: Root, key: str, version: int | None) -> InspectedValue:
    from memstore.view import parts_of

    name = encode_key(key)
    if version is None:
        (held,) = hold(root, (name,), deadline_after(_TIMEOUT), may_lock=False, lazily=True)
    else:
        held = hold_version_of(root, name, version, deadline_after(_TIMEOUT), may_lock=False, lazily=True)
        if held is None:
            raise version_gone(root, name, version)
    if held is None:
        raise no_value(root, name)
    record = held.record
    if record.is_mutable and record.mutable_kind == "buffer":
        from memstore.replay import look_at_rows

        rows = look_at_rows(root, key, _TIMEOUT)
        return InspectedValue(f"{key!r}", _filled("buffer", rows.rows, rows.capacity), rows.tensors, {}, record)
    if record.is_mutable:
        from memstore.datasets import hold_rows

        held = hold_rows(root, key, _TIMEOUT)
    found = parts_of(root, key, held, PinOptions("r", _TIMEOUT, False, False))
    shown = filled(root, key, record) if record.is_mutable else found.structure
    return InspectedValue(f"{key!r}", shown, found.tensors, found.objects, record)


def filled(root: Root, key: str, record: Record) -> str:
    """Says how full a dataset or replay buffer is: "a dataset with 4 of 10 rows"."""
    return _filled(record.mutable_kind, *rows_of(root, key, record.mutable_kind))


def _filled(kind: str, rows: int, capacity: int) -> str:
    if kind == "buffer":
        return f"a replay buffer with {rows:,} rows in {capacity:,} slots"
    return f"a dataset with {rows:,} of {capacity:,} rows"


def rows_of(root: Root, key: str, kind: str) -> tuple[int, int]:
    """Returns how many rows a dataset or replay buffer has, and how many it has room for."""
    if kind == "buffer":
        from memstore.replay import look_at_rows

        found = look_at_rows(root, key, _TIMEOUT)
        return found.rows, found.capacity
    with memstore.open(root.path, "r") as store:
        rows = store.open_dataset(key, "r")
        return len(rows), rows.capacity


def inspect_file(path: str, *, allow_pickle: bool) -> InspectedValue:
    """Takes a file or folder of another format apart, or a snapshot: of that, what rank 0 has."""
    from memstore import structure
    from memstore.formats import load_files
    from memstore.snapshot import Snapshot, is_snapshot

    if is_snapshot(path):
        value = Snapshot(path, storage_options={"allow_pickle": allow_pickle}).view()
    else:
        value = load_files(os.path.basename(path) or path, path, None, allow_pickle=allow_pickle)
    flat = structure.flatten(value, allow_pickle=allow_pickle)
    plan = flat.plan
    tensors = {leaf.name: tensor for leaf, tensor in zip(plan.leaves, flat.tensors, strict=True)}
    objects = structure.show_objects(flat.objects, plan.object_count)
    return InspectedValue(
        path, structure.structure_text(plan), tensors, dict(zip(plan.object_names, objects, strict=True))
    )


def has_key(root: str, key: str) -> bool:
    """Returns whether a store has this key. Raises NotAStoreError."""
    with open_keyspace(root, "r") as store:
        return key in store


# --- Tensors as `memstore get` shows them: first elements, statistics, a histogram in characters ---------------------


_EDGES = 3  # elements at each side of a dimension that is too long to be shown
_LINES = 12  # of the elements
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR = 40  # columns
_OBJECT = 60  # characters of an object
_LONG = 10**9

TENSOR_TITLES = ("leaf", "content", "min", "mean", "max", "NaN", "inf")
TENSOR_RIGHT = TENSOR_TITLES[2:]


def tensor_type(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def number(value: float | None) -> str:
    """Writes a number in four digits; whole ones as they are, as long as these are not too many."""
    if value is None:
        return "-"
    return f"{value}" if isinstance(value, int) and abs(value) < _LONG else f"{value:.4g}"


# --- many leaves ------------------------------------------------------------------------------------------------------


def tensor_rows(tensors: Iterable[tuple[Path, torch.Tensor]]) -> Iterator[Sequence[str]]:
    """Yields the rows under TENSOR_TITLES, each when it has been counted."""
    from memstore import figures

    for name, tensor in tensors:
        found = figures.summarize(tensor)
        start = leaf_text(name), tensor_type(tensor)
        if found is None:
            yield (*start, *["-"] * len(TENSOR_RIGHT))
        else:
            ends = number(found.minimum), number(found.mean), number(found.maximum)
            yield (*start, *ends, f"{found.nans:,}", f"{found.infinities:,}")


def shown_object(value: object) -> str:
    """Writes the start of an object in one line."""
    text = wording.escaped(repr(value))
    return text if len(text) <= _OBJECT else f"{text[: _OBJECT - 1]}{render.left_out()}"


# --- one tensor -------------------------------------------------------------------------------------------------------


def show_tensor(tensor: torch.Tensor, bins: int) -> None:
    """Prints first elements, statistics, and the histogram of so many bins."""
    import torch

    from memstore import figures

    found = figures.summarize(tensor)
    for line in first_elements(tensor, render.console.width):
        render.console.print(render.printable(line), soft_wrap=True)
    if found is None:
        render.console.print(f"[dim]no statistics for the dtype {tensor_type(tensor).split(' ')[0]}[/dim]")
        return
    for line in statistics_lines(tensor.dtype, found):
        render.console.print(line)
    for line in bars(figures.histogram(tensor, found, bins), render.console.width, is_bool=tensor.dtype is torch.bool):
        render.console.print(render.printable(line))


def statistics_lines(dtype: torch.dtype, found: Summary) -> Iterator[str]:
    """Yields the statistics, as far as elements of the dtype have them."""
    import torch

    count = wording.count_of(found.count, "element", "elements")
    if dtype is torch.bool:
        yield f"{count}: {found.count - found.zeros:,} True, {found.zeros:,} False"
        return
    ends = [("min", found.minimum), ("mean", found.mean), ("max", found.maximum), ("std", found.deviation)]
    what = "magnitudes: " if dtype.is_complex else ""
    if found.mean is not None:
        yield what + "  ".join(f"{name} {number(value)}" for name, value in ends)
    counts = [f"{found.zeros:,} zero"]
    if dtype.is_floating_point or dtype.is_complex:
        counts += [f"{found.nans:,} NaN", f"{found.infinities:,} infinite"]
    yield f"{count}: {', '.join(counts)}" if found.count else count


def first_elements(tensor: torch.Tensor, width: int) -> list[str]:
    """Returns the elements as numpy shows them; of long dimensions the first and the last ones. Just these are read."""
    import numpy as np

    index: tuple[int, ...] = ()
    if not tensor.numel():
        return []
    if tensor.ndim > 2:
        index = (0,) * (tensor.ndim - 2)
        tensor = tensor[index]
    values = _edges(tensor)
    if values is None:
        return []
    text = np.array2string(
        values, max_line_width=width, precision=4, threshold=0, edgeitems=_EDGES, suppress_small=False
    )
    lines = text.split("\n")
    title = [f"[{', '.join(map(str, index))}, :, :]"] if index else []
    return [*title, *lines[:_LINES], *([render.left_out()] if len(lines) > _LINES else [])]


def _edges(tensor: torch.Tensor) -> np.ndarray | None:
    """Returns so few elements that numpy leaves the middle out where the tensor has more."""
    import torch

    from memstore import figures

    for dim, size in enumerate(tensor.shape):
        if size > 2 * _EDGES + 1:
            ends = (tensor.narrow(dim, 0, _EDGES + 1), tensor.narrow(dim, size - _EDGES, _EDGES))
            try:
                tensor = torch.cat(ends, dim)
            except (RuntimeError, NotImplementedError):  # of a dtype that can't be copied
                return None
    return figures.numbers(tensor)


def bars(bins: Sequence[Bin], width: int, *, is_bool: bool = False) -> Iterator[str]:
    """Yields a line for each bin: where it starts, a bar as long as it has elements, and how many these are."""
    if not bins:
        return
    names = [str(bool(one.start)) if is_bool else number(one.start) for one in bins]
    ends = [number(one.stop) if one.stop != one.start and not is_bool else "" for one in bins]
    counts = [f"{one.count:,}" for one in bins]
    left, right, last = (max(map(len, texts)) for texts in (names, ends, counts))
    room = max(min(_BAR, width - left - right - last - 8), 8)
    most = max(one.count for one in bins) or 1
    for one, name, end, count in zip(bins, names, ends, counts, strict=True):
        span = f"{name:>{left}} … {end:<{right}}" if right else f"{name:>{left}}"
        if not render.is_utf8():
            span = span.replace("…", "..")
        yield f"{span}  {count:>{last}}  {bar(one.count / most, room)}".rstrip()


def bar(part: float, room: int) -> str:
    """Draws a bar as long as `part` of the room; what is there at all can be seen."""
    if not render.is_utf8():
        return "#" * max(round(part * room), 1 if part else 0)
    eighths = max(math.floor(part * room * 8), 1 if part else 0)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def tensor_widths(tensors: Iterable[tuple[Path, torch.Tensor]], objects: Iterable[Path] = ()) -> list[int]:
    """Returns the widths of the columns under TENSOR_TITLES, before any element is counted.

    Objects stand below, in the first two.
    """
    found = [max((render.cell_width(leaf_text(name)) for name in objects), default=0), 0, 9, 9, 9, 3, 3]
    for name, tensor in tensors:
        found[0] = max(found[0], render.cell_width(leaf_text(name)))
        found[1] = max(found[1], len(tensor_type(tensor)))
    return found


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
@click.option(
    "--version", type=click.IntRange(1), metavar="V", help="A version that `memstore versions` lists; else the current."
)
@allow_pickle
@as_json
def get(
    root: str,
    key: str,
    leaf: str,
    output: str | None,
    bins: int,
    force: bool,
    version: int | None,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Show the value of KEY, or its leaf LEAF: first elements, minimum, mean, maximum, NaNs and a histogram.

    LEAF is a name as in `memstore info`, with its parts joined by "/" or "."; it may stand for all leaves below it.
    """
    _check_options(output, allow_pickle=allow_pickle, force=force)
    if output is not None:
        _write(root, key, leaf, output, version, allow_pickle=allow_pickle, as_json=as_json)
        return
    with inspect_key(root, key, version) as found:
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


def _show(key: str, leaf: str, found: InspectedValue, bins: int) -> None:
    record = found.record
    assert record is not None, "of a key"
    age = f"version {record.version}, {wording.age(record.created)} old"
    names = [*found.tensors, *found.objects]
    is_bare = names == [()] and not record.is_mutable
    told = [found.structure] if not leaf and not is_bare else []
    leaf = leaf_text(names[0]) if len(names) == 1 and names[0] else leaf
    if len(found.tensors) == 1 == len(names):
        (tensor,) = found.tensors.values()
        told += [tensor_type(tensor), wording.size(tensor.numel() * tensor.itemsize)]
    title = f"[bold]{render.printable(' '.join([key, *([leaf] if leaf else [])]))}[/]"
    render.head(f"{title}  {render.printable(', '.join([*told, age]))}")
    if len(names) == 1:
        for tensor in found.tensors.values():
            show_tensor(tensor, bins)
        for value in found.objects.values():
            render.console.print(render.printable(repr(value)))
        return
    if found.tensors:
        widths = tensor_widths(found.tensors.items(), found.objects)
        render.write_rows(TENSOR_TITLES, tensor_rows(found.tensors.items()), right=TENSOR_RIGHT, widths=widths, page=1)
    rows = [(leaf_text(name), shown_object(value)) for name, value in found.objects.items()]
    label = max([len("leaf") * bool(found.tensors), *(render.cell_width(leaf_text(name)) for name in names)])
    render.write_rows(("", ""), rows, widths=(label,), is_headed=False)


def _described(key: str, found: InspectedValue, bins: int) -> dict[str, Any]:
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


def _write(
    root: str, key: str, leaf: str, output: str, version: int | None, *, allow_pickle: bool, as_json: bool
) -> None:
    ending = os.path.splitext(output)[1]
    kind: Any = _ENDINGS.get(ending)
    if kind is None:
        raise click.UsageError(f"-o writes {', '.join(_ENDINGS)}, and {output!r} ends with none of them")
    with render.progress("writing") as advance:
        if leaf or kind == "npy":
            _write_leaf(root, key, leaf, output, version, advance)
        elif not _write_rows(root, key, output, version, advance):
            with memstore.open(root, "r", allow_pickle=allow_pickle) as store:
                store.export(key, output, format=kind, version=version, progress=advance)
        nbytes = os.path.getsize(output)
    text = f"{wording.size(nbytes)} written to {render.printable(output)}"
    render.tell({"path": output, "nbytes": nbytes}, text, as_json=as_json)


def _write_rows(root: str, key: str, output: str, version: int | None, advance: Progress) -> bool:
    """Writes the rows that a dataset or replay buffer has now. Returns whether the key is one of these."""
    with inspect_key(root, key, version) as found:
        if found.record is None or not found.record.is_mutable:
            return False
        from memstore.formats import write_tensors

        write_tensors(output, {name: _without_free_slots(one, found) for name, one in found.tensors.items()}, advance)
    return True


def _without_free_slots(tensor: torch.Tensor, found: InspectedValue) -> torch.Tensor:
    """Copies a replay buffer's tensor, which torch.save would write with all slots."""
    record = found.record
    return tensor.clone() if record is not None and record.is_mutable and record.mutable_kind == "buffer" else tensor


def _write_leaf(root: str, key: str, leaf: str, output: str, version: int | None, advance: Progress) -> None:
    from memstore.formats import write_tensor

    with inspect_key(root, key, version) as found:
        shown = found.below(leaf) if leaf else found
        names = [leaf_text(name) for name in (*shown.tensors, *shown.objects)]
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
        render.write_rows(("leaf", "difference"), [(leaf_text(one.leaf), one.what) for one in found])
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
    if os.path.isfile(key) and has_key(root, other) and not has_key(root, key):
        raise click.UsageError(f"{key!r} is a file, and {other!r} a key of {root}: say ROOT, KEY, and then the file")
    if has_key(root, other) or not os.path.lexists(other):
        return ComparedSide(root, key), ComparedSide(root, other)
    return ComparedSide(root, key), ComparedSide(other, key) if has_settings(other) else ComparedSide(other)


@contextlib.contextmanager
def _opened_side(side: ComparedSide, *, allow_pickle: bool) -> Generator[InspectedValue]:
    if side.key is not None:
        with contextlib.ExitStack() as stack:
            try:
                found = stack.enter_context(inspect_key(side.path, side.key))
            except KeyNotFoundError as error:  # of which of the two
                error.message = f"{side.path}: {error.message}"
                raise
            yield found
        return
    if has_settings(side.path):
        raise UnsupportedValueError(f"{side.path} is a store: say which KEY of it is meant")
    yield inspect_file(side.path, allow_pickle=allow_pickle)


def differences(
    ours: InspectedValue,
    theirs: InspectedValue,
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

    kinds = (
        "" if (one.dtype, one.shape) == (other.dtype, other.shape) else f"{tensor_type(one)} and {tensor_type(other)}"
    )
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
