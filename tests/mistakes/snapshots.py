"""Snapshots."""

from __future__ import annotations

from memstore.errors import (
    AlreadyExistsError,
    KeyNotFoundError,
    NotAStoreError,
    ReadOnlyError,
    StructureMismatchError,
    UnsupportedValueError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'memstore.Snapshot.take(path + "/new", module)',
        TypeError,
        "app_state is a dict of Statefuls by name, and not a Linear",
    ),
    Mistake(
        'memstore.Snapshot.take(path + "/new", {"step": 3})',
        TypeError,
        "app_state['step'] is an int, which has no state_dict and load_state_dict: wrap it in memstore.StateDict",
    ),
    Mistake(
        'memstore.Snapshot.take(path + "/new", {"": module})',
        TypeError,
        "the names in app_state are texts that aren't empty, and not ''",
    ),
    Mistake(
        'memstore.Snapshot.take(path + "/new", {"progress": memstore.StateDict(f=lambda: 0)})',
        UnsupportedValueError,
        "app_state['progress']: value['f']: an object of type function: it can't be found by its name (a "
        "lambda, or defined in a function): put what it is made of, or define it at the top level of a module and "
        "use allow_pickle=True",
    ),
    Mistake(
        'memstore.Snapshot.take(path + "/store", {"model": module})',
        AlreadyExistsError,
        "PATH/store is a store: take to a folder of its own, such as PATH/store-step-1",
    ),
    Mistake(
        'memstore.Snapshot.take(path + "/step-1", {"model": module})',
        AlreadyExistsError,
        "PATH/step-1 has a snapshot: take to another path, or remove it first",
    ),
    Mistake(
        'memstore.Snapshot.take(path + "/new", {"model": module}, durability="memory")',
        ValueError,
        "durability is 'process' or 'disk', and not 'memory'",
    ),
    Mistake(
        'memstore.Snapshot.take(path + "/new", {"model": module}, replicated="**")',
        TypeError,
        "replicated is a list of patterns, and not '**'",
    ),
    Mistake(
        'memstore.Snapshot.take("s3://bucket/step-1", {"model": module})',
        ValueError,
        "'s3://bucket/step-1': snapshots are folders of a file system; there is no storage 's3'",
    ),
    Mistake(
        'memstore.Snapshot.take(path + "/~/step-1", {"model": module})',
        ValueError,
        'PATH/~ doesn\'t exist; "~" is taken as a name: os.path.expanduser makes your home folder of it',
    ),
    Mistake(
        'memstore.Snapshot.async_take(path + "/~/step-1", {"model": module})',
        ValueError,
        'PATH/~ doesn\'t exist; "~" is taken as a name: os.path.expanduser makes your home folder of it',
    ),
    Mistake(
        'memstore.Snapshot(path + "/~/step-1").restore({"model": module})',
        NotAStoreError,
        'PATH/~/step-1 is no snapshot: there is no such folder; "~" is taken as a name: os.path.expanduser makes your '
        "home folder of it",
    ),
    Mistake(
        'memstore.Snapshot(path + "/nowhere").restore({"model": module})',
        NotAStoreError,
        "PATH/nowhere is no snapshot: there is no such folder",
    ),
    Mistake(
        'memstore.Snapshot(path + "/store").restore({"model": module})',
        NotAStoreError,
        "PATH/store is a store, and no snapshot: memstore.open opens it",
    ),
    Mistake(
        'memstore.Snapshot(path + "/step-1", storage_options={"region": "eu"})',
        TypeError,
        "storage_options has ['region']; memstore knows ['allow_pickle', 'timeout']",
    ),
    Mistake(
        'snapshot.restore({"model": larger})',
        StructureMismatchError,
        "app_state differs from the snapshot PATH/step-1, nothing was restored:\n"
        "  model/weight: stored with shape [2, 4], here [2, 8]",
    ),
    Mistake(
        'snapshot.restore({"modle": module})',
        StructureMismatchError,
        "app_state differs from the snapshot PATH/step-1, nothing was restored:\n"
        "  modle: the snapshot has nothing of this name; it has model, progress",
    ),
    Mistake(
        'snapshot.restore({"model": torch.nn.Sequential(module)})',
        StructureMismatchError,
        "app_state differs from the snapshot PATH/step-1, nothing was restored:\n"
        "  model/0.bias: missing: the snapshot doesn't have it\n"
        "  model/0.weight: missing: the snapshot doesn't have it\n"
        "  model/bias: unexpected: the snapshot has it, and the module doesn't\n"
        "  model/weight: unexpected: the snapshot has it, and the module doesn't",
    ),
    Mistake(
        'snapshot.read_object("model/weight")',
        KeyNotFoundError,
        "PATH/step-1 has nothing at 'model/weight': did you mean '0/model/weight'?",
    ),
    Mistake(
        'snapshot.read_object("0/model/wieght")',
        KeyNotFoundError,
        "PATH/step-1 has nothing at '0/model/wieght': did you mean '0/model/weight'?",
    ),
    Mistake(
        'snapshot.read_object("0/model/weight", obj_out=torch.zeros(3))',
        StructureMismatchError,
        "0/model/weight: stored with shape [2, 4], here [3]",
    ),
    Mistake(
        'snapshot.read_object("0/model/weight", memory_budget_bytes=0)',
        ValueError,
        "memory_budget_bytes is a positive number of bytes, and not 0",
    ),
    Mistake(
        'snapshot.get_state_dict_for_key("modle")',
        KeyNotFoundError,
        "PATH/step-1 has nothing under 'modle'; it has 'model', 'progress'",
    ),
    Mistake(
        'snapshot.view()["model"]["weight"][0] = 1',
        ReadOnlyError,
        "an assignment to its elements would write into a lazy leaf of 'PATH/step-1', which a view only reads: "
        "take a copy with clone(), and write into that",
    ),
    Mistake(
        'memstore.Snapshot(path + "/of-torch").restore({"model": module})',
        NotAStoreError,
        "PATH/of-torch is no snapshot: it has no memstore_snapshot.json; it is a checkpoint of "
        "torch.distributed.checkpoint, whose `load` reads it: `memstore convert PATH/of-torch NEW` makes a snapshot of "
        "it",
    ),
    Mistake(
        'dcp.save({"w": torch.ones(2)}, checkpoint_id=path + "/by-dcp")\n'
        'memstore.Snapshot(path + "/by-dcp").restore({"model": module})',
        StructureMismatchError,
        "app_state differs from the snapshot PATH/by-dcp, nothing was restored:\n  model: the snapshot has nothing of "
        "this name; it has state, bytes, dcp; it was saved by memstore.integrations.dcp, whose load reads it",
    ),
    Mistake(
        'memstore.Snapshot.take(path + "/never", {}, checksum="no")',
        TypeError,
        "checksum is True or False, and not 'no'",
    ),
    Mistake(
        'memstore.Snapshot(path + "/step-1", storage_options={"allow_pickle": "no"})',
        TypeError,
        "allow_pickle is True or False, and not 'no'",
    ),
    Mistake(
        "snapshot.read_object(3)",
        TypeError,
        "path is one of those that get_manifest() lists, as '0/model/layer.weight', and not 3",
    ),
    Mistake(
        'snapshot.read_object("0/model/weight", memory_budget_bytes="1MB")',
        TypeError,
        "memory_budget_bytes is a whole number, and not '1MB'",
    ),
    Mistake(
        "memstore.Snapshot(None)",
        TypeError,
        "path is that of a folder, as text, and not None",
    ),
    Mistake(
        'memstore.Snapshot.take(None, {"model": module})',
        TypeError,
        "path is that of a folder, as text, and not None",
    ),
    Mistake(
        'memstore.Snapshot.take(path + "/new", {"model": torch.nn.Linear})',
        TypeError,
        "app_state['model'] is the class Linear: give an instance of it",
    ),
    Mistake(
        'memstore.Snapshot.async_take(path + "/step-2", {"model": module}).wait("5")',
        TypeError,
        "a timeout is a number of seconds, and not '5'",
    ),
    Mistake(
        'pickle.dumps(memstore.Snapshot.async_take(path + "/step-3", {"model": module}))',
        TypeError,
        "a PendingSnapshot can't be pickled: another process opens memstore.Snapshot(path) when its wait() has "
        "returned here",
    ),
    Mistake(
        'pickle.dumps(memstore.Snapshot(path + "/step-1", pg=object()))',
        TypeError,
        "a Snapshot with a process group can't be pickled: send its path, and open memstore.Snapshot(path, pg) with "
        "the receiver's own group",
    ),
]
