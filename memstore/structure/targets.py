"""Targets: a stored value is copied into tensors that are there (get with out=), or into new ones like them (like=).

1. `match_target` matches stored leaves with the target's by name, so a stored dict fits an OrderedDict or a TensorDict
   with the same keys. Two structures are matched once: the next get into a target of the same structure takes the match
   from a cache.
2. All is compared before anything is written, and all differences are told at once. What could refuse a write is looked
   for before the first one, too: after it only a device can fail.
3. Into what is spread over ranks goes just what this rank holds, straight from where it is stored.
"""

from __future__ import annotations

from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from memstore import _compat
from memstore._wording import an, listed
from memstore.engine import Leaf, Path
from memstore.errors import StructureMismatchError
from memstore.sharding import NO_BOXES, Boxes, Shard, ShardedLeaf, StoredBox, allocate_like, copies, sharded_leaf, whole
from memstore.structure import traits
from memstore.structure.classes import shown_attributes
from memstore.structure.flattening import HeldShards, ShardWalk, check_held
from memstore.structure.memory import (
    EXPANDED,
    GONE,
    ByteRange,
    Footprints,
    Memory,
    clusters_of,
    copy_all,
    locate_tensors,
    overlapping,
    which_would_stay,
    why_not_filled,
)
from memstore.structure.objects import decode_objects
from memstore.structure.plans import Plan
from memstore.structure.rebuilding import Checks, assemble_one, box_tensor, boxes_of_leaf, parts_of, tensors_of
from memstore.structure.refusals import MalformedError, RefusedError, render_path
from memstore.structure.tree import Node, ObjectNode, TensorNode, Tree, TreeParts, compile_tree, name_of, names_of
from memstore.structure.walk import Facts, take_apart

# --- The match -------------------------------------------------------------------------------------------------------


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
        traits, strides: of new tensors like the target's; no traits: all are plain tensors on the CPU.
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
        "strides",
        "tensor_names",
        "traits",
    )

    def __init__(
        self, plan: Plan, tree: Tree, facts: Facts, sharded: dict[int, HeldShards], what: str, strict: bool, cast: bool
    ) -> None:
        self.root, reader = compile_tree(tree)
        self.tensor_names, self.object_names = names_of(self.root)
        self.resolved = frozenset(i for i, resolve in enumerate(facts.resolve or ()) if resolve)
        self.apart: list[int] | None = None
        self.traits = facts.traits
        self.strides = [
            traits.contiguous_stride(shape) if traits.repeats_or_has_gaps(shape, stride) else stride
            for shape, stride in zip(facts.shapes, facts.strides, strict=True)
        ]
        self.footprints = Footprints(facts.dtypes, facts.shapes, facts.strides)
        self.split = list(_containers(plan.root, (), set(self.object_names))) if self.object_names else []
        self.differences: list[str] = []
        stored = [leaf.name for leaf in plan.leaves]
        for names in (stored, self.tensor_names, plan.object_names, self.object_names):
            # the keys 1.0 and "1.0" make one name
            twice = [name for name, count in Counter(names).items() if count > 1]
            self.differences += [f"{render_path(name)}: two leaves have this name" for name in twice]
        may_lack = bool(sharded)  # other ranks may hold what the target lacks
        if strict:
            self._compare_names("a tensor", what, stored, self.tensor_names, may_lack)
        wanted = {name: i for i, name in enumerate(self.tensor_names)}
        pairs = [(i, wanted[name]) for i, name in enumerate(stored) if name in wanted]
        for have, want in pairs:
            problem = _why_not_copied(plan.leaves[have], _target_tensor(facts, want, sharded.get(want)), what, cast)
            if problem:
                self.differences.append(f"{render_path(self.tensor_names[want])}: {problem}")
        self.exact = [(have, want) for have, want in pairs if what == "out" and want in reader.exact]
        self.pairs = [pair for pair in pairs if pair not in self.exact]
        if strict:
            have_names, want_names = (  # attributes of an OrderedDict: a target may lack them, or have its own
                [name for name in names if "__dict__" not in name] for names in (plan.object_names, self.object_names)
            )
            self._compare_names("an object", what, have_names, want_names, may_lack)

    def _compare_names(
        self, noun: str, what: str, stored: Sequence[Path], wanted: Sequence[Path], may_lack: bool
    ) -> None:
        have, want = set(stored), set(wanted)
        missing = [] if may_lack else [name for name in stored if name not in want]
        self.differences += [f"{render_path(name)}: {noun} is stored, but there is none in {what}" for name in missing]
        extra = [name for name in wanted if name not in have]
        self.differences += [f"{render_path(name)}: {noun} in {what}, but none is stored" for name in extra]


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


def _target_tensor(facts: Facts, want: int, sharded: HeldShards | None) -> _TargetTensor:
    if sharded is None:
        shape = tuple(facts.shapes[want])
        return _TargetTensor(shape, facts.dtypes[want], ((shape, facts.strides[want]),))
    leaf = sharded.leaf
    return _TargetTensor(leaf.shape, leaf.dtype, tuple((one.local.shape, one.local.stride()) for one in leaf.shards))


def _why_not_copied(stored: Leaf, target: _TargetTensor, what: str, cast: bool) -> str | None:
    source, dtype = traits.DTYPES[stored.dtype], target.dtype
    if target.shape != stored.shape:
        return f"stored with shape {list(stored.shape)}, here {list(target.shape)}"
    if what == "like":
        if source.is_complex and not dtype.is_complex:
            return f"stored complex, here {dtype}"
        alike = dtype == source or traits.WITHOUT_COPY.isdisjoint((dtype, source))
        return None if alike else f"{source} can't become {dtype}"
    if dtype != source and not (cast and can_cast(source, dtype)):
        advice = "; cast=True casts it" if can_cast(source, dtype) else ""
        return f"stored as torch.{stored.dtype}, here {dtype}{advice}"
    return EXPANDED if any(traits.overlaps_itself(shape, stride) for shape, stride in target.held) else None


def can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Returns whether cast=True fills a tensor of `target` with elements of `source`: both are floating dtypes."""
    return source.is_floating_point and target.is_floating_point and _UNCAST.isdisjoint((source, target))


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
    sharded: dict[int, HeldShards]


def match_target(plan: Plan, value: Any, what: str, strict: bool, cast: bool = False) -> MatchedTarget:
    match, walk, addresses = _match(plan, value, what, strict, cast, {})
    if match.split:
        match, walk, addresses = _match(plan, value, what, strict, cast, entries_at(value, match.split))
    met = {want for _, want in (*match.pairs, *match.exact)}
    missing = frozenset(match.footprints.missing(locate_tensors(walk.tensors, addresses)))
    differences = [
        f"{render_path(match.tensor_names[i])}: {GONE}"
        for i in sorted(missing)
        if (i in met) == (what == "out")  # of a template that is met only the look matters
    ]
    return MatchedTarget(match, walk.tensors, addresses, missing, match.differences + differences, walk.sharded)


def _match(
    plan: Plan, value: Any, what: str, strict: bool, cast: bool, split: dict[int, Any]
) -> tuple[StructureMatch, TargetWalk, list[int]]:
    """Walks over the target, and matches it; in a cache, by all that a match depends on.

    Args:
        split: containers of the target in which no tensor lies, which are matched entry by entry, by their ids.
    """

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
        try:
            match = StructureMatch(plan, tree, facts, walk.sharded, what, strict, cast)
        except MalformedError as error:
            raise StructureMismatchError(f"{what}: {error}") from None
        if len(_matches) >= _CACHED_MATCHES:
            _matches.clear()
        _matches[key] = match
    return match, walk, addresses


def _key_of(sharded: dict[int, HeldShards]) -> tuple[Any, ...]:
    """Returns the part of a match's key that says how the target's tensors are cut.

    Of a tensor with one shard the facts have its shape and strides.
    """
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
        is_strict = any("there is none in" in one or "but none is stored" in one for one in differences)
        fills = (
            "fills what both have" if what == "out" else "takes from like what only like has, and leaves out the rest"
        )
        hint = f"; strict=False {fills}" if is_strict else ""
        raise StructureMismatchError(
            f"{what} differs from the stored value, nothing was written{hint}:{listed(differences)}"
        )


# --- The walk over a target: its tensors stay as they are, its objects are left out ----------------------------------


class TargetWalk(ShardWalk):
    """The walk over a target. Beside each leaf that is spread over ranks stands its value."""

    __slots__ = ()

    def take_shards(self, value: Any, leaf: ShardedLeaf) -> Tree:
        check_held(leaf)
        for why in [why_not_filled(local) for _, local in leaf.shards] if self.in_place else ():
            if why is not None and why != EXPANDED:  # of this a match tells, which looks at strides
                raise RefusedError(why)
        return self.append(value, leaf)

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


_ABSENT = (LookupError, TypeError, AttributeError, StopIteration)  # raised where a target has no such entry


class Setting(NamedTuple):
    """A value to be set in the dict or sequence that holds it, once all is compared."""

    holder: Any
    key: Any
    value: Any


def plan_settings(
    target: Any, match: StructureMatch, names: Sequence[Path], values: Sequence[Any], differences: list[str]
) -> list[Setting]:
    """Says what is to be set in a target that has some of these names, and adds what can't be set to `differences`."""
    settings: list[Setting] = []
    present = set(match.object_names)
    for name, value in zip(names, values, strict=True):
        if name not in present:
            continue
        found, current = _settings(target, name, value)
        if found is not None:
            settings += found
        elif not _equal(current, value):
            differences.append(
                f"{render_path(name)}: {value!r:.80} is stored, but the object there can't be set in place"
            )
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


def _settings(target: Any, name: Path, value: Any) -> tuple[list[Setting] | None, Any]:
    """Returns what is to be set to have `value` at `name`, and what is there now. None: its holder can't be changed."""
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
        return [Setting(holder, key, value)], current
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


def _boxed(current: Any, value: Any) -> list[Setting] | None:
    """Returns what is to be set in a NonTensorData or MetaData, or in all members of a stack of them."""
    fields = _compat.other_fields(current)
    if fields is not None and "data" in fields:
        return [Setting(fields, "data", value)]
    members = getattr(current, "tensordicts", None)
    if members is None or not isinstance(value, list) or len(members) != len(value):
        return None
    settings: list[Setting] = []
    for member, entry in zip(members, value, strict=True):
        found = _boxed(member, entry)
        if found is None:
            return None
        settings += found
    return settings


def _equal(current: Any, value: Any) -> bool:
    try:
        return type(current) is type(value) and bool(current == value)
    except Exception:  # numpy arrays, and what __eq__ raises for values of other types: then they differ
        return False


Need = Callable[[Sequence[torch.Tensor]], None]

# --- out=: tensors that are there already ----------------------------------------------------------------------------


def get_into(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    out: Any,
    *,
    boxes: Boxes = NO_BOXES,
    checks: Checks | None = None,
    need: Need | None = None,
    count: Callable[[int], None] | None = None,
    strict: bool = True,
    cast: bool = False,
    allow_pickle: bool = False,
    non_blocking: bool = False,
) -> Any:
    """Fills `out` in place with the stored value, and returns it.

    Args:
        boxes: of the leaves that don't lie whole in `memory`.
        checks: compares what is read with its checksums, before anything is written.
        need: brings what tensors over `memory` have, if some of it lies on other hosts.
        count: is told how many bytes were read, of boxes or into shards.
        strict: each leaf must have a counterpart on the other side; where `out` has DTensors or the like, each leaf of
            `out`, for other ranks may hold others. False: leaves that have one are filled, and others are left alone.
        cast: leaves of another floating dtype are cast while they are copied. False: they are a difference.
        non_blocking: as in `Tensor.copy_`, for leaves of other devices.

    Raises:
        StructureMismatchError: with every difference; `out` is untouched.
    """
    # 1. Match, and collect all differences: nothing is written before all is compared.
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = match_target(plan, out, "out", strict, cast)
    match, differences = found.match, found.differences
    with torch.inference_mode(False):
        sources = StoredLeaves(plan, memory, boxes, checks, need)
    for have, want in match.exact:
        target, source = found.tensors[want], sources.whole(have)
        alike = target.shape == source.shape and target.dtype == source.dtype and want not in found.missing
        if alike and not torch.equal(target.cpu(), source):
            name = render_path(match.tensor_names[want])
            differences.append(f"{name}: the lengths of the stored nested tensor are others")
    settings = plan_settings(out, match, plan.object_names, values, differences)
    pieces: list[TargetPiece] = []
    if not differences:  # those that overlap can be compared then
        pieces = sources.pieces(found)
        sources.bring(pieces)
        differences = disagreements(plan, found, pieces)
    raise_differences(differences, "out", out)
    # 2. Write: from here on only a device can fail.
    _copy(pieces, one_by_one=bool(match.resolved or found.sharded), non_blocking=non_blocking)
    for holder, key, value in settings:
        holder[key] = value
    sources.count(found, pieces, count)
    return out


# --- like=: new memory, in the containers of a template --------------------------------------------------------------


def get_like(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    like: Any,
    *,
    boxes: Boxes = NO_BOXES,
    checks: Checks | None = None,
    need: Need | None = None,
    count: Callable[[int], None] | None = None,
    strict: bool = True,
    allow_pickle: bool = False,
    non_blocking: bool = False,
) -> Any:
    """Returns the stored value in new memory: in containers like those of `like`, with its devices, dtypes and strides.

    A DTensor or TensorShard becomes another one with the same placements, of which this rank's part alone is read.

    Args:
        boxes, checks, need, count: as in `get_into`.
        strict: each leaf must have a counterpart on the other side; where `like` has DTensors or the like, each leaf of
            `like`. False: tensors that only `like` has are copied, its other leaves are taken as they are, and stored
            leaves that `like` lacks are left out.
        non_blocking: as in `Tensor.copy_`, for leaves of other devices.

    Raises:
        StructureMismatchError: names or shapes differ; all differences are listed.
    """
    # 1. Match.
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = match_target(plan, like, "like", strict)
    match, differences = found.match, found.differences
    chosen = choose_objects(like, match.object_names, dict(zip(plan.object_names, values, strict=True)), differences)
    raise_differences(differences, "like", like)
    with torch.inference_mode(False), torch.no_grad():
        # 2. Allocate: a target like the template. What is not stored comes from the template.
        made = _allocate(found)
        sources = StoredLeaves(plan, memory, boxes, checks, need)
        pieces = sources.pieces(made)
        sources.bring(pieces)
        stored = {want for _, want in match.pairs}
        for want in range(len(made.tensors)):
            if want not in stored:
                own = copies(wanted_of(made, want), wanted_of(found, want)).pairs
                pieces += [TargetPiece(want, target, source) for target, source in own]
        # 3. Fill it, and put it into its containers.
        _copy(pieces, one_by_one=bool(match.resolved or found.sharded), non_blocking=non_blocking)
        sources.count(found, [piece for piece in pieces if piece.want in stored], count)
        values = [made.sharded[i].about if i in made.sharded else tensor for i, tensor in enumerate(made.tensors)]
        return match.root.build(TreeParts(values, chosen, None))


def _allocate(template: MatchedTarget) -> MatchedTarget:
    """Returns a match of new tensors, which are not filled yet. Those that are one tensor are one here, too."""
    made: dict[int, Any] = {}
    tensors: list[torch.Tensor] = []
    sharded: dict[int, HeldShards] = {}
    for want, tensor in enumerate(template.tensors):
        if want not in template.sharded:
            if id(tensor) not in made:
                stride, device = template.match.strides[want], tensor.device
                new = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=device)
                kinds = template.match.traits
                made[id(tensor)] = new if kinds is None else traits.with_traits(new, kinds[want])
            tensors.append(made[id(tensor)])
            continue
        value = template.sharded[want].about
        if id(value) not in made:
            new = allocate_like(value)
            leaf = sharded_leaf(new)
            assert leaf is not None, "no DTensor or the like was allocated"
            made[id(value)] = HeldShards(new, leaf)
        sharded[want] = made[id(value)]
        tensors.append(tensor)
    return template._replace(tensors=tensors, sharded=sharded)


# --- Pieces: parts of what is stored, and the places that they fill --------------------------------------------------


class TargetPiece(NamedTuple):
    """A part of what is stored, and its place.

    Attributes:
        want: the target's tensor that it is a part of.
        target, source: as many elements of both, of one shape.
    """

    want: int
    target: torch.Tensor
    source: torch.Tensor


def _copy(pieces: Sequence[TargetPiece], *, one_by_one: bool, non_blocking: bool) -> None:
    targets, sources = [piece.target for piece in pieces], [piece.source for piece in pieces]
    copy_all(targets, sources, one_by_one=one_by_one, non_blocking=non_blocking)


class StoredLeaves:
    """The stored leaves, to be copied from: whole or in boxes.

    Args:
        checks: compares what is read; None: nothing is compared.
        need: brings what tensors over `memory` have; None: all of it is there.
    """

    def __init__(self, plan: Plan, memory: Memory, boxes: Boxes, checks: Checks | None, need: Need | None) -> None:
        self._plan, self._memory, self._boxes, self._checks, self._need = plan, memory, boxes, checks, need
        self._tensors = tensors_of(plan, memory, None)  # as if all of them were whole

    def bring(self, pieces: Sequence[TargetPiece]) -> None:
        """Brings what these pieces have. Call it before they are read."""
        if self._need is not None:
            self._need([piece.source for piece in pieces])

    def whole(self, have: int) -> torch.Tensor:
        """Returns all of a leaf, checked; put together, if it lies in boxes."""
        stored = boxes_of_leaf(self._plan, self._boxes, have)
        self._compare(have, stored)
        if self._need is not None:
            self._need(self._parts(have, stored))
        if stored:
            assemble_one(self._plan.leaves[have], stored, self._memory)
        return self._tensors[have]

    def pieces(self, found: MatchedTarget) -> list[TargetPiece]:
        """Returns what fills the tensors of a target that a value was matched with, checked."""
        if not self._boxes and not found.sharded and self._checks is None:  # which most are, of hundreds of leaves
            return [TargetPiece(want, found.tensors[want], self._tensors[have]) for have, want in found.match.pairs]
        pieces: list[TargetPiece] = []
        for have, want in found.match.pairs:
            stored = boxes_of_leaf(self._plan, self._boxes, have)
            if not stored and want not in found.sharded:
                self._compare(have, ())
                pieces.append(TargetPiece(want, found.tensors[want], self._tensors[have]))
                continue
            wanted = wanted_of(found, want)
            if wanted:
                meeting = [one for one in stored if any(one.box.meet(shard.box) is not None for shard in wanted)]
                self._compare(have, meeting)
            parts = parts_of(self._plan, self._boxes, have, self._tensors[have], self._memory)
            pieces += [TargetPiece(want, target, source) for target, source in copies(wanted, parts).pairs]
        return pieces

    def _compare(self, have: int, stored: Sequence[StoredBox]) -> None:
        """Compares some boxes of a leaf with their checksums, or a leaf that lies whole."""
        if self._checks is None:
            return
        if self._need is not None:
            self._need(self._parts(have, stored))
        if stored:
            self._checks.compare_boxes(have, stored)
        elif not boxes_of_leaf(self._plan, self._boxes, have):
            self._checks.compare(have)

    def _parts(self, have: int, stored: Sequence[StoredBox]) -> list[torch.Tensor]:
        if not stored:
            return [self._tensors[have]]
        return [box_tensor(self._plan.leaves[have], one, self._memory) for one in stored]

    def count(self, found: MatchedTarget, pieces: Sequence[TargetPiece], count: Callable[[int], None] | None) -> None:
        """Tells `count` the bytes of those pieces that are read from boxes, or into shards."""
        if count is None or not (self._boxes or found.sharded):
            return
        in_boxes = {want for have, want in found.match.pairs if boxes_of_leaf(self._plan, self._boxes, have)}
        count(sum(one.source.nbytes for one in pieces if one.want in found.sharded or one.want in in_boxes))


def wanted_of(found: MatchedTarget, want: int) -> Sequence[Shard]:
    """Returns the parts of a target's tensor that this rank holds."""
    target = found.sharded.get(want)
    if target is not None:
        return target.leaf.shards
    tensor = found.tensors[want]
    return (Shard(whole(tensor.shape), tensor),)


# --- Targets that share memory, for which values are stored that can't stand there together --------------------------


def disagreements(plan: Plan, found: MatchedTarget, pieces: Sequence[TargetPiece]) -> list[str]:
    """Finds targets in shared memory for which other values are stored. An answer is kept for the next such target."""
    match = found.match
    if match.apart == found.addresses and not found.sharded:
        return []
    stored = {want: have for have, want in match.pairs}
    wants = list(stored)
    if not found.sharded and not overlapping([found.addresses[want] for want in wants], match.footprints.spans[wants]):
        match.apart = found.addresses
        return []
    on_devices: dict[torch.device, list[ByteRange]] = {}
    for one in _ranges(found, stored):
        on_devices.setdefault(found.tensors[one.leaf].device, []).append(one)
    differences: list[str] = []
    shared = False
    for ranges in on_devices.values():
        spans = np.array([one.stop - one.start for one in ranges], np.int64)
        for cluster in clusters_of([ranges[i] for i in overlapping([one.start for one in ranges], spans)]):
            # where the stored ones lie to each other as the targets do, both show the same bytes
            if len({_relation(plan, found, stored[one.leaf], one) for one in cluster}) > 1:
                shared = True
                wants = {one.leaf for one in cluster}
                differences += [
                    f"{render_path(match.tensor_names[want])}: it shares memory with another leaf of out, for which "
                    "other values are stored"
                    for want in _overwritten(cluster, [piece for piece in pieces if piece.want in wants])
                ]
    if not shared:
        match.apart = found.addresses
    return differences


def _ranges(found: MatchedTarget, wants: dict[int, int]) -> Iterator[ByteRange]:
    """Iterates over the memory of a target's tensors; of one in several storages, what it has of each."""
    spans = found.match.footprints.spans
    for want in wants:
        target = found.sharded.get(want)
        if target is None or len(target.leaf.shards) == 1:
            yield ByteRange(found.addresses[want], found.addresses[want] + int(spans[want]), want)
            continue
        storages: dict[int, ByteRange] = {}
        for one in target.leaf.shards:
            start, storage = one.local.data_ptr(), one.local.untyped_storage().data_ptr()
            stop = start + traits.reach(one.local.shape, one.local.stride()) * one.local.dtype.itemsize
            known = storages.get(storage, ByteRange(start, stop, want))
            storages[storage] = ByteRange(min(start, known.start), max(stop, known.stop), want)
        yield from storages.values()


def _relation(plan: Plan, found: MatchedTarget, have: int, one: ByteRange) -> tuple[Any, ...]:
    target = found.sharded.get(one.leaf)
    boxes = None if target is None else tuple(shard.box for shard in target.leaf.shards)
    stored, dtype = plan.leaves[have], found.tensors[one.leaf].dtype
    if dtype != traits.DTYPES[stored.dtype]:  # cast, so that distances in bytes say nothing
        return one.start, stored.offset, stored.dtype, dtype, boxes
    return one.start - stored.offset, boxes


def _overwritten(cluster: Sequence[ByteRange], pieces: Sequence[TargetPiece]) -> list[int]:
    """Returns the targets of a cluster that others would write over."""
    start, stop = cluster[0].start, max(one.stop for one in cluster)
    inside = [piece for piece in pieces if start <= piece.target.data_ptr() < stop]
    stay = which_would_stay([piece.target for piece in inside], [piece.source for piece in inside])
    return sorted({piece.want for piece, stays in zip(inside, stay, strict=True) if not stays})
