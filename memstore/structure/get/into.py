"""get with out=: a stored value, copied into tensors that are there already.

All is compared before anything is written, and all differences are told at once; see matching.py. What could refuse a
write is looked for before the first one, too: after it only a device can fail. Into what is spread over ranks goes just
what this rank holds, straight from where it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memstore.sharding import NO_BOXES, Boxes
from memstore.structure.get.matching import match_target, raise_differences
from memstore.structure.get.parts import Checks
from memstore.structure.get.pieces import Piece, Sources
from memstore.structure.get.storage import tensors_of
from memstore.structure.get.target_objects import Setting, plan_settings
from memstore.structure.get.target_overlaps import disagreements
from memstore.structure.objects import decode_objects
from memstore.structure.plans import Memory, Plan
from memstore.structure.refusals import render_path
from memstore.structure.tensors import copy_all


def get_into(
    plan: Plan,
    encoded: bytes,
    memory: Memory,
    out: Any,
    *,
    boxes: Boxes = NO_BOXES,
    checks: Checks | None = None,
    need: Callable[[Sequence[torch.Tensor]], None] | None = None,
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
    values = decode_objects(encoded, plan.object_count, allow_pickle)
    found = match_target(plan, out, "out", strict, cast)
    match, targets, differences = found.match, found.tensors, found.differences
    with torch.inference_mode(False):
        sources = Sources(plan, memory, boxes, tensors_of(plan, memory, None), need)
    for have, want in match.exact:
        target, source = targets[want], sources.whole(have, checks)
        alike = target.shape == source.shape and target.dtype == source.dtype and want not in found.missing
        if alike and not torch.equal(target.cpu(), source):
            name = render_path(match.tensor_names[want])
            differences.append(f"{name}: the lengths of the stored nested tensor are others")
    settings: list[Setting] = []
    if values or match.object_names:
        present = set(match.object_names)
        settings = plan_settings(
            out, plan.object_names, values, present, strict, differences, may_lack=bool(found.sharded)
        )
    pieces: list[Piece] = []
    if not differences:  # those that overlap can be compared then
        pieces = sources.pieces(found, checks)
        sources.bring(pieces)
        differences = disagreements(plan, found, pieces)
    raise_differences(differences, "out", out)
    copy_all(
        [piece.target for piece in pieces],
        [piece.source for piece in pieces],
        one_by_one=bool(match.resolved or found.sharded),
        non_blocking=non_blocking,
    )
    for setting in settings:
        setting()
    if count is not None and (boxes or found.sharded):
        count(sources.nbytes(found, pieces))
    return out
