"""What a stored value and a target have in common, for get with out= and like=; and all the ways in which they differ.

Stored leaves are matched with the target's by name, so a stored dict fits an OrderedDict or a TensorDict with the same
keys. Two structures are matched once: the next get into a target of the same structure takes the match from a cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from memstore.engine import Path
from memstore.errors import StructureMismatchError
from memstore.structure.get.target_objects import entries_at, is_optional
from memstore.structure.get.target_walk import ShardedTarget, SplittingWalk, TargetWalk
from memstore.structure.plans import Plan
from memstore.structure.refusals import RefusedError, render_path
from memstore.structure.tensors import EXPANDED, GONE, Footprints, locate_tensors, traits, why_no_memory
from memstore.structure.tree import Node, ObjectNode, TensorNode, Tree, compile_tree, walk_names
from memstore.structure.walk import Facts, take_apart
from memstore.wording import an

_LISTED = 20  # differences in one message
_CACHED_MATCHES = 64
_UNCAST = traits.WITHOUT_COPY | {getattr(torch, "float4_e2m1fn_x2", None)}  # torch has no kernel that casts them


class Match:
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
            problem = compare(plan, have, _look_of(facts, want, sharded.get(want)), cast)
            if problem:
                self.differences.append(f"{render_path(self.tensor_names[want])}: {problem}")
        self.exact = [(have, want) for have, want in self.pairs if what == "out" and want in reader.exact]
        self.pairs = [pair for pair in self.pairs if pair not in self.exact]
        if what == "like" and strict:
            self._match_objects(plan, leaves_may_lack=bool(sharded))

    def _match(self, plan: Plan, what: str, strict: bool, leaves_may_lack: bool) -> None:
        """`leaves_may_lack`: what is stored may lack in a target of this rank, since others may hold it."""
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
    """The containers that stand where these objects do, and those inside of them."""
    if not isinstance(node, (TensorNode, ObjectNode)):
        inside = inside or name in objects
        if inside:
            yield name
        for step, child in node.children():
            yield from _containers(child, name + step, objects, inside)


class _Look(NamedTuple):
    """What a target has to have in common with what is stored. `held`: shape and strides of what this rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[tuple[Sequence[int], Sequence[int]], ...]


def _look_of(facts: Facts, want: int, sharded: ShardedTarget | None) -> _Look:
    if sharded is None:
        shape = tuple(facts.shapes[want])
        return _Look(shape, facts.dtypes[want], ((shape, facts.strides[want]),))
    leaf = sharded.leaf
    return _Look(leaf.shape, leaf.dtype, tuple((one.local.shape, one.local.stride()) for one in leaf.shards))


def _why_not_fillable(plan: Plan, have: int, target: _Look, cast: bool) -> str | None:
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
    """Whether a get with cast=True fills a tensor of `target` with elements of `source`: both are floating dtypes."""
    if not (source.is_floating_point and target.is_floating_point):
        return False
    return _UNCAST.isdisjoint((source, target))


def _why_not_convertible(plan: Plan, have: int, target: _Look, _: bool) -> str | None:
    stored, dtype = plan.leaves[have], target.dtype
    source = traits.DTYPES[stored.dtype]
    if target.shape != stored.shape:
        return f"stored with shape {list(stored.shape)}, here {list(target.shape)}"
    if source.is_complex and not dtype.is_complex:
        return f"stored complex, here {dtype}"
    if dtype != source and not traits.WITHOUT_COPY.isdisjoint((dtype, source)):
        return f"{source} can't become {dtype}"
    return None


_matches: dict[Any, Match] = {}


class MatchedTarget(NamedTuple):
    """A target, matched with a stored value.

    Attributes:
        missing: its tensors whose memory is gone.
        differences: those of the match, and the missing tensors.
        sharded: those of its tensors that are spread over ranks.
    """

    match: Match
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
) -> tuple[Match, TargetWalk, list[int]]:
    """Args: split: containers that stay containers, by their ids, though no tensor lies in them."""

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
        match = Match(plan, tree, facts, walk.sharded, what, strict, cast)
        if len(_matches) >= _CACHED_MATCHES:
            _matches.clear()
        _matches[key] = match
    return match, walk, addresses


def _key_of(sharded: dict[int, ShardedTarget]) -> tuple[Any, ...]:
    """What of them matters to a match beside the facts of their only shards."""
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
