"""Datasets, replay buffers, and what feeds a DataLoader."""

from __future__ import annotations

from memstore.errors import (
    AlreadyExistsError,
    InvalidKeyError,
    KeyNotFoundError,
    MutableEntryError,
    ReadOnlyError,
    StoreFullError,
    StoreTimeoutError,
    StructureMismatchError,
    UnsupportedValueError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'store.create_dataset("frames", {"x": ((2,), torch.float32)}, capacity=8)',
        AlreadyExistsError,
        "'frames' is there already, at version 7: open it with store.open_dataset('frames'), or delete it",
    ),
    Mistake(
        'store.create_dataset("new", {"x": torch.float32}, capacity=8)',
        TypeError,
        "spec['x'] is torch.float32: a spec is (shape, dtype), as ((84, 84), torch.uint8), a dict of them, "
        "or an example of a row, of tensors",
    ),
    Mistake(
        'store.create_dataset({"x": ((2,), torch.float32)}, "new", capacity=8)',
        InvalidKeyError,
        "create_dataset takes the key and then the spec, and the key here is a dict: create_dataset('new', ...)",
    ),
    Mistake(
        'store.create_dataset_from({"x": torch.ones(3)}, "new")',
        InvalidKeyError,
        "create_dataset_from takes the key and then the rows, and the key here is a dict: "
        "create_dataset_from('new', ...)",
    ),
    Mistake(
        'store.create_dataset("new", {}, capacity=8)',
        ValueError,
        "spec is empty: a row has at least one tensor",
    ),
    Mistake(
        'store.create_dataset("new", {"x": ((2,), torch.float32)}, capacity=0)',
        ValueError,
        "capacity is a number of rows, 1 to 281,474,976,710,656, and not 0",
    ),
    Mistake(
        'store.create_dataset("new", {"x": ((2,), torch.float32)}, capacity=8, length=9)',
        ValueError,
        "length is 9 rows, and capacity 8",
    ),
    Mistake(
        'small.create_dataset("new", {"x": ((1 << 20,), torch.float32)}, capacity=8)',
        StoreFullError,
        "PATH/small has no room for 'new': it takes 32.0 MiB, and the capacity of the whole store is 1.0 "
        "MiB: open the store once with a larger capacity=, which all processes then have; nothing was changed",
    ),
    Mistake(
        'store.create_dataset_from("new", torch.tensor(3.0))',
        ValueError,
        "value has no dimension, and so no rows",
    ),
    Mistake(
        'store.create_dataset_from("new", {"x": torch.ones(3), "y": torch.ones(4)})',
        StructureMismatchError,
        "'new': this batch doesn't fit: its leaves have 3 and 4 rows",
    ),
    Mistake(
        'store.open_dataset("policy")',
        MutableEntryError,
        "'policy' is an ordinary entry, and no dataset: read it with store.get or store.view",
    ),
    Mistake(
        'store.open_dataset("frame")',
        KeyNotFoundError,
        "no key 'frame': did you mean 'frames'?",
    ),
    Mistake(
        'store.open_dataset("frames", "w")',
        ValueError,
        "mode is 'r' or 'r+', and not 'w'",
    ),
    Mistake(
        'store.open_dataset("new", wait=0)',
        StoreTimeoutError,
        "'new' doesn't exist: no version newer than 0 within 0 s",
    ),
    Mistake(
        'reader.open_dataset("frames")',
        ReadOnlyError,
        "PATH/store was opened with mode 'r', and a dataset is opened with mode 'r+' unless you say otherwise: "
        "open_dataset('frames', 'r') reads its rows",
    ),
    Mistake(
        'frames.extend({"x": torch.ones(1, 2)})',
        StructureMismatchError,
        "'frames': this batch doesn't fit: value['done'] is missing",
    ),
    Mistake(
        'frames.extend({"x": torch.ones(1, 3), "done": torch.zeros(1, dtype=torch.bool)})',
        StructureMismatchError,
        "'frames': this batch doesn't fit: value['x'] is torch.float32 of shape [1, 3], and takes "
        "torch.float32 of shape [rows, 2]",
    ),
    Mistake(
        'frames.extend({"x": torch.ones(1, 2, dtype=torch.float64), "done": torch.zeros(1, dtype=torch.bool)})',
        StructureMismatchError,
        "'frames': this batch doesn't fit: value['x'] is torch.float64 of shape [1, 2], and takes "
        "torch.float32 of shape [rows, 2]",
    ),
    Mistake(
        'frames.extend({"x": torch.ones(1, 2), "done": torch.zeros(2, dtype=torch.bool)})',
        StructureMismatchError,
        "'frames': this batch doesn't fit: its leaves have 1 and 2 rows",
    ),
    Mistake(
        'frames.extend({"x": torch.ones(9, 2), "done": torch.zeros(9, dtype=torch.bool)})',
        StoreFullError,
        "'frames' takes 8 rows at most, and this batch has 9: make a dataset with a larger capacity=, under "
        "another key",
    ),
    Mistake(
        'frames.extend({"x": torch.ones(6, 2), "done": torch.zeros(6, dtype=torch.bool)})',
        StoreFullError,
        "'frames' has 3 of at most 8 rows, and 6 more don't fit: seal it, and go on in another",
    ),
    Mistake(
        "replay.sample_slices(2, 4, timeout=0)",
        StoreTimeoutError,
        "'replay': it has no 4 rows of one episode that follow each other: add more, or take shorter slices",
    ),
    Mistake(
        "frames[3]",
        IndexError,
        "row 3 of 'frames', which has 3 by now: rows are from -3 to 2",
    ),
    Mistake(
        "frames[0, 1]",
        TypeError,
        "(0, 1) is a tuple, and a dataset is indexed by rows, or by the name of a column: take the rows first, as in "
        "dataset[3][0], or give a list of rows",
    ),
    Mistake(
        'frames["x", 0:2]',
        TypeError,
        "('x', slice(0, 2, None)) is a tuple, and a dataset is indexed by rows, or by the name of a column: take one "
        "after the other, as in dataset['x'][0:2]",
    ),
    Mistake(
        'frames["x"] = torch.zeros(3, 2)',
        StructureMismatchError,
        "'frames': rows are written whole: write a column's tensor, as in dataset['x'][:] = values",
    ),
    Mistake(
        'frames["y"]',
        KeyError,
        "'frames' has no leaf 'y', but 'x', 'done'",
    ),
    Mistake(
        'frames[5] = {"x": torch.ones(2), "done": torch.tensor(True)}',
        IndexError,
        "row 5 of 'frames', which has 3 by now: rows are from -3 to 2",
    ),
    Mistake(
        'frames[0:2] = {"x": torch.ones(3, 2), "done": torch.zeros(3, dtype=torch.bool)}',
        ValueError,
        "'frames': 3 rows for 2 places; it has 3 by now: extend adds rows",
    ),
    Mistake(
        'reader.open_dataset("frames", "r").extend({"x": torch.ones(1, 2), "done": torch.zeros(1, dtype=torch.bool)})',
        ReadOnlyError,
        "'frames' was opened with mode 'r': open it with 'r+' to write",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "new")',
        KeyNotFoundError,
        "no key 'new': keys() lists the 9 that the store has; with spec= and capacity= it is made",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "replay", capacity=16)',
        StructureMismatchError,
        "'replay' is there already, and its capacity is 8, and not 16: say the same, or leave it out to take the "
        "buffer as it is",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "replay", {"x": ((3,), torch.float32)}, capacity=8)',
        StructureMismatchError,
        "'replay' is there already, and its rows are {'x': ((2,), torch.float32), 'done': ((), torch.bool)}, "
        "and not {'x': ((3,), torch.float32)}: say the same, or leave it out to take the buffer as it is",
    ),
    Mistake(
        'memstore.ReplayBuffer(reader, "new", {"x": ((3,), torch.float32)}, capacity=8)',
        KeyNotFoundError,
        "no key 'new': keys() lists the 9 that the store has; this store was opened with mode 'r', which can't make it",
    ),
    Mistake(
        'memstore.ReplayBuffer(path + "/store", "replay")',
        TypeError,
        "store is an open store, and not its path: write memstore.open('PATH/store')",
    ),
    Mistake(
        'memstore.StoreDataset(path + "/store", "policy")',
        TypeError,
        "store is an open store, and not its path: write memstore.open('PATH/store')",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "replay", sampler="random")',
        ValueError,
        "sampler is 'uniform', 'fifo', 'lifo' or 'prioritized', and not 'random'",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "frames")',
        MutableEntryError,
        "'frames' is a dataset, whose rows are written in place: use store.open_dataset('frames'), or "
        "store.view('frames') to read it; seal() makes an ordinary entry of it, and store.delete('frames') "
        "frees the key",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "replay", rate_limiter=4.0)',
        TypeError,
        "rate_limiter is a memstore.RateLimiter, and not 4.0",
    ),
    Mistake(
        "memstore.RateLimiter(samples_per_insert=4.0, min_size=0, tolerance=8.0)",
        ValueError,
        "min_size is a number of rows, 1 at least, and not 0",
    ),
    Mistake(
        "memstore.RateLimiter(samples_per_insert=4.0, min_size=1, tolerance=1.0)",
        ValueError,
        "tolerance is 1.0: with less than 4, a sample or an insert of one row would wait for ever",
    ),
    Mistake(
        "replay.sample(4, timeout=0)",
        StoreTimeoutError,
        "'replay': it has no rows to sample: add some, or wait longer for them with timeout=",
    ),
    Mistake(
        "replay.sample_slices(1, 30)",
        ValueError,
        "'replay' has 8 slots, and a slice of 30 rows never fits: take shorter slices",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "replay", sampler="fifo").sample(9)',
        ValueError,
        "'replay' has 8 slots, and 9 rows never wait in it to be handed out: sample fewer at a time",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "replay", replacement=False).sample(9)',
        ValueError,
        "'replay' has 8 slots, and without replacement a sample of 9 different rows never fits: sample fewer at a time",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "replay", alpha=5)',
        ValueError,
        "alpha is a number from 0 to 4, and not 5",
    ),
    Mistake(
        "replay.sample(-1)",
        ValueError,
        "batch_size is 0 or more, and not -1",
    ),
    Mistake(
        'replay.sample("4")',
        TypeError,
        "batch_size is a number, and not '4'",
    ),
    Mistake(
        'replay.sample(1, out={}, device="cpu")',
        TypeError,
        "out= has a device of its own: leave device= out",
    ),
    Mistake(
        'replay.sample_slices(1, 2, end_key="terminated", timeout=0)',
        KeyError,
        "end_key: 'replay' has no leaf 'terminated', but 'x', 'done'; None: slices run over all",
    ),
    Mistake(
        "replay.update_priority([0], [1.0])",
        StructureMismatchError,
        "'replay' was made without priorities: make it with sampler='prioritized'",
    ),
    Mistake(
        'replay.extend({"x": torch.ones(9, 2), "done": torch.zeros(9, dtype=torch.bool)})',
        StoreFullError,
        "'replay' has 8 slots, and a batch of 9 rows never fits: extend it in parts",
    ),
    Mistake(
        'replay.add({"x": torch.ones(1, 2), "done": torch.tensor(False)})',
        StructureMismatchError,
        "'replay': this row doesn't fit: value['x'] is torch.float32 of shape [1, 2], and takes "
        "torch.float32 of shape [2]",
    ),
    Mistake(
        'StoreDataset(store, "policy", transform="float")',
        TypeError,
        "transform is a function of a batch, and not 'float'",
    ),
    Mistake(
        'StoreDataset(store, "plicy")',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'?",
    ),
    Mistake(
        'StoreDataset(store, "step")',
        UnsupportedValueError,
        "value of 'step' is an int, and no tensor: a row is one element of the first dimension of each "
        "tensor. Put it under a key of its own, or as a tensor with a row for each",
    ),
    Mistake(
        'StoreDataset(store, "policy")',
        UnsupportedValueError,
        "the tensors of 'policy' have different numbers of rows: value['b'] has 4, value['w'] has 512. Put "
        "tensors that don't belong to the rows under a key of their own",
    ),
    Mistake(
        "BlockShuffle(-1)",
        ValueError,
        "length is an integer, 0 or more, and not -1",
    ),
    Mistake(
        "BlockShuffle(8, block=0)",
        ValueError,
        "block is an integer, 1 or more, and not 0",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "never", {"x": ((), torch.float32)}, capacity=3, seed=-1)',
        ValueError,
        "seed is a whole number, 0 or more, or None, and not -1",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "never", {"x": ((), torch.float32)}, capacity=3, replacement="no")',
        TypeError,
        "replacement is True or False, and not 'no'",
    ),
    Mistake(
        'store.create_dataset("step", {"x": ((), torch.float32)}, capacity=3)',
        AlreadyExistsError,
        "'step' is there already, at version 4: it is an ordinary value: delete it, or take another key",
    ),
    Mistake(
        'store.create_dataset("replay", {"x": ((), torch.float32)}, capacity=3)',
        AlreadyExistsError,
        "'replay' is there already, at version 8: it is a replay buffer, which memstore.ReplayBuffer(store, 'replay') "
        "opens: do that, or delete it",
    ),
    Mistake(
        'memstore.Dataset(store, "frames")',
        TypeError,
        "store.open_dataset('frames') opens a dataset, and not Dataset(<memstore.Store PATH/store (mode 'a')>, ...)",
    ),
    Mistake(
        'memstore.ReplayBuffer({}, "x")',
        TypeError,
        "store is one of memstore.open, and not a dict",
    ),
    Mistake(
        'StoreDataset(view, "x")',
        TypeError,
        "store is one of memstore.open, and not an OrderedDict",
    ),
    Mistake(
        "memstore.read_rows(frames, [0])",
        TypeError,
        "a Dataset is no view: its own read_rows(index) reads its rows",
    ),
    Mistake(
        'frames.read_rows([0, 1], out={"x": torch.zeros(3, 2), "done": torch.zeros(3, dtype=torch.bool)})',
        StructureMismatchError,
        "value['x'] of out is torch.float32 of shape (3, 2), and takes torch.float32 of shape (2, 2)",
    ),
    Mistake(
        'frames.read_rows([0, 1], out={"x": torch.zeros(2, 2)})',
        StructureMismatchError,
        "value of out has other entries than the source: missing ['done'], too many []",
    ),
    Mistake(
        "memstore.read_rows(replay, [0])",
        TypeError,
        "a ReplayBuffer is no view: its own read_rows(index) reads its rows",
    ),
    Mistake(
        "memstore.read_rows(store, [0])",
        TypeError,
        "a Store is no view: read_rows(store.view(key), index) reads rows of a key's value",
    ),
    Mistake(
        'memstore.read_rows(StoreDataset(store, "policy/old"), [0])',
        TypeError,
        "a StoreDataset is no view: data[index] reads its rows",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "fresh", ROWS, capacity=4, sampler="prioritized", beta="a")',
        TypeError,
        "beta is a number, 0 at least, and not 'a'",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "fresh", ROWS, capacity=4, sampler="prioritized", alpha="a")',
        TypeError,
        "alpha is a number from 0 to 4, and not 'a'",
    ),
    Mistake(
        'replay.update_priority(TensorDict({"index": torch.arange(2)}, [2]), 1.0)',
        TypeError,
        "index is integers, as batch['index'] of a sample, and not a TensorDict",
    ),
    Mistake(
        'BlockShuffle(StoreDataset(store, "policy/old"))',
        TypeError,
        "length is an integer, 0 or more, and not <memstore.StoreDataset 'policy/old', 512 rows>: "
        "BlockShuffle(len(dataset))",
    ),
    Mistake(
        'BlockShuffle(8, seed="a")',
        TypeError,
        "seed is an integer, from 0 to 18446744073709551615, and not 'a'",
    ),
    Mistake(
        'store.create_dataset("fresh", ROWS, capacity="8")',
        TypeError,
        "capacity is a number of rows, 1 to 281,474,976,710,656, and not '8'",
    ),
    Mistake(
        'store.create_dataset("fresh", ROWS, capacity=8, length="2")',
        TypeError,
        "length is a number of rows, 0 or more, and not '2'",
    ),
    Mistake(
        "memstore.RateLimiter(samples_per_insert=4.0, min_size=1.5, tolerance=8.0)",
        TypeError,
        "min_size is a number of rows, 1 at least, and not 1.5",
    ),
    Mistake(
        'store.create_dataset("fresh", {"x": ((2,), "float32")}, capacity=8)',
        TypeError,
        "spec['x'] is ((2,), 'float32'): a spec is (shape, dtype), as ((84, 84), torch.uint8), a dict of them, "
        "or an example of a row, of tensors: write ((2,), torch.float32)",
    ),
    Mistake(
        'store.create_dataset("fresh", {"x": ((2,), np.float32)}, capacity=8)',
        TypeError,
        "spec['x'] is ((2,), <class 'numpy.float32'>): a spec is (shape, dtype), as ((84, 84), torch.uint8), a "
        "dict of them, or an example of a row, of tensors: write ((2,), torch.float32)",
    ),
    Mistake(
        'store.create_dataset("fresh", {"x": (torch.float32, (2,))}, capacity=8)',
        TypeError,
        "spec['x'] is (torch.float32, (2,)): a spec is (shape, dtype), as ((84, 84), torch.uint8), a dict of "
        "them, or an example of a row, of tensors: write ((2,), torch.float32)",
    ),
    Mistake(
        'store.create_dataset("fresh", {"x": (2, torch.float32)}, capacity=8)',
        TypeError,
        "spec['x'] is (2, torch.float32): a spec is (shape, dtype), as ((84, 84), torch.uint8), a dict of them, "
        "or an example of a row, of tensors: write ((2,), torch.float32)",
    ),
    Mistake(
        'store.create_dataset("fresh", {"x": np.ones(2)}, capacity=8)',
        TypeError,
        "spec['x'] is array([1., 1.]): a spec is (shape, dtype), as ((84, 84), torch.uint8), a dict of them, or "
        "an example of a row, of tensors: torch.as_tensor(...) of the array is one",
    ),
    Mistake(
        'frames.extend([{"x": torch.ones(2), "done": torch.tensor(False)}] * 2)',
        UnsupportedValueError,
        "value is a list: rows are of tensors and numpy arrays: a batch is one dict, with torch.stack(...) of "
        "what the rows have under each key",
    ),
    Mistake(
        'frames.extend([TensorDict({"x": torch.ones(2), "done": torch.tensor(False)})] * 2)',
        UnsupportedValueError,
        "value is a list: rows are of tensors and numpy arrays: torch.stack(...) of it is a batch",
    ),
    Mistake(
        'replay.add({"x": torch.ones(2), "done": False})',
        UnsupportedValueError,
        "value['done'] is a bool: rows are of tensors and numpy arrays: write torch.tensor(False)",
    ),
    Mistake(
        'frames.extend({"x": [1.0, 2.0], "done": torch.zeros(1, dtype=torch.bool)})',
        UnsupportedValueError,
        "value['x'] is a list: rows are of tensors and numpy arrays: torch.tensor(...) of it is one",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "replay", sampler="prioritized")',
        StructureMismatchError,
        "'replay' is there already, and it was made without priorities: leave sampler= out to take the buffer as "
        "it is, or make one under another key",
    ),
    Mistake(
        "frames.read_rows([99])",
        IndexError,
        "row 99 of 'frames', which has 3: rows are from -3 to 2",
    ),
    Mistake(
        "frames[[0, 99]]",
        IndexError,
        "row 99 of 'frames', which has 3: rows are from -3 to 2",
    ),
    Mistake(
        'StoreDataset(store, "policy/old")[[0, 999]]',
        IndexError,
        "row 999 of 'policy/old', which has 512: rows are from -512 to 511",
    ),
    Mistake(
        "frames[...]",
        TypeError,
        "an ellipsis is no index of rows: it takes integers or booleans (uint8 might mean either), as a list, "
        "array or tensor of one dimension, a slice or a range",
    ),
    Mistake(
        'frames[0:1] = {"x": torch.ones(2, 2), "done": torch.zeros(2, dtype=torch.bool)}',
        ValueError,
        "'frames': 2 rows for 1 place; it has 3 by now: extend adds rows",
    ),
    Mistake(
        'memstore.ReplayBuffer(store, "replay", capacity="10")',
        TypeError,
        "capacity is a number of rows, 1 to 281,474,976,710,656, and not '10'",
    ),
    Mistake(
        'memstore.RateLimiter(samples_per_insert="8", min_size=1, tolerance=500.0)',
        TypeError,
        "samples_per_insert is a number, and not '8'",
    ),
    Mistake(
        "memstore.read_rows(view, [0], out=5)",
        StructureMismatchError,
        "value of out is an int, and that of the source has entries by name",
    ),
]
