"""Stores that can't be opened, or not so."""

from __future__ import annotations

from memstore.errors import (
    AlreadyExistsError,
    InvalidAddressError,
    NotAStoreError,
    PermissionDeniedError,
    ReadOnlyError,
    StoreTimeoutError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'memstore.open(path + "/nowhere", "r")',
        NotAStoreError,
        "PATH/nowhere doesn't exist: memstore.open creates it with mode 'a', and waits for it with wait=",
    ),
    Mistake(
        'memstore.Store(path + "/store")',
        TypeError,
        "memstore.open(path) opens a store, and not Store('PATH/store')",
    ),
    Mistake(
        'memstore.open(path + "/nowhere/store")',
        NotAStoreError,
        "PATH/nowhere/store: the parent folder PATH/nowhere doesn't exist: create it first",
    ),
    Mistake(
        'memstore.open(path + "/nowhere/store", "r")',
        NotAStoreError,
        "PATH/nowhere/store: the parent folder PATH/nowhere doesn't exist: check the path; modes 'r' and 'r+' open "
        "only what is there, and with wait= they wait until somebody makes it",
    ),
    Mistake(
        'memstore.open(path + "/~/store")',
        NotAStoreError,
        'PATH/~/store: the parent folder PATH/~ doesn\'t exist; "~" is taken as a name: os.path.expanduser makes your '
        "home folder of it",
    ),
    Mistake(
        'memstore.open(path + "/~")',
        NotAStoreError,
        'PATH/~ doesn\'t exist; "~" is taken as a name: os.path.expanduser makes your home folder of it',
    ),
    Mistake(
        'memstore.open(path + "/step-1", "r")',
        NotAStoreError,
        "PATH/step-1 is a snapshot, and no store: memstore.Snapshot reads it, store.attach serves it",
    ),
    Mistake(
        'memstore.open(path + "/notes.txt")',
        NotAStoreError,
        "PATH/notes.txt is not a folder, and a store is one: check the path",
    ),
    Mistake(
        'memstore.open(path + "/folder")',
        NotAStoreError,
        "PATH/folder is no store, and not empty (it has 'file'): choose a new or empty folder",
    ),
    Mistake(
        'memstore.open(path + "/folder", "r")',
        NotAStoreError,
        "PATH/folder is no store: it has no memstore.json; mode 'a' creates one in an empty folder",
    ),
    Mistake(
        'memstore.open(path + "/spoiled")',
        NotAStoreError,
        "PATH/spoiled/memstore.json is foreign or damaged: Object missing required field `format`: put back "
        "what was there, or choose another folder",
    ),
    Mistake(
        'memstore.open(path + "/step-1")',
        NotAStoreError,
        "PATH/step-1 is a snapshot, and no store: memstore.Snapshot reads it, store.attach serves it",
    ),
    Mistake(
        'memstore.open("")',
        TypeError,
        "root is the path of a folder, and not ''",
    ),
    Mistake(
        "memstore.open(3)",
        TypeError,
        "root is the path of a folder, and not 3",
    ),
    Mistake(
        'memstore.open("s3://bucket/store")',
        ValueError,
        "root is a folder of this host, or of storage that is mounted there, and not 's3://bucket/store'",
    ),
    Mistake(
        'memstore.open(path + "/store", "rw")',
        ValueError,
        "mode is 'r', 'r+', 'a', 'x' or 'w', and not 'rw'",
    ),
    Mistake(
        'memstore.open(path + "/store", "x")',
        AlreadyExistsError,
        "PATH/store is a store already, and mode 'x' asks for a new one",
    ),
    Mistake(
        'memstore.open(path + "/store", wait=30.0)',
        ValueError,
        "mode 'a' makes the store itself: wait= is for modes 'r' and 'r+', which need one",
    ),
    Mistake(
        'memstore.open(path + "/nowhere", cluster="node-1:7411")',
        InvalidAddressError,
        "'node-1:7411': an address is tcp://IP:PORT, such as tcp://10.0.0.1:4242 or tcp://[fd00::1]:4242, with numbers "
        "and no names",
    ),
    Mistake(
        'memstore.open(path + "/nowhere", "x", cluster="tcp://127.0.0.1:7411")',
        ValueError,
        "mode 'x' creates a store, and cluster= joins one: use mode 'a'",
    ),
    Mistake(
        'memstore.open(path + "/nowhere", "r", wait=0.0)',
        StoreTimeoutError,
        "PATH/nowhere doesn't exist; nobody has made a store there within 0 s",
    ),
    Mistake(
        'memstore.open(path + "/folder", "r+", wait=0.0)',
        StoreTimeoutError,
        "PATH/folder is no store: it has no memstore.json; mode 'a' creates one in an empty folder; nobody "
        "has made a store there within 0 s",
    ),
    Mistake(
        'memstore.open(path + "/notes.txt", "r", wait=30.0)',
        NotAStoreError,
        "PATH/notes.txt is not a folder, and a store is one: check the path",
    ),
    Mistake(
        'memstore.open(path + "/nowhere", "r", wait="30 s")',
        TypeError,
        "a timeout is a number of seconds, and not '30 s'",
    ),
    Mistake(
        'memstore.open(path + "/store", durability="Disk")',
        ValueError,
        "durability is 'process' or 'disk', and not 'Disk'",
    ),
    Mistake(
        'memstore.open(path + "/store", durability="disk")',
        ValueError,
        "PATH/store was created with durability='process', which can't be changed; 'disk' was asked for: "
        "leave durability out, or choose another folder",
    ),
    Mistake(
        'memstore.open(path + "/store", inline_limit=0)',
        ValueError,
        "PATH/store was created with inline_limit=1536, which can't be changed; 0 was asked for: leave "
        "inline_limit out, or choose another folder",
    ),
    Mistake(
        'memstore.open(path + "/new", inline_limit="1KiB")',
        TypeError,
        "inline_limit is a whole number, and not '1KiB'",
    ),
    Mistake(
        'memstore.open(path + "/store", capacity="8 gigs")',
        ValueError,
        "a size is a positive number of bytes, or text such as '8GiB' or '500MB', and not '8 gigs'",
    ),
    Mistake(
        'memstore.open(path + "/store", "r", capacity="8GiB")',
        ReadOnlyError,
        "mode 'r' can't set capacity: open the store with 'r+' for that",
    ),
    Mistake(
        'memstore.open(path + "/new", file_mode=0o777)',
        ValueError,
        "file_mode is 0o600, with 0o060 or 0o006 or parts of them added, and not 0o777",
    ),
    Mistake(
        'memstore.open(path + "/new", unix_group="no-such-group")',
        PermissionDeniedError,
        "this machine has no group 'no-such-group'",
    ),
    Mistake(
        'memstore.open(path + "/store", timeout="soon")',
        TypeError,
        "a timeout is a number of seconds, and not 'soon'",
    ),
    Mistake(
        'memstore.repair(path + "/nowhere")',
        NotAStoreError,
        "PATH/nowhere doesn't exist: memstore.open creates it with mode 'a', and waits for it with wait=",
    ),
    Mistake(
        "reader.gc()",
        ReadOnlyError,
        "PATH/store was opened with mode 'r': open it with 'r+' or 'a' to write",
    ),
    Mistake(
        'reader.delete("policy")',
        ReadOnlyError,
        "PATH/store was opened with mode 'r': open it with 'r+' or 'a' to write",
    ),
    Mistake(
        'memstore.open(path + "/nowhere", cluster="tcp://127.0.0.1:0")',
        InvalidAddressError,
        "'tcp://127.0.0.1:0': an address is for life, so it needs a port of its own: 1 to 65535",
    ),
    Mistake(
        'memstore.open(path + "/store", allow_pickle="0")',
        TypeError,
        "allow_pickle is True or False, and not '0'",
    ),
    Mistake(
        'memstore.open(path + "/store", verify="yes")',
        TypeError,
        "verify is True or False, and not 'yes'",
    ),
    Mistake(
        'memstore.open(path + "/new", checksum="yes")',
        TypeError,
        "checksum is True or False, and not 'yes'",
    ),
    Mistake(
        'memstore.open(path + "/new", unix_group=-1)',
        ValueError,
        "unix_group is a group's name or its number, and not -1",
    ),
    Mistake(
        "memstore.repair(None)",
        TypeError,
        "root is the path of a folder, and not None",
    ),
    Mistake(
        "memstore.repair(store)",
        TypeError,
        "root is the path of a folder, and not <memstore.Store PATH/store (mode 'a')>, whose root is one",
    ),
    Mistake(
        'memstore.repair(path + "/empty", progress=True)',
        TypeError,
        "progress is a function of the bytes done and those in all, and not True: progress=print shows both",
    ),
    Mistake(
        "memstore.join(None)",
        TypeError,
        "root is the path of a folder, and not None",
    ),
]
