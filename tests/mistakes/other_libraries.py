"""asyncio, hosts, torch.distributed.checkpoint, TorchStore's API, fake and deferred tensors."""

from __future__ import annotations

from memstore.errors import (
    KeyNotFoundError,
    NotAStoreError,
    StructureMismatchError,
    UnsupportedValueError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'awaited(path, lambda store: store.get("plicy"))',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'?",
    ),
    Mistake(
        'awaited(path, lambda store: store.pop("polcy"))',
        KeyNotFoundError,
        "no key 'polcy': did you mean 'policy'?",
    ),
    Mistake(
        'awaited(path + "/nowhere", lambda store: store.get("policy"))',
        NotAStoreError,
        "PATH/nowhere/store: the parent folder PATH/nowhere doesn't exist: create it first",
    ),
    Mistake(
        'memstore.aio.open("")',
        TypeError,
        "root is the path of a folder, and not ''",
    ),
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
        "materialize_module(deferred_init(torch.nn.Linear, 4, 2), source=3)",
        TypeError,
        "source is a Snapshot, a view, a state dict or a path, and not an int",
    ),
    Mistake(
        'materialize_module(deferred_init(torch.nn.Linear, 4, 2), source=path + "/nowhere.safetensors")',
        NotAStoreError,
        "there is no snapshot, file or folder at PATH/nowhere.safetensors",
    ),
    Mistake(
        "materialize_module(deferred_init(torch.nn.Linear, 8, 2), source=snapshot)",
        StructureMismatchError,
        "1 of 2 tensors of the snapshot PATH/step-1, under 'model', don't fit the module:\n"
        "  weight: shape [2, 8] in the module, [2, 4] in the source",
    ),
    Mistake(
        "state = module.state_dict()\n"
        'materialize_module(deferred_init(torch.nn.Linear, 4, 2), source={"actor": state, "critic": state})',
        StructureMismatchError,
        "the dict has weights of the module's names in 2 of its parts: 'actor' (2 of 2), 'critic' (2 of 2). Say which "
        "part is the module's: give that part alone, as a view or a dict with the module's own names; or materialize "
        "the whole module, and choose the part with check_fn",
    ),
    Mistake(
        "materialize_module(deferred_init(torch.nn.Linear, 4, 2), mesh=3, placements={'wieght': None})",
        StructureMismatchError,
        "placements has names that the module lacks: 'wieght'; the module has 'bias', 'weight'",
    ),
    Mistake(
        "materialize_module(deferred_init(torch.nn.Linear, 4, 2), mesh=3)",
        TypeError,
        "mesh and placements belong together, and one of them is missing",
    ),
    Mistake(
        "meta_like(torch.ones(2))",
        ValueError,
        "a fake tensor is needed, and this is a Tensor on cpu",
    ),
    Mistake(
        'with fake_mode():\n    value = torch.ones(2)\nstore.put("policy", value)',
        UnsupportedValueError,
        "value: a fake tensor: it has a shape, but no bytes: put a real one",
    ),
]
