"""`memstore diff`: which leaves of two keys, or files, differ, and by how much."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click
from click.shell_completion import CompletionItem

from memstore.cli import columns, looking, render
from memstore.cli.codes import DIFFERENT
from memstore.cli.completing import keys_of
from memstore.cli.group import allow_pickle, as_json, cli
from memstore.engine import Path
from memstore.errors import KeyNotFoundError, UnsupportedValueError

if TYPE_CHECKING:
    import torch

_SHOWN = 60  # characters of an object


class Difference(NamedTuple):
    """A leaf, and how what two values have there differs."""

    leaf: Path
    what: str


class Side(NamedTuple):
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
        _opened(one, allow_pickle=allow_pickle) as ours,
        _opened(other, allow_pickle=allow_pickle) as theirs,
        render.progress("comparing") as advance,
    ):
        found = differences(ours, theirs, (one.title, other.title), advance)
        count = ours.count()
    if as_json:
        render.print_json([one._asdict() for one in found])
    elif found:
        columns.write(("leaf", "difference"), [(looking.text_of(one.leaf), one.what) for one in found])
    else:
        render.console.print(f"equal: {count}")
    if found:
        sys.exit(DIFFERENT)


def _sides(names: tuple[str, ...]) -> tuple[Side, Side]:
    if len(names) == 2 and looking.is_store(names[0]):
        raise click.UsageError(f"{names[0]!r} is a store: say its KEY, and then the key or file to compare with")
    if len(names) == 2:
        return Side(names[0]), Side(names[1])
    if len(names) == 4:
        return Side(names[0], names[1]), Side(names[2], names[3])
    if len(names) != 3:
        raise click.UsageError("say ROOT KEY OTHER, ROOT KEY OTHER_ROOT OTHER_KEY, or FILE OTHER")
    root, key, other = names
    if os.path.isfile(key) and looking.has_key(root, other) and not looking.has_key(root, key):
        raise click.UsageError(f"{key!r} is a file, and {other!r} a key of {root}: say ROOT, KEY, and then the file")
    if looking.has_key(root, other) or not os.path.lexists(other):
        return Side(root, key), Side(root, other)
    return Side(root, key), Side(other, key) if looking.is_store(other) else Side(other)


@contextlib.contextmanager
def _opened(side: Side, *, allow_pickle: bool) -> Generator[looking.Looked]:
    if side.key is not None:
        with contextlib.ExitStack() as stack:
            try:
                found = stack.enter_context(looking.key_of(side.path, side.key))
            except KeyNotFoundError as error:  # of which of the two
                error.message = f"{side.path}: {error.message}"
                raise
            yield found
        return
    if looking.is_store(side.path):
        raise UnsupportedValueError(f"{side.path} is a store: say which KEY of it is meant")
    yield looking.file_of(side.path, allow_pickle=allow_pickle)


def differences(
    ours: looking.Looked,
    theirs: looking.Looked,
    titles: tuple[str, str],
    done: Callable[[int, int], None] = lambda done, total: None,
) -> list[Difference]:
    """By leaf, in the order of the first value.

    Args:
        titles: what the two are called.
        done: called with the bytes that have been compared, and those in all.
    """
    here_objects, there_objects = dict(_spread(ours.objects)), dict(_spread(theirs.objects))
    names = list(dict.fromkeys([*ours.tensors, *here_objects, *theirs.tensors, *there_objects]))
    total = sum(tensor.numel() * tensor.itemsize for tensor in ours.tensors.values())
    compared, found = 0, list[Difference]()
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
            found.append(Difference(name, what))
        if name in ours.tensors:
            compared += ours.tensors[name].numel() * ours.tensors[name].itemsize
            done(compared, total)
    return found


def _spread(objects: Mapping[Path, Any]) -> Iterator[tuple[Path, Any]]:
    """Those in dicts one by one: a dict without tensors is one object in a put, and many in an attached snapshot."""
    for name, value in objects.items():
        if type(value) is dict and value:
            items = cast("dict[Any, Any]", value)
            yield from _spread({(*name, part): inner for part, inner in items.items()})
        else:
            yield name, value


def _between_tensors(one: torch.Tensor, other: torch.Tensor) -> str:
    """ "" if they are equal."""
    from memstore import figures
    from memstore.cli.figures import content

    kinds = "" if (one.dtype, one.shape) == (other.dtype, other.shape) else f"{content(one)} and {content(other)}"
    if one.shape != other.shape:
        return kinds
    unequal = figures.compare(one, other)
    return "; ".join(filter(None, [kinds, str(unequal) if unequal else ""]))


def _between_objects(one: Any, other: Any) -> str:
    """ "" if they are equal. What was stored with pickle is compared as bytes."""
    try:
        same = type(one) is type(other) and bool(one == other or (one != one and other != other))
    except (TypeError, ValueError, RuntimeError):  # of arrays
        same = repr(one) == repr(other)
    if same:
        return ""
    ours, theirs = repr(one), repr(other)
    if ours == theirs:
        return f"both are {_cut(ours)}, as other bytes"
    if _cut(ours) != _cut(theirs):
        return f"{_cut(ours)} and {_cut(theirs)}"
    first = len(os.path.commonprefix([ours, theirs]))
    return f"from character {first:,} on: {_cut(ours, first)} and {_cut(theirs, first)}"


def _cut(text: str, start: int = 0) -> str:
    """As much of it as is shown, with marks where more is left out."""
    return f"{'...' if start else ''}{text[start : start + _SHOWN]}{'...' if len(text) > start + _SHOWN else ''}"
