"""References to index actors: bytes that may come from elsewhere, and run nothing when they are opened.

Monarch hands on its own references by pickle. Of that pickle this takes the one part that says which actor it is, which
Monarch's compiled code has written and reads; the rest is made anew. So none is read.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from memstore._parsing import UNDECODABLE
from memstore._threads import between_forks
from memstore.distributed.links import Hello, hello_of_this_process
from memstore.errors import CorruptionError, LinkRefusedError, MissingPackageError

NAME = "memstore_index"  # of the actor, for Monarch

_OF_MONARCH = (
    "monarch._src.actor.actor_mesh",
    "monarch._rust_bindings.monarch_hyperactor.actor_mesh",
    "monarch._rust_bindings.monarch_hyperactor.shape",
)

Member = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Where an index actor is. It is of no use any more once its index process has ended.

    Attributes:
        member: the store id of its host.
        hello: what its index process says of itself.
        actor: which it is, for Monarch.
    """

    member: Member
    hello: Hello
    actor: Annotated[bytes, Meta(max_length=1 << 16)]


class FindActor(msgspec.Struct, frozen=True, array_like=True, tag=34):
    """A request to a listener: is there an index actor? The answer is FoundActor."""


class FoundActor(msgspec.Struct, frozen=True, array_like=True, tag=97):
    """Attributes:
    reference: an encoded `Reference`; empty: there is none, or not yet.
    why: there is none.
    """

    reference: Annotated[bytes, Meta(max_length=1 << 17)]
    why: Annotated[str, Meta(max_length=4096)] = ""


class Call(Protocol):
    """An endpoint of an actor."""

    def call_one(self, note: bytes) -> Any: ...


encode_reference = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reference).decode


_handed: list[bytes] = []


def use_actors(references: Sequence[bytes]) -> None:
    """Stores that this process opens from now on ask the hosts of these index actors by them, and not over TCP.

    For processes in which Monarch runs. A host without one is asked over TCP, and so is each for bytes of values.

    Args:
        references: as `actors_at` gives them on a host that serves; none: all is asked over TCP.

    Raises:
        MissingPackageError: Monarch isn't installed.
        LinkRefusedError: a reference is of another version of Monarch.
        CorruptionError: what was given is no reference.
    """
    for reference in references:
        open_reference(decode_reference(reference))
    _handed[:] = references


def used_actors() -> Sequence[bytes]:
    return tuple(_handed)


def need_monarch(version: str) -> None:
    """Raises MissingPackageError if Monarch isn't installed.

    Args:
        version: as `Hello.monarch` has it.
    """
    if not version:
        advice = "pip install 'torchmonarch>=0.7,<0.8'"
        raise MissingPackageError(f"index actors need torchmonarch (Linux, Python 3.10 to 3.13): {advice}")


def decode_reference(data: bytes) -> Reference:
    """Raises CorruptionError: it is none."""
    try:
        return _decode(data)
    except UNDECODABLE as error:
        raise CorruptionError(f"a reference to an index actor that can't be read: {error}") from None


def open_reference(reference: Reference) -> Call:
    """The actor, for this process. It imports Monarch.

    Raises:
        MissingPackageError: it isn't installed here.
        LinkRefusedError: the actor's host has another version of Monarch: they don't understand each other.
        CorruptionError: what Monarch has made of it can't be read.
    """
    own, its = hello_of_this_process().monarch, reference.hello.monarch
    need_monarch(own)
    if own != its:
        raise LinkRefusedError(
            f"{reference.hello.host or 'the host'} has torchmonarch {its or 'missing'}, and this process {own}: index "
            "actors can be asked by the same version only; install it, or ask over TCP"
        )
    with between_forks():
        from memstore.distributed.actors.index_actor import IndexActor

        meshes, read, shapes = map(importlib.import_module, _OF_MONARCH)
    try:
        actor = read.py_actor_mesh_from_bytes(reference.actor)
    except Exception as error:  # Monarch's are of many classes
        raise CorruptionError(f"a reference to an index actor that can't be read: {error}") from error
    return meshes.ActorMesh(IndexActor, NAME, actor, shapes.Shape.unity(), None).take


def bytes_of(actor: Any) -> bytes:
    """What `Reference.actor` has, of an actor of this process. Monarch must have made it by now."""
    _, (_, _, inner, _, _) = actor.__reduce_ex__(4)
    _, (data,) = inner.__reduce__()
    return data
