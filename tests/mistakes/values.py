"""Values that can't be stored."""

from __future__ import annotations

from memstore.errors import (
    ReadOnlyError,
    StoreFullError,
    UnsupportedValueError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'store.put("policy", lambda x: x)',
        UnsupportedValueError,
        "value: an object of type function: it can't be found by its name (a lambda, or defined in a "
        "function): put what it is made of, or define it at the top level of a module and use allow_pickle=True",
    ),
    Mistake(
        'store.put("policy", (x for x in range(3)))',
        UnsupportedValueError,
        "value: an object of type generator: what it yields is not there yet; put list(...) of it",
    ),
    Mistake(
        'store.put("policy", module)',
        UnsupportedValueError,
        "value: an object of type torch.nn.modules.linear.Linear: put its state_dict()",
    ),
    Mistake(
        'store.put("policy", {"optimizer": optimizer})',
        UnsupportedValueError,
        "value['optimizer']: an object of type torch.optim.sgd.SGD: put its state_dict()",
    ),
    Mistake(
        'store.put("policy", open(path + "/notes.txt"))',
        UnsupportedValueError,
        "value: an object of type _io.TextIOWrapper: it is a part of this process, and can't be stored; put "
        "what another process makes it of",
    ),
    Mistake(
        'store.put("policy", threading.Lock())',
        UnsupportedValueError,
        "value: an object of type _thread.lock: it is a part of this process, and can't be stored; put what "
        "another process makes it of",
    ),
    Mistake(
        'store.put("policy", torch.Generator())',
        UnsupportedValueError,
        "value: an object of type torch._C.Generator: put its get_state()",
    ),
    Mistake(
        'store.put("policy", {"now": [1, {"keys": {}.keys()}]})',
        UnsupportedValueError,
        "value['now'][1]['keys']: an object of type dict_keys: put list(...) of it",
    ),
    Mistake(
        'store.put("policy", {object: 1})',
        UnsupportedValueError,
        "value[<class 'object'>]: a key of type type; str, int, float, bool, bytes, None and tuples of them are stored",
    ),
    Mistake(
        'store.put("policy", torch.empty(3, device="meta"))',
        UnsupportedValueError,
        "value: a meta tensor: it has a shape, but no bytes: put a real one",
    ),
    Mistake(
        'value = []; value.append(value); store.put("policy", value)',
        UnsupportedValueError,
        "value[0]: a container that contains itself: value",
    ),
    Mistake(
        'store.put("policy", {1, threading})',
        UnsupportedValueError,
        "value: an object of type module: put its name",
    ),
    Mistake(
        'store.put("policy", ValueError("no loss"))',
        UnsupportedValueError,
        "value: an object of type ValueError, which only allow_pickle=True can store",
    ),
    Mistake(
        'store.put("policy", np.array([{"a": 1}], dtype=object))',
        UnsupportedValueError,
        "value: a numpy array of dtype object, which only allow_pickle=True can store",
    ),
    Mistake(
        'store.put("policy", type("Local", (), {})())',
        UnsupportedValueError,
        "value: an object of type mistakes.Local, which only allow_pickle=True can store",
    ),
    Mistake(
        'tensor = torch.ones(8); tensor.untyped_storage().resize_(0); store.put("policy", {"w": tensor})',
        UnsupportedValueError,
        "value['w']: a tensor whose storage was freed or cut: its bytes aren't there: put it while it has them",
    ),
    Mistake(
        'store.put("policy", "\\ud800")',
        UnsupportedValueError,
        "value: a str with a lone surrogate, which is no Unicode text",
    ),
    Mistake(
        'store.put_many({"good": 1, "bad": {"f": print}})',
        UnsupportedValueError,
        "'bad': value['f']: an object of type builtin_function_or_method, which only allow_pickle=True can "
        "store; nothing was put",
    ),
    Mistake(
        'store.put("policy", torch.ones(2), dtype=torch.int8)',
        TypeError,
        "dtype=torch.int8: a put casts the floating leaves only, and to a real floating dtype, as "
        "torch.bfloat16; convert other leaves before you put them",
    ),
    Mistake(
        'store.put("policy", torch.ones(2), dtype="bfloat16")',
        TypeError,
        "dtype='bfloat16', a str: a put casts to a torch.dtype, as torch.bfloat16",
    ),
    Mistake(
        'small.put("large", torch.zeros(3 << 20, dtype=torch.uint8))',
        StoreFullError,
        "PATH/small has no room for 'large': it takes 3.0 MiB, and the capacity of the whole store is 1.0 "
        "MiB: open the store once with a larger capacity=, which all processes then have; nothing was changed",
    ),
    Mistake(
        'small.put_many({"a": torch.zeros(700 << 10, dtype=torch.uint8), "b": torch.zeros(700 << 10, '
        "dtype=torch.uint8)})",
        StoreFullError,
        "PATH/small has no room for 'b': it takes 708.0 KiB, all 2 values of the call take 1.4 MiB, and the "
        "capacity of the whole store is 1.0 MiB: open the store once with a larger capacity=, which all processes "
        "then have; nothing was changed",
    ),
    Mistake(
        'reader.put("policy", 1)',
        ReadOnlyError,
        "PATH/store was opened with mode 'r': open it with 'r+' or 'a' to write",
    ),
    Mistake(
        'store.setdefault("fresh", module)',
        UnsupportedValueError,
        "value: an object of type torch.nn.modules.linear.Linear: put its state_dict()",
    ),
    Mistake(
        'torch.func.vmap(lambda row: store.put("row", row))(torch.ones(2, 3))',
        UnsupportedValueError,
        "value: a tensor inside vmap, grad or another transform of torch.func: it has no bytes of its own: return it "
        "from the function, and use the result",
    ),
    Mistake(
        'store.put("fresh", {"where": store})',
        UnsupportedValueError,
        "value['where']: an object of type memstore.store.store.Store: put its root",
    ),
    Mistake(
        'store.put("fresh", store.ref("policy"))',
        UnsupportedValueError,
        "value: an object of type memstore.store.values.Ref: put its key, or what its get() returns",
    ),
    Mistake(
        'store.put("fresh", snapshot)',
        UnsupportedValueError,
        "value: an object of type memstore.snapshot.snapshot.Snapshot: put its path",
    ),
    Mistake(
        'store.put("fresh", frames)',
        UnsupportedValueError,
        "value: an object of type memstore.datasets.dataset.Dataset: put its key, which open_dataset takes",
    ),
    Mistake(
        'store.put("fresh", replay)',
        UnsupportedValueError,
        "value: an object of type memstore.replay.buffer.ReplayBuffer: put its key, which ReplayBuffer takes",
    ),
    Mistake(
        'store.put("fresh", type("Array", (), {"__array__": lambda self: np.ones(2)})())',
        UnsupportedValueError,
        "value: an object of type mistakes.Array: put numpy.asarray(...) of it",
    ),
    Mistake(
        'store.put("fresh", type("Array", (), {"__dlpack__": lambda self: None})())',
        UnsupportedValueError,
        "value: an object of type mistakes.Array: put torch.from_dlpack(...) of it",
    ),
]
