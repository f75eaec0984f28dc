"""Files of others, and files for others."""

from __future__ import annotations

from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    KeyNotFoundError,
    UnsupportedValueError,
    VersionConflictError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'store.attach("new", path + "/nowhere.safetensors")',
        FileNotFoundError,
        "[Errno 2] there is nothing to attach: 'PATH/nowhere.safetensors'",
    ),
    Mistake(
        'store.attach("new", path + "/notes.txt")',
        UnsupportedValueError,
        "PATH/notes.txt looks like no format that can be attached, or is truncated: say format= "
        "(safetensors, memmap, torch, npy)",
    ),
    Mistake(
        'store.attach("new", path + "/cut.safetensors")',
        CorruptionError,
        "'new': PATH/cut.safetensors: 10 bytes are not even its header: it is truncated, or no safetensors file",
    ),
    Mistake(
        'store.attach("new", path + "/folder")',
        UnsupportedValueError,
        "PATH/folder: it has no *.safetensors, no *.safetensors.index.json and no meta.json of TensorDict.memmap",
    ),
    Mistake(
        'store.attach("new", path + "/objects.npy")',
        UnsupportedValueError,
        "PATH/objects.npy: an array of dtype '|O', which no tensor has: it is a pickle, which can run code; "
        "if you trust whoever wrote it, load it with numpy.load(path, allow_pickle=True), and put the array "
        "into a store that was opened with allow_pickle=True",
    ),
    Mistake(
        'store.attach("new", path + "/pickled.pkl")',
        UnsupportedValueError,
        "PATH/pickled.pkl is a pickle, and none of torch.save. Pickles can run code: if you trust whoever "
        "wrote it, load it with pickle.load, and put the value",
    ),
    Mistake(
        'store.attach("new", path + "/cut.safetensors", format="csv")',
        ValueError,
        "format is 'safetensors', 'memmap', 'torch', 'npy' or None, and not 'csv'",
    ),
    Mistake(
        'store.attach("new", torch.ones(2))',
        TypeError,
        "path is that of a file or folder, as text, and not tensor([1., 1.])",
    ),
    Mistake(
        'store.attach("policy", path + "/cut.safetensors", expect_version=0)',
        VersionConflictError,
        "'policy' is at version 1, and version 0 was expected: get it again and decide anew",
    ),
    Mistake(
        'store.export("plicy", path + "/out.safetensors")',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'?",
    ),
    Mistake(
        'store.export("policy", path + "/nowhere/out.safetensors")',
        FileNotFoundError,
        "[Errno 2] the folder to export to doesn't exist: create it first: 'PATH/nowhere'",
    ),
    Mistake(
        'store.export("policy", path + "/folder", format="memmap")',
        AlreadyExistsError,
        "PATH/folder is there, and no empty folder: export to one that is empty or missing",
    ),
    Mistake(
        'store.export("policy", path + "/folder", format="torch")',
        AlreadyExistsError,
        "PATH/folder is a folder, and the export is a file",
    ),
    Mistake(
        'store.export("note", path + "/out.safetensors")',
        UnsupportedValueError,
        "value['text']: it is no tensor, and safetensors has nothing for it; export as 'torch'",
    ),
    Mistake(
        'store.export("policy", path + "/out.csv", format="csv")',
        ValueError,
        "format is 'safetensors', 'memmap', 'torch', and not 'csv'",
    ),
    Mistake(
        'store.export("policy", path + "/out.pt", format="torch", max_shard_size="1GB")',
        ValueError,
        "max_shard_size is for format='safetensors', and not for 'torch'",
    ),
    Mistake(
        'store.export("policy", path + "/out.pt")',
        ValueError,
        "PATH/out.pt: format='torch' writes .pt files, and format='safetensors' doesn't",
    ),
    Mistake(
        'store.export("policy", path + "/out.npy")',
        ValueError,
        "PATH/out.npy: numpy.save(path, store.get(key)) writes .npy files, and format='safetensors' doesn't",
    ),
    Mistake(
        'store.export("policy", path + "/out", max_shard_size="1 gig")',
        ValueError,
        "a size is a positive number of bytes, or text such as '8GiB' or '500MB', and not '1 gig'",
    ),
    Mistake(
        'store.export("step", path + "/out", format="memmap")',
        UnsupportedValueError,
        "value: an int instead of a TensorDict, tensorclass or dict, which can't be exported as memmap",
    ),
]
