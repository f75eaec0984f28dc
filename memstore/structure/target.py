"""get with out= and like=: a stored value into memory that is there, or into new memory shaped like a template.

Stored leaves and the target's meet by name, so a stored dict fits an OrderedDict or a TensorDict with the same keys.
Everything is compared before anything is written, and all differences are told at once. What two structures have in
common is worked out once: the next get into a target of the same structure takes it from a cache.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from memstore.engine.record import Path
from memstore.errors import StructureMismatchError
from memstore.structure import objects, places, traits
from memstore.structure.extents import Extents
from memstore.structure.facts import Facts, take_apart
from memstore.structure.node import ObjectNode, Parts, TensorNode, Tree, walk_names
from memstore.structure.plan import Plan
from memstore.structure.planning import compile_tree
from memstore.structure.storage import Memory, tensors_of
from memstore.structure.walk import RefusedError, Walk, render_path

_LISTED = 20  # differences in one message
_CACHED_MEETINGS = 64


class _TargetWalk(Walk):
    """Takes a target apart: its tensors as they are, so that they can be written; its objects not at all."""

    __slots__ = ()

    def _written(self, value: Any) -> Any:
        return None


class _Meeting:
    """What a stored structure and a target's have in common, and how they differ.

    Attributes:
        pairs: (stored leaf, target's tensor) of one name.
        exact: those of them whose contents must be equal already: the lengths of nested tensors.
        extents: of the target's tensors.
    """

    __slots__ = ("differences", "exact", "extents", "object_names", "pairs", "root", "tensor_names")

    def __init__(self, plan: Plan, tree: Tree, facts: Facts, what: str, strict: bool) -> None:
        self.root, reader = compile_tree(tree)
        self.extents = Extents(facts.dtypes, facts.shapes, facts.strides)
        self.tensor_names: list[Path] = []
        self.object_names: list[Path] = []
        for name, node in walk_names(self.root):
            if isinstance(node, TensorNode):
                self.tensor_names.append(name)
            elif isinstance(node, ObjectNode):
                self.object_names.append(name)
        self.differences: list[str] = []
        self.pairs: list[tuple[int, int]] = []
        self._match(plan, what, strict)
        compare = _why_not_filled if what == "out" else _why_not_made
        for have, want in self.pairs:
            problem = compare(plan, have, facts, want)
            if problem:
                self.differences.append(f"{render_path(self.tensor_names[want])}: {problem}")
        self.exact = [(have, want) for have, want in self.pairs if what == "out" and want in reader.exact]
        self.pairs = [pair for pair in self.pairs if pair not in self.exact]
        if what == "like" and strict:
            self._match_objects(plan)

    def _match(self, plan: Plan, what: str, strict: bool) -> None:
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
            elif strict:
                self.differences.append(f"{render_path(name)}: a tensor is stored, but there is none in {what}")
        if strict:
            self.differences += [f"{render_path(name)}: a tensor in {what}, but none is stored" for name in wanted]

    def _match_objects(self, plan: Plan) -> None:
        have, want = (
            {name for name in names if not places.is_optional(name)} for names in (plan.object_names, self.object_names)
        )
        for names, text in (
            (have - want, "an object is stored, but there is none in like"),
            (want - have, "an object in like, but none is stored"),
        ):
            self.differences += [f"{render_path(name)}: {text}" for name in sorted(names, key=repr)]


def _why_not_filled(plan: Plan, have: int, facts: Facts, want: int) -> str | None:
    stored, shape, dtype = plan.leaves[have], facts.shapes[want], facts.dtypes[want]
    if tuple(shape) != stored.shape:
        return f"stored with shape {list(stored.shape)}, here {list(shape)}"
    if dtype != traits.DTYPES[stored.dtype]:
        return f"stored as torch.{stored.dtype}, here {dtype}"
    if traits.reach(shape, facts.strides[want]) < traits.count(shape):
        return "an expanded tensor, several of whose elements are one in memory, can't be filled"
    return None


def _why_not_made(plan: Plan, have: int, facts: Facts, want: int) -> str | None:
    stored, shape, dtype = plan.leaves[have], facts.shapes[want], facts.dtypes[want]
    source = traits.DTYPES[stored.dtype]
    if tuple(shape) != stored.shape:
        return f"stored with shape {list(stored.shape)}, here {list(shape)}"
    if source.is_complex and not dtype.is_complex:
        return f"stored complex, here {dtype}"
    if dtype != source and not traits.WITHOUT_COPY.isdisjoint((dtype, source)):
        return f"{source} can't become {dtype}"
    return None


_meetings: dict[Any, _Meeting] = {}


def _meet(plan: Plan, value: Any, what: str, strict: bool) -> tuple[_Meeting, list[torch.Tensor], list[str]]:
    """Also returns the target's tensors, and all differences: the meeting's, and tensors whose memory is gone."""

    def walk_with(careful: bool) -> _TargetWalk:
        walk = _TargetWalk(allow_pickle=True, careful=careful)
        walk.in_place = what == "out"
        return walk

    try:
        tree, walk, facts, addresses = take_apart(value, walk_with)
    except RefusedError as error:
        raise StructureMismatchError(f"{what}: {error.message()}") from None
    key = (plan, tree, facts, what, strict)
    meeting = _meetings.get(key)
    if meeting is None:
        meeting = _Meeting(plan, tree, facts, what, strict)
        if len(_meetings) >= _CACHED_MEETINGS:
            _meetings.clear()
        _meetings[key] = meeting
    met = {want for _, want in (*meeting.pairs, *meeting.exact)}
    differences = [
        f"{render_path(meeting.tensor_names[i])}: a tensor whose storage was freed or cut: its bytes aren't there"
        for i in meeting.extents.missing(walk.tensors, addresses)
        if (i in met) == (what == "out")  # of a template that is met only the look matters
    ]
    return meeting, walk.tensors, meeting.differences + differences


def get_into(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    out: Any,
    *,
    strict: bool = True,
    allow_pickle: bool = False,
    non_blocking: bool = False,
) -> Any:
    """Fills `out` in place with the stored value, and returns it.

    Args:
        strict: all leaves of both must meet. False: those that do are filled, the others left alone.
        non_blocking: as in `Tensor.copy_`, for leaves of other devices.

    Raises:
        StructureMismatchError: with every difference; `out` is untouched.
    """
    values = objects.decode(encoded, plan.object_count, allow_pickle)
    meeting, targets, differences = _meet(plan, out, "out", strict)
    sources = tensors_of(plan, memory, None)
    for have, want in meeting.exact:
        if sources[have].shape == targets[want].shape and not torch.equal(targets[want].cpu(), sources[have]):
            name = render_path(meeting.tensor_names[want])
            differences.append(f"{name}: the lengths of the stored nested tensor are others")
    settings: list[places.Setting] = []
    if values or meeting.object_names:
        present = set(meeting.object_names)
        settings = places.find(out, plan.object_names, values, present, strict, differences)
    _raise(differences, "out")
    pairs = meeting.pairs
    _copy_all([targets[want] for _, want in pairs], [sources[have] for have, _ in pairs], non_blocking)
    for setting in settings:
        setting()
    return out


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
    if not targets:
        return
    targets, sources = list(map(traits.copyable, targets)), list(map(traits.copyable, sources))
    with torch.no_grad():
        if any(target.is_inference() for target in targets):
            for target, source in zip(targets, sources, strict=True):
                with torch.inference_mode(target.is_inference()):
                    target.copy_(source, non_blocking=non_blocking)
        else:
            # a third of the time of 300 calls
            torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def get_like(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    like: Any,
    *,
    strict: bool = True,
    allow_pickle: bool = False,
    non_blocking: bool = False,
) -> Any:
    """The stored value in new memory, in the containers of `like`, with the devices, dtypes and strides of its leaves.

    Args:
        strict: all leaves of both must meet. False: tensors that only `like` has are copied from it, its other leaves
            are taken as they are, and stored leaves that `like` lacks are left out.
        non_blocking: as in `Tensor.copy_`, for leaves of other devices.

    Raises:
        StructureMismatchError: names or shapes differ; all differences are listed.
    """
    values = objects.decode(encoded, plan.object_count, allow_pickle)
    meeting, templates, differences = _meet(plan, like, "like", strict)
    chosen = places.choose(like, meeting.object_names, dict(zip(plan.object_names, values, strict=True)), differences)
    _raise(differences, "like")
    stored = tensors_of(plan, memory, None)
    sources = list(templates)
    for have, want in meeting.pairs:
        sources[want] = stored[have]
    with torch.inference_mode(False), torch.no_grad():
        made = _allocate(templates, sources, non_blocking)
        return meeting.root.build(Parts(made, chosen, None))


def _allocate(
    templates: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool
) -> list[torch.Tensor]:
    made: dict[int, torch.Tensor] = {}
    for template, source in zip(templates, sources, strict=True):
        if id(template) not in made:
            stride = template.stride()
            if traits.reach(template.shape, stride) != template.numel():
                stride = traits.contiguous_stride(template.shape)
            tensor = torch.empty_strided(template.shape, stride, dtype=template.dtype, device=template.device)
            traits.copyable(tensor).copy_(traits.copyable(source), non_blocking=non_blocking)
            made[id(template)] = traits.with_traits(tensor, traits.traits_of(template))
    return [made[id(template)] for template in templates]


def _raise(differences: Sequence[str], what: str) -> None:
    if differences:
        more = f"\n  and {len(differences) - _LISTED} more" if len(differences) > _LISTED else ""
        lines = "".join(f"\n  {difference}" for difference in differences[:_LISTED])
        raise StructureMismatchError(f"{what} differs from the stored value, nothing was written:{lines}{more}")
