"""Gets, views and references."""

from __future__ import annotations

from memstore.errors import (
    KeyNotFoundError,
    MutableEntryError,
    PartialCommitError,
    ReadOnlyError,
    StoreClosedError,
    StructureMismatchError,
    UnsupportedValueError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'store.get("policy", "cpu")',
        UserWarning,
        "get('policy', 'cpu'): the second argument is the default, which is returned as it is if there is no "
        "such key; for values of this device write device='cpu'",
    ),
    Mistake(
        'store.get("policy", torch.device("cuda:0"))',
        UserWarning,
        "get('policy', 'cuda:0'): the second argument is the default, which is returned as it is if there is "
        "no such key; for values of this device write device='cuda:0'",
    ),
    Mistake(
        'store.get("policy", torch.float16)',
        UserWarning,
        "get('policy', torch.float16): the second argument is the default, which is returned as it is if "
        "there is no such key; for values of this dtype write dtype=torch.float16",
    ),
    Mistake(
        'store.get("nothing", "cuda")',
        UserWarning,
        "get('nothing', 'cuda'): the second argument is the default, which is returned as it is if there is "
        "no such key; for values of this device write device='cuda'",
    ),
    Mistake(
        'store.get("policy", "w")',
        UserWarning,
        "get('policy', 'w'): the second argument is the default, which is returned as it is if there is no such key; "
        "for that part of the value write get('policy')['w']",
    ),
    Mistake(
        'store.get("policy", out=module)',
        StructureMismatchError,
        "out is a Linear, a module, and no container of tensors: store.load_model(key, module) fills one "
        "that save_model has stored; for a stored state_dict, out=module.state_dict()",
    ),
    Mistake(
        'store.get("model", out=larger.state_dict())',
        StructureMismatchError,
        "out differs from the stored value, nothing was written:\n"
        "  value['weight']: stored with shape [2, 4], here [2, 8]",
    ),
    Mistake(
        'store.get("model", out={"weight": torch.zeros(2, 4)})',
        StructureMismatchError,
        "out differs from the stored value, nothing was written; strict=False fills what both have:\n"
        "  value['bias']: a tensor is stored, but there is none in out",
    ),
    Mistake(
        'store.get("model", out=torch.zeros(2, 4))',
        StructureMismatchError,
        "out differs from the stored value, nothing was written; strict=False fills what both have:\n"
        "  value['weight']: a tensor is stored, but there is none in out\n"
        "  value['bias']: a tensor is stored, but there is none in out\n"
        "  value: a tensor in out, but none is stored",
    ),
    Mistake(
        'store.get("model", out=store.view("model"))',
        StructureMismatchError,
        "out: value['weight']: a lazy leaf of a view, whose version never changes",
    ),
    Mistake(
        'store.get("model", out={"weight": torch.zeros(1).expand(2, 4), "bias": torch.zeros(2)})',
        StructureMismatchError,
        "out differs from the stored value, nothing was written:\n"
        "  value['weight']: an expanded tensor, several of whose elements are one in memory: it can't be filled",
    ),
    Mistake(
        'store.get("model", out={}, like={})',
        TypeError,
        "get takes out= or like=, not both: out= fills what is there, like= makes its double",
    ),
    Mistake(
        'store.get("model", out={}, device="cpu")',
        TypeError,
        "out= and like= have devices and dtypes of their own: leave device= and dtype= out",
    ),
    Mistake(
        'store.get("model", like={"weight": torch.zeros(2, 4, dtype=torch.float16)})',
        StructureMismatchError,
        "like differs from the stored value, nothing was written; strict=False takes from like what only like has, and "
        "leaves out the rest:\n"
        "  value['bias']: a tensor is stored, but there is none in like",
    ),
    Mistake(
        'store.get("policy", dtype=torch.int32)',
        TypeError,
        "dtype=torch.int32: it converts the leaves of floating dtypes only, to another floating or complex "
        "torch.dtype; for integers, get the value as it is and convert the leaves that are meant",
    ),
    Mistake(
        'store.get("policy", dtype="float16")',
        TypeError,
        "dtype='float16', a str: a get converts to a torch.dtype, as torch.bfloat16",
    ),
    Mistake(
        'store.get("policy", device="gpu")',
        RuntimeError,
        "Expected one of cpu, cuda, ...",
    ),
    Mistake(
        'store.get("policy", timeout="5")',
        TypeError,
        "a timeout is a number of seconds, and not '5'",
    ),
    Mistake(
        'store.get("policy", timeout=float("nan"))',
        ValueError,
        "a timeout is a number of seconds, 0 or more, and not nan",
    ),
    Mistake(
        'list(memstore.iter_weights(store, "policy", prefix="model."))',
        ValueError,
        "no tensor of 'policy' has a name that starts with 'model.': the first is 'w'",
    ),
    Mistake(
        'store.get("policy", max_age=-1)',
        ValueError,
        "max_age is seconds, 0 or more, or None, and not -1",
    ),
    Mistake(
        'store.get("frames")',
        MutableEntryError,
        "'frames' is a dataset, whose rows are written in place: use store.open_dataset('frames'), or "
        "store.view('frames') to read it; seal() makes an ordinary entry of it, and store.delete('frames') "
        "frees the key",
    ),
    Mistake(
        'store.get("replay")',
        MutableEntryError,
        "'replay' is a replay buffer, whose rows are written in place: use memstore.ReplayBuffer(store, "
        "'replay') and its sample(); store.delete('replay') frees the key",
    ),
    Mistake(
        'store.put("frames", 1)',
        MutableEntryError,
        "'frames' is a dataset, whose rows are written in place: use store.open_dataset('frames'), or "
        "store.view('frames') to read it; seal() makes an ordinary entry of it, and store.delete('frames') "
        "frees the key",
    ),
    Mistake(
        'store.pop("replay")',
        MutableEntryError,
        "'replay' is a replay buffer, whose rows are written in place: use memstore.ReplayBuffer(store, "
        "'replay') and its sample(); store.delete('replay') frees the key",
    ),
    Mistake(
        'store.view("replay")',
        MutableEntryError,
        "'replay' is a replay buffer, whose rows are written in place: use memstore.ReplayBuffer(store, "
        "'replay') and its sample(); store.delete('replay') frees the key",
    ),
    Mistake(
        'store.get("halves")',
        PartialCommitError,
        "'halves' has no version yet: attempt 'first' waits for rank 1; abort('halves', 'first') gives it up",
    ),
    Mistake(
        'store.get_many(["policy", "halves"])',
        PartialCommitError,
        "'halves' has no version yet: attempt 'first' waits for rank 1; abort('halves', 'first') gives it up",
    ),
    Mistake(
        'store.get_many(["halves", "plicy"])',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'? (2 keys were named; get(key, default) gets those that are there)",
    ),
    Mistake(
        'store.ref("policy", lease=-1)',
        ValueError,
        "lease is seconds, 0 or more, and not -1",
    ),
    Mistake(
        'store.get("policy", devcie="cpu")',
        TypeError,
        "Store.get() got an unexpected keyword argument 'devcie'...",
    ),
    Mistake(
        'store.wait("policy", older_than=1)',
        TypeError,
        "Store.wait() got an unexpected keyword argument 'older_than'",
    ),
    Mistake(
        'store.ref("policy").get(devcie="cpu")',
        TypeError,
        "Ref.get() got an unexpected keyword argument 'devcie': it takes default, out, like, device, dtype, "
        "non_blocking, strict, cast, timeout, max_age",
    ),
    Mistake(
        'closed.get("policy")',
        StoreClosedError,
        "the store PATH/store was closed: memstore.open it again",
    ),
    Mistake(
        "pickle.dumps(closed)",
        StoreClosedError,
        "the store PATH/store was closed: memstore.open it again",
    ),
    Mistake(
        "closed.__enter__()",
        StoreClosedError,
        "the store PATH/store was closed: memstore.open it again",
    ),
    Mistake(
        'view["w"][0] = 1',
        ReadOnlyError,
        "an assignment to its elements would write into a lazy leaf of 'policy', which a view only reads: take a "
        "copy with clone(), and write into that",
    ),
    Mistake(
        'view["w"].add_(1)',
        ReadOnlyError,
        "aten.add_.Tensor (its argument 'self') would write into a lazy leaf of 'policy', which a "
        "view only reads: take a copy with clone(), and write into that",
    ),
    Mistake(
        'torch.add(view["w"], 1, out=view["w"])',
        ReadOnlyError,
        "aten.add.out (its argument 'out') would write into a lazy leaf of 'policy', which a view only reads: "
        "take a copy with clone(), and write into that",
    ),
    Mistake(
        'view["w"].data_ptr()',
        ReadOnlyError,
        "a lazy leaf of 'policy' has no memory of its own that could be pointed at: take a copy with "
        "clone(), or get the key instead of its view; to write a file of it, Store.export",
    ),
    Mistake(
        "memstore.StoredTensor(3)",
        TypeError,
        "a StoredTensor is part of a stored value: get one from Store.view or Snapshot.view",
    ),
    Mistake(
        'memstore.read_rows(view["w"], 1000)',
        TypeError,
        "the number 1000 is no index of rows: it takes integers or booleans (uint8 might mean either), as a "
        "list, array or tensor of one dimension, a slice or a range",
    ),
    Mistake(
        'memstore.read_rows(view["w"], [0.5])',
        TypeError,
        "an array of float64 is no index of rows: it takes integers or booleans (uint8 might mean either), "
        "as a list, array or tensor of one dimension, a slice or a range",
    ),
    Mistake(
        'memstore.read_rows(view["w"], torch.ones(3, dtype=torch.bool))',
        IndexError,
        "a mask of 3 for value, which has 512 rows: it takes one for each",
    ),
    Mistake(
        "memstore.read_rows(3, [0])",
        TypeError,
        "a value of type int without a tensor has no rows: they are read from a view, a lazy leaf, a tensor, "
        "and TensorDicts, dicts, lists and tuples of these",
    ),
    Mistake(
        'memstore.read_rows(view["w"], [0], out=torch.zeros(1, 5))',
        StructureMismatchError,
        "value of out is torch.float32 of shape (1, 5), and takes torch.float32 of shape (1, 4)",
    ),
    Mistake(
        'list(memstore.iter_weights(store, "plicy"))',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'?",
    ),
    Mistake(
        "store.get_many(None)",
        TypeError,
        "several keys are a list or another iterable of str, and not None",
    ),
    Mistake(
        'store.get_many(b"policy")',
        TypeError,
        "several keys are a list or another iterable of str, and b'policy' is bytes: write [b'policy'.decode()]",
    ),
    Mistake(
        "store.delete_many(None)",
        TypeError,
        "several keys are a list or another iterable of str, and not None",
    ),
    Mistake(
        "store.verify(3)",
        TypeError,
        "several keys are a list or another iterable of str, and not 3",
    ),
    Mistake(
        'store.get("policy", max_age="1")',
        TypeError,
        "max_age is seconds, 0 or more, or None, and not '1'",
    ),
    Mistake(
        'store.ref("policy", lease="x")',
        TypeError,
        "lease is seconds, 0 or more, and not 'x'",
    ),
    Mistake(
        'store.ref("policy", lease=None)',
        TypeError,
        "lease is seconds, 0 or more, and not None",
    ),
    Mistake(
        "store.verify(progress=True)",
        TypeError,
        "progress is a function of the bytes done and those in all, and not True: progress=print shows both",
    ),
    Mistake(
        'list(memstore.iter_weights(store, "policy", names={"w": "weight"}))',
        TypeError,
        "names is a function of a name, and not a dict: write names=that_dict.get, which leaves out the names "
        "that it doesn't have",
    ),
    Mistake(
        'list(memstore.iter_weights(store, "seed"))',
        UnsupportedValueError,
        "the value of 'seed' is an int, and has no tensors to name",
    ),
    Mistake(
        'store.get("policy", out={"w": torch.zeros(512, 4)}, strict="False")',
        TypeError,
        "strict is True or False, and not 'False'",
    ),
    Mistake(
        'list(memstore.iter_weights(store, "policy", prefix=5))',
        TypeError,
        "prefix is a str, and not 5",
    ),
]
