"""Matching: what a stored value and a target of out= or like= have in common, and all the ways in which they differ.

Stored leaves are matched with the target's by name, so a stored dict fits an OrderedDict or a TensorDict with the same
keys. Two structures are matched once: the next get into a target of the same structure takes the match from a cache.
"""

from __future__ import annotations

from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from memstore import _compat
from memstore._wording import an
from memstore.engine import Path
from memstore.errors import StructureMismatchError, UnsupportedValueError
from memstore.sharding import ShardedLeaf, sharded_leaf
from memstore.structure import traits
from memstore.structure.classes import shown_attributes
from memstore.structure.plans import Plan
from memstore.structure.refusals import RefusedError, render_path
from memstore.structure.shards import check_held
from memstore.structure.tensor_memory import EXPANDED, GONE, why_no_memory, why_not_filled
from memstore.structure.ties import Footprints, locate_tensors
from memstore.structure.tree import TENSOR, Node, ObjectNode, TensorNode, Tree, compile_tree, name_of, walk_names
from memstore.structure.walk import Facts, Walk, take_apart

# --- The match -------------------------------------------------------------------------------------------------------


_LISTED = 20  # differences in one message
_CACHED_MATCHES = 64
_UNCAST = traits.WITHOUT_COPY | {getattr(torch, "float4_e2m1fn_x2", None)}  # torch has no kernel that casts them


class StructureMatch:
    """A stored structure, matched with a target's: what they have in common, and how they differ.

    Attributes:
        pairs: (stored leaf, target's tensor) of one name.
        exact: those of them whose contents must be equal already: the lengths of nested tensors.
        footprints: of the target's tensors.
        resolved: target's tensors with a conj or neg bit: their bytes aren't their values.
        apart: addresses at which the target's tensors were found to share no memory, or as the stored ones do.
        split: stored containers of which the target has one object: no tensor lies in them. A sharded put stores dicts
            so, since those of its ranks are merged by key.
    """

    __slots__ = (
        "apart",
        "differences",
        "exact",
        "footprints",
        "object_names",
        "pairs",
        "resolved",
        "root",
        "split",
        "tensor_names",
    )

    def __init__(
        self,
        plan: Plan,
        tree: Tree,
        facts: Facts,
        sharded: dict[int, ShardedTarget],
        what: str,
        strict: bool,
        cast: bool,
    ) -> None:
        self.root, reader = compile_tree(tree)
        self.resolved = frozenset(i for i, resolve in enumerate(facts.resolve or ()) if resolve)
        self.apart: list[int] | None = None
        self.footprints = Footprints(facts.dtypes, facts.shapes, facts.strides)
        self.tensor_names: list[Path] = []
        self.object_names: list[Path] = []
        for name, node in walk_names(self.root):
            if isinstance(node, TensorNode):
                self.tensor_names.append(name)
            elif isinstance(node, ObjectNode):
                self.object_names.append(name)
        self.split = list(_containers(plan.root, (), set(self.object_names))) if self.object_names else []
        self.differences: list[str] = []
        self.pairs: list[tuple[int, int]] = []
        self._match(plan, what, strict, leaves_may_lack=bool(sharded))
        compare = _why_not_fillable if what == "out" else _why_not_convertible
        for have, want in self.pairs:
            problem = compare(plan, have, _target_tensor(facts, want, sharded.get(want)), cast)
            if problem:
                self.differences.append(f"{render_path(self.tensor_names[want])}: {problem}")
        self.exact = [(have, want) for have, want in self.pairs if what == "out" and want in reader.exact]
        self.pairs = [pair for pair in self.pairs if pair not in self.exact]
        if what == "like" and strict:
            self._match_objects(plan, leaves_may_lack=bool(sharded))

    def _match(self, plan: Plan, what: str, strict: bool, leaves_may_lack: bool) -> None:
        """Pairs leaves and tensors of one name. `leaves_may_lack`: other ranks may hold what the target lacks."""
        stored = [leaf.name for leaf in plan.leaves]
        for names in (stored, self.tensor_names, plan.object_names, self.object_names):
            # the keys 1.0 and "1.0" make one name
            twice = [name for name, count in Counter(names).items() if count > 1]
            self.differences += [f"{render_path(name)}: two leaves have this name" for name in twice]
        wanted = {name: i for i, name in enumerate(self.tensor_names)}
        for i, name in enumerate(stored):
            want = wanted.pop(name, None)
            if want is not None:
                self.pairs.append((i, want))
            elif strict and not leaves_may_lack:
                self.differences.append(f"{render_path(name)}: a tensor is stored, but there is none in {what}")
        if strict:
            self.differences += [f"{render_path(name)}: a tensor in {what}, but none is stored" for name in wanted]

    def _match_objects(self, plan: Plan, leaves_may_lack: bool) -> None:
        have, want = (
            {name for name in names if not is_optional(name)} for names in (plan.object_names, self.object_names)
        )
        for names, text in (
            (set[Path]() if leaves_may_lack else have - want, "an object is stored, but there is none in like"),
            (want - have, "an object in like, but none is stored"),
        ):
            self.differences += [f"{render_path(name)}: {text}" for name in sorted(names, key=repr)]


def _containers(node: Node, name: Path, objects: set[Path], inside: bool = False) -> Iterator[Path]:
    """Iterates over the names of containers that stand where these objects do, and of those inside of them."""
    if not isinstance(node, (TensorNode, ObjectNode)):
        inside = inside or name in objects
        if inside:
            yield name
        for step, child in node.children():
            yield from _containers(child, name + step, objects, inside)


class _TargetTensor(NamedTuple):
    """The facts that a target has in common with what is stored. `held`: shape and strides of what this rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[tuple[Sequence[int], Sequence[int]], ...]


def _target_tensor(facts: Facts, want: int, sharded: ShardedTarget | None) -> _TargetTensor:
    if sharded is None:
        shape = tuple(facts.shapes[want])
        return _TargetTensor(shape, facts.dtypes[want], ((shape, facts.strides[want]),))
    leaf = sharded.leaf
    return _TargetTensor(leaf.shape, leaf.dtype, tuple((one.local.shape, one.local.stride()) for one in leaf.shards))


def _why_not_fillable(plan: Plan, have: int, target: _TargetTensor, cast: bool) -> str | None:
    stored = plan.leaves[have]
    source = traits.DTYPES[stored.dtype]
    if target.shape != stored.shape:
        return f"stored with shape {list(stored.shape)}, here {list(target.shape)}"
    if target.dtype != source and not (cast and can_cast(source, target.dtype)):
        advice = "; cast=True casts it" if can_cast(source, target.dtype) else ""
        return f"stored as torch.{stored.dtype}, here {target.dtype}{advice}"
    if any(traits.overlaps_itself(shape, stride) for shape, stride in target.held):
        return EXPANDED
    return None


def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Returns whether cast=True fills a tensor of `target` with elements of `source`: both are floating dtypes."""
    if not (source.is_floating_point and target.is_floating_point):
        return False
    return _UNCAST.isdisjoint((source, target))


def _why_not_convertible(plan: Plan, have: int, target: _TargetTensor, _: bool) -> str | None:
    stored, dtype = plan.leaves[have], target.dtype
    source = traits.DTYPES[stored.dtype]
    if target.shape != stored.shape:
        return f"stored with shape {list(stored.shape)}, here {list(target.shape)}"
    if source.is_complex and not dtype.is_complex:
        return f"stored complex, here {dtype}"
    if dtype != source and not traits.WITHOUT_COPY.isdisjoint((dtype, source)):
        return f"{source} can't become {dtype}"
    return None


_matches: dict[Any, StructureMatch] = {}


class MatchedTarget(NamedTuple):
    """A target, matched with a stored value.

    Attributes:
        missing: its tensors whose memory is gone.
        differences: those of the match, and the missing tensors.
        sharded: those of its tensors that are spread over ranks.
    """

    match: StructureMatch
    tensors: list[torch.Tensor]
    addresses: list[int]
    missing: frozenset[int]
    differences: list[str]
    sharded: dict[int, ShardedTarget]


def match_target(plan: Plan, value: Any, what: str, strict: bool, cast: bool = False) -> MatchedTarget:
    match, walk, addresses = _match(plan, value, what, strict, cast, {})
    if match.split:
        match, walk, addresses = _match(plan, value, what, strict, cast, entries_at(value, match.split))
    sharded = walk.sharded
    met = {want for _, want in (*match.pairs, *match.exact)}
    gone = {i for i, target in sharded.items() if any(why_no_memory(local) for _, local in target.leaf.shards)}
    missing = frozenset(match.footprints.missing(locate_tensors(walk.tensors, addresses))) | gone
    differences = [
        f"{render_path(match.tensor_names[i])}: {GONE}"
        for i in sorted(missing)
        if (i in met) == (what == "out")  # of a template that is met only the look matters
    ]
    return MatchedTarget(match, walk.tensors, addresses, missing, match.differences + differences, sharded)


def _match(
    plan: Plan, value: Any, what: str, strict: bool, cast: bool, split: dict[int, Any]
) -> tuple[StructureMatch, TargetWalk, list[int]]:
    """Pairs leaves and tensors of one name. `leaves_may_lack`: others may hold what this rank's target lacks."""

    def walk_with(careful: bool) -> TargetWalk:
        walk = SplittingWalk(True, careful, split) if split else TargetWalk(True, careful)
        walk.in_place = what == "out"
        return walk

    try:
        tree, walk, facts, addresses = take_apart(value, walk_with)
    except RefusedError as error:
        raise StructureMismatchError(f"{what}: {error.message()}") from None
    key = (plan, tree, facts, _key_of(walk.sharded), what, strict, cast)
    match = _matches.get(key)
    if match is None:
        match = StructureMatch(plan, tree, facts, walk.sharded, what, strict, cast)
        if len(_matches) >= _CACHED_MATCHES:
            _matches.clear()
        _matches[key] = match
    return match, walk, addresses


def _key_of(sharded: dict[int, ShardedTarget]) -> tuple[Any, ...]:
    """Returns what matters of them to a match, beside the facts of their only shards."""
    return tuple(
        (
            i,
            leaf.shape,
            None if len(leaf.shards) == 1 else tuple((one.box.shape, one.local.stride()) for one in leaf.shards),
        )
        for i, (_, leaf) in sharded.items()
    )


def raise_differences(differences: Sequence[str], what: str, value: Any) -> None:
    """Raises StructureMismatchError if there are any, of a target that is `out` or `like`."""
    if differences and isinstance(value, torch.nn.Module):
        raise StructureMismatchError(
            f"{what} is {an(type(value))}, a module, and no container of tensors: store.load_model(key, module) "
            f"fills one that save_model has stored; for a stored state_dict, {what}=module.state_dict()"
        )
    if differences:
        more = f"\n  and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
        lines = "".join(f"\n  {difference}" for difference in differences[:_LISTED])
        is_strict = any("there is none in" in one or "but none is stored" in one for one in differences)
        fills = (
            "fills what both have" if what == "out" else "takes from like what only like has, and leaves out the rest"
        )
        hint = f"; strict=False {fills}" if is_strict else ""
        raise StructureMismatchError(f"{what} differs from the stored value, nothing was written{hint}:{lines}{more}")


# --- The walk over a target: its tensors stay as they are, its objects are left out ----------------------------------


_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, dict, list, tuple, int, float, str, bool, type(None)})


class ShardedTarget(NamedTuple):
    """A DTensor, TensorShard or ShardedTensor in a target, and what this rank holds of it."""

    value: Any
    leaf: ShardedLeaf


class TargetWalk(Walk):
    """The walk over a target.

    Attributes:
        sharded: what is spread over ranks, by where it stands among the tensors. There stands this rank's only shard,
            or an empty tensor where there are several or none.
    """

    __slots__ = ("sharded",)

    def __init__(self, allow_pickle: bool, careful: bool = False) -> None:
        super().__init__(allow_pickle, careful)
        self.sharded: dict[int, ShardedTarget] = {}

    def visit(self, value: Any) -> Tree:
        if type(value) not in _PLAIN_TYPES:
            try:
                leaf = sharded_leaf(value)
            except UnsupportedValueError as error:
                raise RefusedError(str(error)) from None
            if leaf is not None:
                check_held(leaf)
                if self.in_place:
                    self._check_shards(leaf)
                self.sharded[len(self.tensors)] = ShardedTarget(value, leaf)
                is_one = len(leaf.shards) == 1
                self.tensors.append(leaf.shards[0].local if is_one else torch.empty(0, dtype=leaf.dtype, device="cpu"))
                return TENSOR
        return super().visit(value)

    def _check_shards(self, leaf: ShardedLeaf) -> None:
        """Raises RefusedError where a match, which tells what is wrong with memory and strides, can't look further."""
        for _, local in leaf.shards:
            why = why_not_filled(local)
            if why is not None and why not in (GONE, EXPANDED):
                raise RefusedError(why)

    def write_leaf(self, value: Any) -> Any:
        return None


class SplittingWalk(TargetWalk):
    """The walk of a sharded put, over a target: some containers in which no tensor lies stay containers.

    Attributes:
        split: these, by their ids.
    """

    __slots__ = ("_is_split", "split")

    def __init__(self, allow_pickle: bool, careful: bool, split: dict[int, Any]) -> None:
        super().__init__(allow_pickle, careful)
        self.split = split
        self._is_split: list[bool] = []  # of the value that is visited, and those around it

    def visit(self, value: Any) -> Tree:
        self._is_split.append(id(value) in self.split)
        tree = super().visit(value)
        self._is_split.pop()
        return tree

    def joined(self, tree: Tree, trees: tuple[Tree, ...], join: Callable[[list[Any]], Any] | None = None) -> Tree:
        return tree if self._is_split[-1] else super().joined(tree, trees, join)


# --- The objects of a target: where they stand, and how they are set -------------------------------------------------


Setting = Callable[[], None]
_ABSENT = (LookupError, TypeError, AttributeError, StopIteration)  # raised where a target has no such entry


def plan_settings(
    target: Any,
    names: Sequence[Path],
    values: Sequence[Any],
    present: set[Path],
    strict: bool,
    differences: list[str],
    *,
    may_lack: bool = False,
) -> list[Setting]:
    """Returns the functions that set the values, to be called later, and adds what can't be set to `differences`.

    `may_lack`: the target need not have all that is stored.
    """
    settings: list[Setting] = []
    for name, value in zip(names, values, strict=True):
        if name not in present:
            if strict and not may_lack and not is_optional(name):
                differences.append(f"{render_path(name)}: an object is stored, but there is none in out")
            continue
        setting, current = _setting(target, name, value)
        if setting is not None:
            settings.append(setting)
        elif not _equal(current, value):
            differences.append(
                f"{render_path(name)}: {value!r:.80} is stored, but the object there can't be set in place"
            )
    if strict:
        extra = sorted((name for name in present - set(names) if not is_optional(name)), key=repr)
        differences += [f"{render_path(name)}: an object in out, but none is stored" for name in extra]
    return settings


def choose_objects(target: Any, names: Sequence[Path], stored: Mapping[Path, Any], differences: list[str]) -> list[Any]:
    """Chooses the value for each name: the stored one, or where there is none the target's own."""
    chosen: list[Any] = []
    for name in names:
        try:
            chosen.append(stored[name] if name in stored else _value_at(target, name))
        except _ABSENT:
            differences.append(f"{render_path(name)}: not stored, and can't be taken from like")
    return chosen


def entries_at(target: Any, names: Iterable[Path]) -> dict[int, Any]:
    """Returns what a target has at these names, by ids, which stay theirs while it is kept."""
    found: dict[int, Any] = {}
    for name in names:
        with suppress(*_ABSENT):
            value = _value_at(target, name)
            found[id(value)] = value
    return found


def _value_at(target: Any, name: Path) -> Any:
    for step in name:
        target = _entry(target, step)
    return _unboxed(target)


def _unboxed(current: Any) -> Any:
    fields = _compat.other_fields(current)
    if fields is not None and "data" in fields:
        return fields["data"]
    members = getattr(current, "tensordicts", None)
    return current if members is None else list(map(_unboxed, members))


def is_optional(name: Path) -> bool:
    """Attributes of an OrderedDict, like the versions in a state_dict: a target may lack them, or have its own."""
    return "__dict__" in name


def _setting(target: Any, name: Path, value: Any) -> tuple[Setting | None, Any]:
    """Returns what sets `value` at `name`, and what is there now. None where its holder can't be changed."""
    if not name:
        return _boxed(target, value), target
    above = target
    for step in name[:-1]:
        above = _entry(above, step)
    holder = _holder(above, name[-1])
    if isinstance(holder, (dict, list, deque)):
        key: Any = _key(holder, name[-1]) if isinstance(holder, dict) else name[-1]
        current = holder[key]
        if _compat.is_tensorclass_object(current) or hasattr(current, "tensordicts"):
            return _boxed(current, value), current
        return lambda: holder.__setitem__(key, value), current
    return None, _entry(above, name[-1])


def _holder(container: Any, name: str | int) -> Any:
    """Returns the dict or sequence that has the entry `name` of a container."""
    parameters = _compat.params_inner(container)
    if parameters is not None:
        return _holder(parameters, name)
    fields = _compat.other_fields(container)
    if fields is not None and _compat.is_non_tensor(fields):  # a NonTensorData; what it holds has no name of its own
        return _holder(fields["data"], name)
    if fields is not None:  # a tensorclass
        return fields if name in fields else _holder(_compat.inner_tensordict(container), name)
    if isinstance(container, dict):
        if name == "__dict__" and name not in container and hasattr(container, "__dict__"):
            return {"__dict__": vars(container)}
        return container
    if isinstance(container, UserDict):
        return container.data
    attributes = shown_attributes(container)
    if attributes is not None:
        return attributes
    return _compat.inner_tensordict(container, getattr(container, "tensordicts", container))


def _entry(container: Any, name: str | int) -> Any:
    holder = _holder(container, name)
    return holder[_key(holder, name) if isinstance(holder, dict) else name]


def _key(holder: dict[Any, Any], name: str | int) -> Any:
    """Returns the key that is called `name`: itself, or one that is no str or int and called by its repr."""
    if type(name) is str and name in holder:
        return name
    return next(key for key in holder if name_of(key) == name and isinstance(key, bool) == isinstance(name, bool))


def _boxed(current: Any, value: Any) -> Setting | None:
    """Returns what sets the value of a NonTensorData or MetaData, or those of a stack of them of as many members."""
    fields = _compat.other_fields(current)
    if fields is not None and "data" in fields:
        return lambda: fields.__setitem__("data", value)
    members = getattr(current, "tensordicts", None)
    if members is None or not isinstance(value, list) or len(members) != len(value):
        return None
    settings = [_boxed(member, entry) for member, entry in zip(members, value, strict=True)]
    if None in settings:
        return None

    def set_all() -> None:
        for setting in settings:
            if setting is not None:
                setting()

    return set_all


def _equal(current: Any, value: Any) -> bool:
    try:
        return type(current) is type(value) and bool(current == value)
    except Exception:  # numpy arrays, and what __eq__ raises for values of other types: then they differ
        return False
