"""How a snapshot is taken. Every rank runs these steps; one that fails anywhere fails on all of them.

    1. rank 0 looks that there is no snapshot, makes the folder, and claims its plain names if nobody has
    2. the state dicts are asked for, one name after the other on all ranks, since they may have collectives inside
    3. the ranks tell each other which tensors they share; each computes who writes what
    4. each writes its files, straight from the tensors' memory
    5. rank 0 collects the parts and publishes the snapshot: parts.py says in which steps

A rank that dies in 1 to 4 leaves files that no manifest names: there is no snapshot. The next take to the same path
chooses other names, and removes them once its own manifest is there. When a rank is lost in 5, rank 0 has published the
snapshot and returns it; the others look, and where there is none yet, they can't know. An error removes what the take
has written, if every rank knows of it, or this one has not told the others yet that its files are there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import torch

from memstore import modes
from memstore.errors import UnknownOutcomeError
from memstore.info import Progress
from memstore.snapshot.format import MANIFEST, Manifest, read_manifest
from memstore.snapshot.parts import Part, Take, publish, with_sums
from memstore.snapshot.progress import Meter
from memstore.snapshot.storage import FilePart, FileStorage, LateBytes
from memstore.snapshot.take.abandoning import abandon, published
from memstore.snapshot.take.drafts import FileDraft, Piece
from memstore.snapshot.take.preparing import Prepared
from memstore.snapshot.tensor_bytes import bytes_of


def take(prepared: Prepared, progress: Progress | bool | None) -> Manifest:
    """Steps 4 and 5, for a take that is prepared. Returns the snapshot's manifest."""
    ranks, storage, files = prepared.ranks, prepared.storage, prepared.files
    take = prepared.part.take
    written: list[str] = []
    handed_over: list[bool] = []
    try:
        meter = Meter(progress, prepared.nbytes, "writing", rank=ranks.rank)

        def write() -> bytes:
            sums: dict[str, bytes] = {}
            for file in files:
                sums[file.name] = _write(storage, file, take, meter)
                written.append(file.name)
            meter.finish()
            handed_over.append(True)
            return msgspec.msgpack.encode(with_sums(prepared.part, sums))

        parts = ranks.together(write)

        def finish() -> bytes:
            return publish(storage, [msgspec.msgpack.decode(part, type=Part) for part in parts])

        text = ranks.at_first(finish)
        ranks.end()
        return read_manifest(take.path, text)
    except BaseException as error:
        ranks.leave(error)
        if ranks.lost and handed_over:
            found = published(storage, take)
            if found is not None:
                return found
            if ranks.rank:
                raise UnknownOutcomeError(
                    f"{error}. Whether rank 0 has published the snapshot is not known: {take.path}/{MANIFEST} is there "
                    "if it has"
                ) from error
        # A rank that has lost the others after step 4 doesn't know whether rank 0 is publishing its files just now.
        if ranks.rank == 0 or not handed_over or ranks.all_know:
            abandon(storage, take, written, ranks.rank, all_ended=ranks.all_know)
        raise


def _write(storage: FileStorage, file: FileDraft, take: Take, meter: Meter) -> bytes:
    parts = [FilePart(0, file.header)]
    at = len(file.header)
    for device in {piece.elements.device for piece in file.pieces if piece.elements.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # the writing threads have streams of their own
    with modes.put_aside():
        for piece in file.pieces:
            parts.append(FilePart(at, _memory(piece)))
            at += piece.nbytes
    return storage.write(file.name, file.size, parts, durable=take.durable, checksum=take.checksum, done=meter.done)


def _memory(piece: Piece) -> Any:
    """The elements' own memory; what lies otherwise is copied when its turn has come, and so never all at once."""
    plain = piece.elements
    if plain.is_cpu and plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return bytes_of(plain)
    return LateBytes(piece.nbytes, modes.put_aside()(partial(bytes_of, plain)))
