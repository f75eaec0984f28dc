"""The kinds of containers: for each, how it is flattened and the node that builds it again, side by side.

builtin      dict, OrderedDict, defaultdict, list, tuple
sequences    namedtuples, what torch's functions return, deques
instances    namespaces, dataclasses, subclasses of dict: objects of classes, by the class's name
arrays       numpy arrays, and the rules for subclasses of torch.Tensor
nested       jagged, strided-nested and quantized tensors: one leaf for a user, several tensors inside
sparse       sparse tensors, in the same way
wrappers     tensors of classes that say what they are made of: __tensor_flatten__
tensordicts  TensorDict, tensorclasses, TensorDictParams; this and what follows is imported once a value needs it
typed        TypedTensorDict
stacks       lazy stacks
non_tensors  NonTensorData, MetaData
"""

from __future__ import annotations

from memstore.late_imports import between_forks
from memstore.structure.containers import arrays, builtin, instances, sequences  # each registers its containers
from memstore.structure.containers.arrays import is_made_of_several, tensor_of_array
from memstore.structure.containers.wrappers import (
    are_shards_of,
    box_name,
    check_wrapped_shards,
    clone_parts,
    fill_parts,
    flatten_wrapped_shards,
    has_wrapped_shards,
    is_wrapper,
    pair_parts,
    pair_shards,
)
from memstore.structure.tree import loads_containers


@loads_containers
def load_tensordicts() -> None:
    with between_forks():
        import memstore.structure.containers.tensordicts  # noqa: F401  # pyright: ignore[reportUnusedImport]


__all__ = [
    "are_shards_of",
    "arrays",
    "box_name",
    "builtin",
    "check_wrapped_shards",
    "clone_parts",
    "fill_parts",
    "flatten_wrapped_shards",
    "has_wrapped_shards",
    "instances",
    "is_made_of_several",
    "is_wrapper",
    "load_tensordicts",
    "pair_parts",
    "pair_shards",
    "sequences",
    "tensor_of_array",
]
