"""The kinds of containers: for each, how it is flattened and the node that builds it again, side by side.

python       dicts, lists and tuples; namespaces, dataclasses and mappings; namedtuples and deques
arrays       numpy arrays; sparse, nested and quantized tensors; the rules for subclasses of torch.Tensor
wrappers     tensors of classes that say what they are made of: __tensor_flatten__
tensordicts  TensorDict and its relatives: imported once a value needs them
"""

from __future__ import annotations

from memstore.structure.containers.tensors import (
    are_shards_of,
    check_wrapped_shards,
    clone_parts,
    fill_parts,
    flatten_wrapped_shards,
    has_wrapped_shards,
    is_made_of_several,
    is_wrapper,
    pair_parts,
    pair_shards,
    tensor_of_array,
    why_parts_not_filled,
)

__all__ = [
    "are_shards_of",
    "check_wrapped_shards",
    "clone_parts",
    "fill_parts",
    "flatten_wrapped_shards",
    "has_wrapped_shards",
    "is_made_of_several",
    "is_wrapper",
    "pair_parts",
    "pair_shards",
    "tensor_of_array",
    "why_parts_not_filled",
]
