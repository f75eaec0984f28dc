"""Values of several ranks, and models."""

from __future__ import annotations

from memstore.errors import (
    InvalidKeyError,
    KeyNotFoundError,
    PartialCommitError,
    StoreTimeoutError,
    StructureMismatchError,
    UnsupportedValueError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'store.put_sharded("new", shard, attempt="few", rank=0, world_size=2, timeout=0.1)',
        StoreTimeoutError,
        "'new': attempt 'few': rank 1 of 2 had put nothing within 0.1 s: all ranks must call it, with the same "
        "attempt; timeout= gives them longer",
    ),
    Mistake(
        'store.put_sharded("new", shard, attempt="alone", rank=0, world_size=1)',
        PartialCommitError,
        "'new': all ranks have put their parts, and none holds value[1:2, 0:4]: the offsets and shapes of the shards "
        "must cover the whole tensor",
    ),
    Mistake(
        'store.put("new", shard)',
        TypeError,
        "'new': the value is sharded, and this process is no rank of torch.distributed: call put_sharded "
        "with attempt= (a text that all ranks of this put share, and no other put has), rank= and world_size=",
    ),
    Mistake(
        'store.put_sharded("new", shard, rank=0)',
        TypeError,
        "'new': a sharded put takes attempt=, rank= and world_size= together, or attempt= alone, or none of them",
    ),
    Mistake(
        'store.put_sharded("new", shard, attempt="", rank=0, world_size=2)',
        TypeError,
        "attempt is a text that is not empty, and not ''",
    ),
    Mistake(
        'store.put_sharded("new", shard, attempt="first", rank=2, world_size=2)',
        ValueError,
        "rank 2 of 2: ranks count from 0, and there are 65,536 at most",
    ),
    Mistake(
        'store.put_sharded("new", shard, attempt="first", rank=0, world_size=2, lease="long", wait=False)',
        TypeError,
        "lease is seconds, 0 or more, and not 'long'",
    ),
    Mistake(
        'store.put_sharded("new", memstore.TensorShard(torch.ones(1, 4), (2, 4), (2, 0)), attempt="a", '
        "rank=0, world_size=2)",
        UnsupportedValueError,
        "value: a TensorShard of shape (1, 4) at the offsets (2, 0) does not lie within the whole, of shape "
        "(2, 4); the three must have as many dimensions, and offset and size add up to at most the whole's "
        "size in each",
    ),
    Mistake(
        'store.put_sharded("new", memstore.TensorShard(torch.ones(1, 4), (2,), (0,)), attempt="a", rank=0, '
        "world_size=2)",
        UnsupportedValueError,
        "value: a TensorShard of shape (1, 4) at the offsets (0,) does not lie within the whole, of shape "
        "(2,); the three must have as many dimensions, and offset and size add up to at most the whole's "
        "size in each",
    ),
    Mistake(
        'store.put_many({"new": shard})',
        UnsupportedValueError,
        "'new': value: a TensorShard, which only a sharded put can store; nothing was put",
    ),
    Mistake(
        'store.save_model("new", module.state_dict())',
        TypeError,
        "model is a torch.nn.Module, and not an OrderedDict: put and get are for other values",
    ),
    Mistake(
        'store.save_model("new", module, torch.optim.SGD(larger.parameters(), lr=0.1))',
        UnsupportedValueError,
        "parameter 0 of the optimizer's group 0, of shape [2, 8], is none of the model's: make the optimizer "
        "after the model is wrapped and sharded",
    ),
    Mistake(
        'store.load_model("plicy", module)',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'?",
    ),
    Mistake(
        'store.load_model("policy", module)',
        StructureMismatchError,
        "'policy': version 1 doesn't fit, and nothing was loaded:\n"
        "  an OrderedDict is stored, which save_model didn't make; as a state_dict it has none of the model's names: "
        "its first is 'w'",
    ),
    Mistake(
        'store.load_model("linear", larger)',
        StructureMismatchError,
        "'linear': version 9 doesn't fit, and nothing was loaded:\n"
        "  model['weight']: stored with shape [2, 4], here [2, 8]",
    ),
    Mistake(
        'store.load_model("step", module)',
        StructureMismatchError,
        "'step': version 4 doesn't fit, and nothing was loaded:\n"
        "  an int is stored, which save_model didn't make, and is no state_dict",
    ),
    Mistake(
        'view["w"].distribute(None, [])',
        UnsupportedValueError,
        "expected a DeviceMesh of torch, found None",
    ),
    Mistake(
        'store.save_model(module, "linear")',
        InvalidKeyError,
        "save_model takes the key and then the model, and the key here is a Linear: save_model('linear', ...)",
    ),
    Mistake(
        'store.load_model(module, "linear")',
        InvalidKeyError,
        "load_model takes the key and then the model, and the key here is a Linear: load_model('linear', ...)",
    ),
]
