"""Keys that aren't there, and what is no key."""

from __future__ import annotations

from memstore.errors import (
    InvalidKeyError,
    KeyNotFoundError,
    NotAStoreError,
    StoreTimeoutError,
    VersionConflictError,
)
from tests.mistakes.mistake import Mistake

MISTAKES = [
    Mistake(
        'store.get("plicy")',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'?",
    ),
    Mistake(
        'store["Policy"]',
        KeyNotFoundError,
        "no key 'Policy': did you mean 'policy'?",
    ),
    Mistake(
        'store.get("policy/w")',
        KeyNotFoundError,
        "no key 'policy/w': 'policy' is a key, and 'w' a part of its value: get('policy')['w']",
    ),
    Mistake(
        'store.get("policy.b")',
        KeyNotFoundError,
        "no key 'policy.b': 'policy' is a key, and 'b' a part of its value: get('policy')['b']",
    ),
    Mistake(
        'store.get("model/weight")',
        KeyNotFoundError,
        "no key 'model/weight': 'model' is a key, and 'weight' a part of its value: get('model')['weight']",
    ),
    Mistake(
        'store.get("policy/c")',
        KeyNotFoundError,
        "no key 'policy/c': 'policy' is a key, and its value has no 'c', but 'w', 'b'",
    ),
    Mistake(
        'store.get("weights")',
        KeyNotFoundError,
        "no key 'weights': keys() lists the 9 that the store has",
    ),
    Mistake(
        'empty.get("policy")',
        KeyNotFoundError,
        "no key 'policy': the store has none yet; wait('policy') waits for its first put",
    ),
    Mistake(
        'store.get_many(["policy", "plicy"])',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'? (2 keys were named; get(key, default) gets those that are there)",
    ),
    Mistake(
        'store.get_many(["one", "two", "policy"])',
        KeyNotFoundError,
        "no keys 'one', 'two', 2 of the 3 that were named: get(key, default) gets those that are there",
    ),
    Mistake(
        'store.get_many("policy")',
        TypeError,
        "several keys are a list or another iterable of str, and 'policy' is one str: write ['policy']",
    ),
    Mistake(
        'store.version("plicy")',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'?",
    ),
    Mistake(
        'store.info("polciy")',
        KeyNotFoundError,
        "no key 'polciy': did you mean 'policy'?",
    ),
    Mistake(
        'store.ref("old/policy")',
        KeyNotFoundError,
        "no key 'old/policy': did you mean 'policy'?",
    ),
    Mistake(
        'store.view("frame")',
        KeyNotFoundError,
        "no key 'frame': did you mean 'frames'?",
    ),
    Mistake(
        'store.pop("sed")',
        KeyNotFoundError,
        "no key 'sed': did you mean 'seed'?",
    ),
    Mistake(
        'del store["stp"]',
        KeyNotFoundError,
        "no key 'stp': did you mean 'step'?",
    ),
    Mistake(
        'store.delete("plicy")',
        KeyNotFoundError,
        "no key 'plicy': did you mean 'policy'?",
    ),
    Mistake(
        'store.delete_many(["policy", "nothing", "none"])',
        KeyNotFoundError,
        "no keys 'nothing', 'none', 2 of the 3 that were named: nothing was deleted; missing_ok=True leaves "
        "out what isn't there",
    ),
    Mistake(
        'list(store.keys("pol*"))',
        UserWarning,
        "keys('pol*'): no key starts with this text, in which a wildcard has no meaning; keys('pol') gives "
        "all that start with 'pol', and fnmatch.filter(store.keys(), 'pol*') matches",
    ),
    Mistake(
        'store.clear("pol*")',
        UserWarning,
        "clear('pol*'): no key starts with this text, in which a wildcard has no meaning; keys('pol') gives "
        "all that start with 'pol', and fnmatch.filter(store.keys(), 'pol*') matches",
    ),
    Mistake(
        'store.wait_any(prefix="pol*", timeout=0.0)',
        StoreTimeoutError,
        "no key that starts with 'pol*' got a newer version within 0 s; a prefix is plain text, and not a pattern",
    ),
    Mistake(
        'store.wait_any(["later"], timeout=0.0)',
        StoreTimeoutError,
        "'later' got no newer version within 0 s",
    ),
    Mistake(
        'memstore.destroy(path + "/~/run")',
        NotAStoreError,
        'PATH/~/run doesn\'t exist; "~" is taken as a name: os.path.expanduser makes your home folder of it: nothing '
        "was removed; memstore.stores() lists the stores of this host",
    ),
    Mistake(
        'store.put(torch.zeros(2), "policy")',
        InvalidKeyError,
        "put takes the key and then the value, and the key here is a Tensor: put('policy', ...)",
    ),
    Mistake(
        "store.put(3, torch.zeros(2))",
        InvalidKeyError,
        "a key is a str, and 3 is int: write '3'",
    ),
    Mistake(
        "next(iter(torch.utils.data.DataLoader(store)))",
        InvalidKeyError,
        "a key is a str, and 0 is int: write '0'. Rows are those of one value: store.view(key)[...]; a DataLoader "
        "takes memstore.StoreDataset(store, key)",
    ),
    Mistake(
        'store.put(b"policy", 1)',
        InvalidKeyError,
        "a key is a str, and b'policy' is bytes: decode() it",
    ),
    Mistake(
        'store.put(("runs", 3), 1)',
        InvalidKeyError,
        'a key is a str, and this is a tuple: join its parts, by "/" say',
    ),
    Mistake(
        "store.tree(3)",
        InvalidKeyError,
        "a prefix of keys is a str, and 3 is int: write '3'",
    ),
    Mistake(
        'store.delete(["step", "seed"])',
        InvalidKeyError,
        "a key is a str, and this is a list: name one; get_many and delete_many take several",
    ),
    Mistake(
        'store.put(Path("policy"), 1)',
        InvalidKeyError,
        "a key is a str, and this is a PosixPath: os.fspath() of it is one",
    ),
    Mistake(
        'store.put("", 1)',
        InvalidKeyError,
        "a key has at least one character, and this one has none: give the value a name",
    ),
    Mistake(
        'store.put("x" * 600, 1)',
        InvalidKeyError,
        "a key has at most 500 bytes, and 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'... has 600: shorten it, "
        "or hash it",
    ),
    Mistake(
        'store.put("a\\0b", 1)',
        InvalidKeyError,
        "a key has no NUL, and 'a\\x00b' has one: remove it",
    ),
    Mistake(
        'store.update([("policy", 1)])',
        TypeError,
        "update takes a dict of values by their keys, and this is a list: update({'key': value}), or "
        "put(key, value) for one",
    ),
    Mistake(
        'store.put_many([("policy", 1)])',
        TypeError,
        "put_many takes a dict of values by their keys, and this is a list: put_many({'key': value}), or "
        "put(key, value) for one",
    ),
    Mistake(
        'store.put_many({"policy": 1}, expect_versions={"polcy": 1})',
        ValueError,
        "expect_versions names 'polcy', which is not among the items: put it too, or leave it out",
    ),
    Mistake(
        'store.put("policy", 1, expect_version=0)',
        VersionConflictError,
        "'policy' is at version 1, and version 0 was expected: get it again and decide anew",
    ),
    Mistake(
        'store.put("fresh", 1, expect_version=3)',
        VersionConflictError,
        "'fresh' doesn't exist, and version 3 was expected: get it again and decide anew",
    ),
    Mistake(
        'store.put("policy", 1, expect_version="1")',
        TypeError,
        "expect_version is a whole number, and not '1'",
    ),
    Mistake(
        'store.wait("policy", newer_than=10**6, timeout=0)',
        StoreTimeoutError,
        "'policy' is at version 1: no version newer than 1000000 within 0 s",
    ),
    Mistake(
        'store.wait("plicy", timeout=0)',
        StoreTimeoutError,
        "'plicy' doesn't exist: no version newer than 0 within 0 s; did you mean 'policy'?",
    ),
    Mistake(
        "pickle.dumps(store.items())",
        TypeError,
        "items() is read while it is iterated over: send the store, or dict(store.items())",
    ),
    Mistake(
        'store.put_many({"step": 4}, expect_versions=0)',
        TypeError,
        "expect_versions is a dict of versions by key, as {'key': 0}, and not 0: give 0 for each key "
        "that must not exist",
    ),
    Mistake(
        'store.put_many({"step": 4}, expect_versions={"step": None})',
        TypeError,
        "expect_versions['step'] is a whole number, and not None",
    ),
    Mistake(
        'store.wait("never", newer_than=-1, timeout=0)',
        StoreTimeoutError,
        "'never' doesn't exist: no version newer than 0 within 0 s",
    ),
    Mistake(
        'store.delete("step", missing_ok="no")',
        TypeError,
        "missing_ok is True or False, and not 'no'",
    ),
    Mistake(
        'store.wait("halves", timeout=0)',
        StoreTimeoutError,
        "'halves' doesn't exist: no version newer than 0 within 0 s; attempt 'first' waits for rank 1; "
        "abort('halves', 'first') gives it up",
    ),
    Mistake(
        "store.get(np.int64(3))",
        InvalidKeyError,
        "a key is a str, and this is an int64",
    ),
]
