"""Fake and deferred tensors, and modules that are made of them."""

from __future__ import annotations

from memstore.errors import (
    NotAStoreError,
    StructureMismatchError,
    UnsupportedValueError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
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
        'materialize_module(deferred_init(torch.nn.Linear, 4, 2), source=path + "/policy")',
        NotAStoreError,
        "there is no snapshot, file or folder at PATH/policy; of a store's key give store.view(key)",
    ),
    Mistake(
        "materialize_module(deferred_init(torch.nn.Linear, 8, 2), source=snapshot)",
        StructureMismatchError,
        "1 of 2 tensors of the snapshot PATH/step-1, under 'model', don't fit the module:\n"
        "  weight: shape [2, 8] in the module, [2, 4] in the source",
    ),
    Mistake(
        'materialize_module(deferred_init(torch.nn.Linear, 4, 2), source={"weight": torch.empty(2, 4, device="meta")})',
        StructureMismatchError,
        "1 of 1 tensors of the dict don't fit the module:\n  weight: the source's is on meta, and has no values",
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
        "value: a fake tensor: it has a shape, but no bytes: give a real one, which materialize_module makes of "
        "a deferred one",
    ),
    Mistake(
        "deferred_init(torch.nn.Linear(4, 2))",
        TypeError,
        "module_fn makes a module, and this Linear is made already: give its class and its arguments, as in "
        "deferred_init(Linear, ...)",
    ),
    Mistake(
        "materialize_module(torch.nn.Linear)",
        TypeError,
        "module is what deferred_init has returned, and not the class Linear",
    ),
    Mistake(
        "materialize_tensor(deferred_init(torch.nn.Linear, 4, 2))",
        TypeError,
        "materialize_tensor takes a tensor, and not a Linear: materialize_module takes modules",
    ),
    Mistake(
        'materialize_module(deferred_init(torch.nn.Linear, 4, 2), dtype="bf16")',
        TypeError,
        "dtype is a torch.dtype, such as torch.bfloat16, and not 'bf16'",
    ),
    Mistake(
        "materialize_module(deferred_init(torch.nn.Linear, 4, 2), source=store)",
        TypeError,
        "source is a Snapshot, a view, a state dict or a path, and not a Store: its view(key) is one",
    ),
    Mistake(
        "materialize_module(deferred_init(torch.nn.Linear, 4, 2), source=module)",
        TypeError,
        "source is a Snapshot, a view, a state dict or a path, and not a Linear: its state_dict() is one",
    ),
    Mistake(
        'materialize_module(deferred_init(torch.nn.Linear, 4, 2), source=path + "/store")',
        UnsupportedValueError,
        "PATH/store is a store: give the view of one of its keys, memstore.open(path).view(key)",
    ),
    Mistake(
        'materialize_module(deferred_init(torch.nn.Linear, 4, 2), source=path + "/folder")',
        UnsupportedValueError,
        "PATH/folder is no snapshot, and no folder with safetensors: check the path",
    ),
    Mistake(
        'materialize_module(deferred_init(torch.nn.Linear, 4, 2), source=path + "/notes.txt")',
        UnsupportedValueError,
        "PATH/notes.txt is no file of safetensors or torch: check the path",
    ),
    Mistake(
        'materialize_module(deferred_init(torch.nn.Linear, 4, 2), source=store.view("policy"))',
        StructureMismatchError,
        "the OrderedDict has none of the module's 2 weights: it has 'w', 'b', and the module 'weight', 'bias'; name "
        "the part of it that is the module's",
    ),
    Mistake(
        'store.load_model("linear", deferred_init(torch.nn.Linear, 4, 2))',
        StructureMismatchError,
        "'linear': version 9 doesn't fit, and nothing was loaded:\n"
        "  model['weight']: a fake tensor, without memory: give a real one, which materialize_module makes of a "
        "deferred one\n"
        "  model['bias']: a fake tensor, without memory: give a real one, which materialize_module makes of a "
        "deferred one",
    ),
    Mistake(
        "pickle.dumps(deferred_init(torch.nn.Linear, 4, 2))",
        UnsupportedValueError,
        "a deferred tensor has no values that could be pickled, saved or sent: materialize it first, or send what "
        "makes it",
    ),
    Mistake(
        "materialize_module(deferred_init(torch.nn.Linear, 4, 2), snapshot)",
        TypeError,
        "buffers_only is True or False, and not a Snapshot: write source= before a snapshot, a view, a state dict or a "
        "path, and device= before a device",
    ),
    Mistake(
        "materialize_module(deferred_init(torch.nn.Linear, 4, 2), dtype=torch.int8)",
        TypeError,
        "dtype is a floating-point dtype, such as torch.bfloat16, and not torch.int8",
    ),
    Mistake(
        "memstore.fake.is_fake(3)",
        TypeError,
        "is_fake takes a tensor, and not an int",
    ),
    Mistake(
        "meta_like(3)",
        TypeError,
        "meta_like takes a tensor, and not an int",
    ),
    Mistake(
        "memstore.deferred_init.is_deferred(3)",
        ValueError,
        "a tensor or a module is needed, and this is an int",
    ),
]
