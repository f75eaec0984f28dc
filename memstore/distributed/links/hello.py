"""The first message of a connection, both ways: who speaks. Nothing in it has to agree; `status` shows it."""

from __future__ import annotations

import os
import socket
from typing import Annotated

import msgspec
from msgspec import Meta

from memstore._threads import between_forks
from memstore._version import __version__

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=4096)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Attributes:
    memstore, torch, monarch: versions; empty where it isn't installed.
    incarnation: how often this index process was started; 0 for a client.
    host: the host's name.
    storage: of an index process whose store is on storage that hosts share: the id of that store; else empty.
    """

    memstore: Text
    torch: Text = ""
    monarch: Text = ""
    incarnation: Number = 0
    pid: Number = 0
    host: Text = ""
    storage: Text = ""


def hello_of_this_process(incarnation: int = 0) -> Hello:
    """What this process says of itself. It loads neither torch nor monarch."""
    return Hello(
        memstore=__version__,
        torch=_version("torch"),
        monarch=_version("torchmonarch"),
        incarnation=incarnation,
        pid=os.getpid(),
        host=socket.gethostname(),
    )


def _version(package: str) -> str:
    with between_forks():
        from importlib import metadata
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Hello).decode  # raises UNDECODABLE
