"""torch.distributed.checkpoint, and TorchStore's API."""

from __future__ import annotations

from memstore.errors import (
    InvalidKeyError,
    KeyNotFoundError,
    MemstoreError,
    NotAStoreError,
    StoreClosedError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'asyncio.run(torchstore.get("policy"))',
        NotAStoreError,
        "no store named 'torchstore': call initialize() or initialize_spmd() first, in this process or in "
        "one that starts it, or set MEMSTORE_TORCHSTORE_ROOT to the same folder in all processes of the job",
    ),
    Mistake(
        'asyncio.run(torchstore.put("policy", torch.ones(2)))',
        NotAStoreError,
        "no store named 'torchstore': call initialize() or initialize_spmd() first, in this process or in "
        "one that starts it, or set MEMSTORE_TORCHSTORE_ROOT to the same folder in all processes of the job",
    ),
    Mistake(
        "dcp.StorageReader(store).read_metadata()",
        ValueError,
        "which key of the store? Give key=, or the checkpoint_id of the save or the load",
    ),
    Mistake(
        'dcp.StorageReader(store, key="plicy").read_metadata()',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'?",
    ),
    Mistake(
        'dcp.StorageReader(path + "/nowhere").read_metadata()',
        NotAStoreError,
        "PATH/nowhere is no snapshot: there is no such folder",
    ),
    Mistake(
        'dcp.StorageReader(path + "/notes.txt").read_metadata()',
        NotAStoreError,
        "PATH/notes.txt is no snapshot: it is a file, and a snapshot is a folder",
    ),
    Mistake(
        "torchstore.initialise",
        MemstoreError,
        "module memstore.integrations.torchstore has no 'initialise': did you mean 'initialize'?",
    ),
    Mistake(
        "from memstore.integrations.torchstore import put_statedict",
        MemstoreError,
        "module memstore.integrations.torchstore has no 'put_statedict': did you mean 'put_state_dict'?",
    ),
    Mistake(
        "from memstore.integrations.torchstore import StorageVolume",
        MemstoreError,
        "module memstore.integrations.torchstore has no 'StorageVolume' in memstore: values lie in files that every "
        "process of the host maps, so there are no volumes, controllers or transports to ask. "
        "docs/coming-from/torchstore.md says what takes their place",
    ),
    Mistake(
        "torchstore.TensorSlice(0, None, (4, 2), (2, 2), None)",
        TypeError,
        "offsets is whole numbers, one for each dimension, and not 0",
    ),
    Mistake(
        'asyncio.run(torchstore.get("policy", store_name=None))',
        TypeError,
        "store_name is a str, as 'torchstore', and not None",
    ),
    Mistake(
        "asyncio.run(torchstore.initialize(2))",
        RuntimeError,
        "num_storage_volumes is 2, and without a strategy it is 1",
    ),
    Mistake(
        'asyncio.run(torchstore.put_state_dict("policy", {"w": torch.ones(2)}))',
        TypeError,
        "the state dict comes first, and then the key: put_state_dict(state_dict, 'policy')",
    ),
    Mistake(
        'dcp.StorageReader(path + "/store").read_metadata()',
        ValueError,
        "PATH/store is a store: give key=, that of the checkpoint in it, or another path",
    ),
    Mistake(
        'dcp.StorageWriter(path + "/store").prepare_local_plan(None)',
        ValueError,
        "PATH/store is a store: give key=, that of the checkpoint in it, or another path",
    ),
    Mistake(
        "dcp.StorageWriter(module)",
        TypeError,
        "path_or_store is a path or an open store, and not a Linear",
    ),
    Mistake(
        'dcp.StorageReader(path + "/step-1").read_metadata()',
        NotAStoreError,
        "PATH/step-1 has a snapshot that is no checkpoint, as it has no 'state': memstore.Snapshot reads it",
    ),
    Mistake(
        'dcp.StorageReader(path + "/folder").read_metadata()',
        NotAStoreError,
        "PATH/folder is no snapshot: it has no memstore_snapshot.json; a take that was not finished leaves none",
    ),
    Mistake(
        'dcp.StorageReader(store, key="policy").read_metadata()',
        KeyNotFoundError,
        "'policy' has a value that is no checkpoint: store.get reads it",
    ),
    Mistake(
        'dcp.StorageWriter(store, key="")',
        InvalidKeyError,
        "a key has at least one character, and this one has none: give the value a name",
    ),
    Mistake(
        'dcp.StorageReader(closed, key="step-1")',
        StoreClosedError,
        "the store PATH/store was closed: memstore.open it again",
    ),
    Mistake(
        'dcp.load({"w": torch.ones(2)}, checkpoint_id=path + "/nowhere")',
        NotAStoreError,
        "PATH/nowhere is no checkpoint: there is no such folder",
    ),
    Mistake(
        'dcp.load({"w": torch.ones(2)}, checkpoint_id=path + "/~/step-1")',
        NotAStoreError,
        'PATH/~/step-1 is no checkpoint: there is no such folder; "~" is taken as a name: os.path.expanduser makes '
        "your home folder of it",
    ),
]
