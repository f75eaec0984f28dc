"""What all ranks do before one of them writes: steps 1 to 3 of a take, as taking.py has them.

Rank 0 looks that there is no snapshot, makes the folder, and claims its plain names if nobody has. The state dicts are
asked for. Then each rank knows what it writes. An error leaves nothing behind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch

from memstore import modes
from memstore.errors import MemstoreError
from memstore.snapshot.format import StoredValue, check_length
from memstore.snapshot.options import Options
from memstore.snapshot.parts import Part, Take
from memstore.snapshot.ranks import Ranks, ask
from memstore.snapshot.stateful import AppState
from memstore.snapshot.storage import FileStorage
from memstore.snapshot.take.abandoning import abandon
from memstore.snapshot.take.drafts import FileDraft, draft, offers_of, own_bytes
from memstore.snapshot.take.opening import Opening, naming_of, open_take
from memstore.snapshot.take.partition import Offer, lone_replicas, partition
from memstore.snapshot.take.replicated import matches
from memstore.snapshot.take.state import HeldTensor, State, StateWalker


class Prepared(NamedTuple):
    """What a rank is about to write."""

    ranks: Ranks
    storage: FileStorage
    part: Part
    files: list[FileDraft]

    @property
    def nbytes(self) -> int:
        """Of the files."""
        return sum(file.size for file in self.files)


def prepare(path: Any, app_state: Any, group: Any, options: Options) -> Prepared:
    """All but the writing: afterwards every rank knows what it writes."""
    ranks = Ranks(group, options.timeout)
    begun: list[Take] = []  # rank 0's
    may_write: list[bool] = []  # once it is not empty, other ranks may be writing
    try:
        said = ranks.together(lambda: open_take(ranks, path, app_state, options, begun))
        opening = [msgspec.msgpack.decode(text, type=Opening) for text in said]
        with modes.put_aside():
            return _prepare(ranks, opening, app_state, options, may_write)
    except BaseException as error:
        ranks.leave(error)
        for take in begun:
            abandon(FileStorage(take.path), take, [], ranks.rank, all_ended=ranks.all_know or not may_write)
        raise


def _prepare(
    ranks: Ranks, opening: list[Opening], app_state: AppState, options: Options, may_write: list[bool]
) -> Prepared:
    take = opening[0].take
    if take is None:
        raise MemstoreError("rank 0 of the process group said nothing of the snapshot")
    storages: list[FileStorage] = []
    tensors: list[HeldTensor] = []
    states: list[State] = []
    shared: set[str] = set()
    dicts = ask(ranks, {key for said in opening for key in said.keys}, app_state)
    globs = set.intersection(*(set(said.replicated) for said in opening))

    def walk() -> bytes:
        storages.append(FileStorage(take.path))
        walker = StateWalker(allow_pickle=options.allow_pickle)
        # modules first: a tensor has the name of its first leaf, and a dict may hold a model's tensors, too
        found = sorted(dicts.items(), key=lambda item: not isinstance(app_state[item[0]], torch.nn.Module))
        states.extend(walker.add(key, value) for key, value in found)
        tensors.extend(walker.tensors)
        values = [StoredValue(*state) for state in states]
        check_length(sum(value.manifest_bytes for value in values) + sum(len(one.path) for one in tensors), values)
        alike = globs if ranks.size > 1 else ()
        shared.update(one.path for one in tensors if one.is_sharded or matches(one.path, alike, ranks.rank))
        return msgspec.msgpack.encode((own_bytes(tensors, shared), offers_of(tensors, shared)))

    found = [msgspec.msgpack.decode(text, type=tuple[int, list[Offer]]) for text in ranks.together(walk)]
    may_write.append(True)
    alone = lone_replicas([mine for _, mine in found])
    shared -= alone
    try:
        shares = partition(
            [nbytes for nbytes, _ in found], [[offer for offer in mine if offer.path not in alone] for _, mine in found]
        )
    except MemstoreError:
        ranks.all_know = True  # each computes the same
        raise
    part, files = draft(take, ranks.rank, states, tensors, shared, shares, naming_of(opening))
    return Prepared(ranks, storages[0], part, files)
