"""Files of others, and files for others."""

from __future__ import annotations

from memstore.errors import (
    AlreadyExistsError,
    CorruptionError,
    KeyNotFoundError,
    NotAStoreError,
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
        "PATH/notes.txt is of no known format, or is truncated: say format= (safetensors, memmap, torch, npy)",
    ),
    Mistake(
        'store.attach("new", path + "/cut.safetensors")',
        CorruptionError,
        "'new': PATH/cut.safetensors: it has 10 bytes, and its header alone takes 16: it is truncated, or no "
        "safetensors file",
    ),
    Mistake(
        'store.attach("new", path + "/folder")',
        UnsupportedValueError,
        "PATH/folder: it has no *.safetensors, no *.safetensors.index.json and no meta.json of TensorDict.memmap",
    ),
    Mistake(
        'store.attach("new", path + "/small")',
        UnsupportedValueError,
        "PATH/small is a store: get a key of it, and put that",
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
        "format is 'safetensors', 'memmap' or 'torch', and not 'csv'",
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
    Mistake(
        'convert(path + "/weights.pt", path + "/weights.safetensor")',
        ValueError,
        "no format has the suffix '.safetensor' of PATH/weights.safetensor: did you mean '.safetensors'? For a folder, "
        "or another format, say target_as= (of dcp, huggingface, memmap, memstore-dcp, safetensors, snapshot, torch)",
    ),
    Mistake(
        'convert(path + "/weights.pt", path + "/weights.npy")',
        ValueError,
        "no format has the suffix '.npy' of PATH/weights.npy: files end with .safetensors, or .pt, .pth, .bin or .ckpt "
        "(torch); for others say target_as= (of dcp, huggingface, memmap, memstore-dcp, safetensors, snapshot, torch)",
    ),
    Mistake(
        'convert(path + "/weights.pt", path + "/weights.dcp")',
        ValueError,
        "no format has the suffix '.dcp' of PATH/weights.dcp: for a folder of this name say target_as='dcp'",
    ),
    Mistake(
        'convert(path + "/folder", path + "/out", source_as="dcp")',
        NotAStoreError,
        "PATH/folder is not of the format 'dcp': expected a folder with .metadata, found a folder with 'file'; check "
        "the path",
    ),
    Mistake(
        'convert(path + "/weights.pt", path + "/out", source_as="torchsnapshot")',
        NotAStoreError,
        "PATH/weights.pt is not of the format 'torchsnapshot': expected a folder with .snapshot_metadata, found a "
        "file; it looks like 'torch', so leave source_as= out",
    ),
    Mistake(
        'convert(path + "/folder", path + "/out", source_as="memmap")',
        NotAStoreError,
        "PATH/folder is not of the format 'memmap': expected a folder with meta.json, found a folder with 'file'; "
        "check the path",
    ),
    Mistake(
        'convert(path + "/step-1", path + "/out", source_as="torch")',
        NotAStoreError,
        "PATH/step-1 is not of the format 'torch': expected a file of torch.save, found a folder with ...",
    ),
    Mistake(
        'convert(path + "/folder", path + "/out", source_as="huggingface")',
        NotAStoreError,
        "PATH/folder is not of the format 'huggingface': expected a file of safetensors, or a folder with "
        "*.safetensors, found a folder with 'file'; check the path",
    ),
    Mistake(
        'convert(path + "/folder", path + "/out", source_as="snapshot")',
        NotAStoreError,
        "PATH/folder is not of the format 'snapshot': expected a folder with memstore_snapshot.json, found a folder "
        "with 'file'; check the path",
    ),
    Mistake(
        'convert({"w": torch.ones(2)}, path + "/out.pt")',
        TypeError,
        "convert takes the path of a checkpoint and that of the new one, and not a dict",
    ),
    Mistake(
        'convert(path + "/notes.txt", path + "/out.pt")',
        UnsupportedValueError,
        "PATH/notes.txt is of no known format, or is truncated: say source_as= (of safetensors, torch)",
    ),
    Mistake(
        'convert(path + "/store", path + "/out.pt")',
        NotAStoreError,
        "PATH/store is a store, and no checkpoint: export a key of it to a file, and convert that",
    ),
    Mistake(
        'convert(path + "/weights.pt", path + "/nowhere/out.safetensors")',
        NotAStoreError,
        "PATH/nowhere, in which out.safetensors is to be made, is no folder: make it first",
    ),
    Mistake(
        'convert(path + "/weights.pt", path + "/~/out.safetensors")',
        NotAStoreError,
        'PATH/~, in which out.safetensors is to be made, is no folder; "~" is taken as a name: os.path.expanduser '
        "makes your home folder of it",
    ),
    Mistake(
        'convert(path + "/weights.pt", path + "/~", target_as="snapshot")',
        ValueError,
        'PATH/~ doesn\'t exist; "~" is taken as a name: os.path.expanduser makes your home folder of it',
    ),
    Mistake(
        'convert(path + "/~/weights.pt", path + "/out.safetensors")',
        FileNotFoundError,
        '[Errno 2] there is no such file or folder; "~" is taken as a name: os.path.expanduser makes your home folder '
        "of it: 'PATH/~/weights.pt'",
    ),
    Mistake(
        'convert(path + "/weights.pt", path + "/out", target_as="pt")',
        ValueError,
        "'pt' is no format here; dcp, huggingface, memmap, memstore-dcp, safetensors, snapshot, torch are",
    ),
    Mistake(
        'store.export("policy", path + "/run.csv")',
        ValueError,
        "PATH/run.csv: memstore writes no .csv files: choose a path that ends with .safetensors, or with .pt and "
        "format='torch'",
    ),
    Mistake(
        'convert(path + "/weights.pt", path + "/new.pt", target_as="safetensors")',
        ValueError,
        "PATH/new.pt has the suffix of a torch file, and the target format is 'safetensors': leave target_as= out "
        "for torch, or choose another path",
    ),
    Mistake(
        'store.export("policy", path + "/policy.safetensors", progress=True)',
        TypeError,
        "progress is a function of the bytes done and those in all, and not True: progress=print shows both",
    ),
    Mistake(
        'convert(path + "/weights.pt", path + "/weights.safetensors", progress=True)',
        TypeError,
        "progress is a function of the bytes done and those in all, and not True: progress=print shows both",
    ),
    Mistake(
        'store.attach("fresh", path + "/~/weights.pt")',
        FileNotFoundError,
        '[Errno 2] there is nothing to attach; "~" is taken as a name: os.path.expanduser makes your home folder '
        "of it: 'PATH/~/weights.pt'",
    ),
    Mistake(
        'store.attach("fresh", "s3://bucket/weights.pt")',
        FileNotFoundError,
        "[Errno 2] there is nothing to attach; paths are those of this host, or of storage that is mounted there...",
    ),
    Mistake(
        'store.export("policy", path + "/~/policy.safetensors")',
        FileNotFoundError,
        '[Errno 2] the folder to export to doesn\'t exist: "~" is taken as a name: os.path.expanduser makes your '
        "home folder of it: 'PATH/~'",
    ),
    Mistake(
        'store.export("policy", path + "/~", format="memmap")',
        ValueError,
        'PATH/~ doesn\'t exist; "~" is taken as a name: os.path.expanduser makes your home folder of it',
    ),
    Mistake(
        'store.attach("fresh", path + "/weights.pt", format="safetensors")',
        UnsupportedValueError,
        "PATH/weights.pt isn't of the format 'safetensors': it looks like 'torch', so leave format= out",
    ),
    Mistake(
        'store.attach(path + "/weights.pt", path + "/key")',
        FileNotFoundError,
        "[Errno 2] there is nothing to attach; the key comes first, and then the path: 'PATH/key'",
    ),
]
