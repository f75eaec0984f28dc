"""Trees as msgpack, and a walk's tree compiled at once to the node that a reader would make of it."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from memstore.errors import UnsupportedValueError
from memstore.structure.tree.node import Node, Reader, Tree


def _in_msgpack(value: Any) -> Any:
    """What stands in trees and msgpack doesn't have."""
    if isinstance(value, torch.device):
        return str(value)
    raise NotImplementedError(f"{type(value)} in a tree")


to_msgpack = msgspec.msgpack.Encoder(enc_hook=_in_msgpack).encode
from_msgpack = msgspec.msgpack.Decoder().decode


def compile_tree(tree: Tree) -> tuple[Node, Reader]:
    """The node that a walk's tree describes, and the reader that read it, with what it found out about the leaves."""
    reader = Reader()
    try:
        return reader.node(from_msgpack(to_msgpack(tree))), reader
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(
            f"value: a key with a lone surrogate, {error.object!r}: it is no Unicode text"
        ) from None
