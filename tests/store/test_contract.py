"""The public names, their parameters, defaults and errors: what callers' code relies on."""

from __future__ import annotations

import inspect

import pytest

import memstore
from memstore import errors

SIGNATURES = {
    "open": (
        "root, mode='a', *, durability=None, checksum=None, inline_limit=None, capacity=None, spill=None, "
        "verify=False, allow_pickle=False, unix_group=None, file_mode=0o600, timeout=30.0, wait=None, cluster=None, "
        "secret=None"
    ),
    "iter_weights": "store, key, *, newer_than=None, prefix='', names=None, timeout=None",
    "Store.put": (
        "self, key, value, *, dtype=None, expect_version=None, history=None, history_bytes=None, delta_of=None, "
        "timeout=None"
    ),
    "Store.put_many": "self, items, *, dtype=None, expect_versions=None, delta_of=False, atomic=True, timeout=None",
    "Store.get": (
        "self, key, default=..., *, as_type=None, out=None, like=None, device=None, dtype=None, non_blocking=False, "
        "strict=True, cast=False, max_age=None, version=None, timeout=None"
    ),
    "Store.get_many": "self, keys, *, timeout=None",
    "Store.keys": "self, prefix='', *, partial=False",
    "Store.delete": "self, key, *, missing_ok=False, expect_version=None, timeout=None",
    "Store.delete_many": "self, keys, *, missing_ok=False, atomic=True, timeout=None",
    "Store.version": "self, key",
    "Store.versions": "self, key",
    "Store.info": "self, key",
    "Store.wait": "self, key, *, newer_than=0, timeout=None",
    "Store.ref": "self, key, *, lease=60.0, version=None",
    "Store.pin": "self, key, *, version=None, timeout=None",
    "Store.stats": "self",
    "Store.gc": "self, *, timeout=None",
    "Store.set_quota": "self, prefix, quota, *, timeout=None",
    "Store.quotas": "self",
    "Store.close": "self",
    "Store.items": "self",
    "Store.values": "self",
    "Store.update": "self, items",
    "Store.pop": "self, key, default=...",
    "Store.setdefault": "self, key, value",
    "Store.tree": "self, prefix=''",
    "Store.verify": "self, keys=None, *, progress=None",
    "Store.attach": "self, key, path, *, format=None, copy=False, expect_version=None, timeout=None",
    "Store.export": "self, key, path, *, format='safetensors', max_shard_size=None, version=None, progress=None",
    "Store.export_hf": (
        "self, key, path, *, config=None, max_shard_size='5GB', dtype=None, prefix='', link=False, version=None, "
        "progress=None"
    ),
    "repair": "root, *, timeout=30.0, progress=None",
    "Ref.get": "self, **options",
    "Store.view": "self, key, *, device=None, version=None, as_type=None",
    "Store.put_sharded": (
        "self, key, value, *, attempt=None, rank=None, world_size=None, process_group=None, dtype=None, "
        "expect_version=None, wait=True, lease=600.0, timeout=None"
    ),
    "Store.pending": "self, key=None, *, timeout=None",
    "Store.abort": "self, key, attempt, *, timeout=None",
    "Store.save_model": "self, key, model, optimizer=None, *, dtype=None, process_group=None, timeout=None",
    "Store.load_model": (
        "self, key, model, optimizer=None, *, strict=True, cast=False, newer_than=None, process_group=None, "
        "timeout=None"
    ),
    "Ref.view": "self, **options",
    "read_rows": "source, index, *, out=None, device=None, cast=False",
    "prefetch_rows": "source, index",
    "StoredTensor.distribute": "self, mesh, placements",
    "bytes_read": "",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_and_defaults(name: str) -> None:
    found = memstore
    for part in name.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters.values()  # type: ignore[arg-type]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[name]})"


BASES = {
    "KeyNotFoundError": KeyError,
    "VersionGoneError": KeyError,
    "StoreFullError": OSError,
    "ResourceLimitError": OSError,
    "InvalidKeyError": ValueError,
    "StructureMismatchError": ValueError,
    "UnsupportedValueError": TypeError,
    "AlreadyExistsError": FileExistsError,
    "PermissionDeniedError": PermissionError,
    "StoreTimeoutError": TimeoutError,
} | dict.fromkeys(
    (
        "VersionConflictError", "CorruptionError", "NotAStoreError", "StoreClosedError", "FormatVersionError",
        "UnsupportedFilesystemError", "ContentionError", "ReadOnlyError", "UnknownOutcomeError", "MutableEntryError",
    ),
    errors.MemstoreError,
)  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_errors_are_what_handlers_expect(name: str) -> None:
    import pickle

    kind = getattr(memstore, name)
    assert kind is getattr(errors, name)
    assert issubclass(kind, errors.MemstoreError) and issubclass(kind, BASES[name])
    error = kind("what is wrong", key="k")
    assert str(error) == "what is wrong" and error.key == "k"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error) and copy.__dict__ == error.__dict__


FIELDS = {
    "EntryInfo": ["key", "version", "kind", "nbytes", "created", "structure", "leaves", "files", "owner"]
    + ["recovered", "spilled"],
    "LeafInfo": ["name", "dtype", "shape", "nbytes", "shards"],
    "ShardInfo": ["offsets", "shape", "rank", "file"],
    "StoreStats": [
        "keys", "live_bytes", "reusable_bytes", "pinned_bytes", "filling_bytes", "pending_bytes",
        "spilled_bytes", "capacity",
        "catalog_bytes",
        "huge_page_bytes", "puts", "gets", "pinned_by",
    ],
    "VerifyReport": ["checked", "unchecked", "damaged", "ok"],
    "RepairReport": ["recovered", "lost", "swept_bytes"],
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_nouns_have_their_fields(name: str) -> None:
    kind = getattr(memstore, name)
    assert list(kind.__dataclass_fields__) == FIELDS[name]
    assert kind.__dataclass_params__.frozen
    assert list(kind.__slots__) == FIELDS[name]


def test_damage_says_where_and_what() -> None:
    import pickle

    error = memstore.CorruptionError("in all words", key="k", path="/a/file", detail="what is wrong with it")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert (one.key, one.path, one.detail, str(one)) == ("k", "/a/file", "what is wrong with it", "in all words")
    for names, text in (
        ({"key": "k", "path": "/a/file"}, "'k': /a/file: torn"),
        ({"path": "/a/file"}, "/a/file: torn"),
        ({"key": "k"}, "'k': torn"),
    ):
        told = memstore.CorruptionError(**names, detail="torn")
        for one in (told, pickle.loads(pickle.dumps(told))):
            assert (one.key, one.path, one.detail) == (names.get("key"), names.get("path"), "torn")
            assert (str(one), one.args) == (text, (text,))
    plain = memstore.CorruptionError("what is wrong")
    assert (plain.key, plain.path, plain.detail) == (None, None, "what is wrong")


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_names_are_documented(name: str) -> None:
    found = memstore
    for part in name.split("."):
        found = getattr(found, part)
    assert found.__doc__


def test_options_are_by_name_only(store: memstore.Store) -> None:
    with pytest.raises(TypeError):
        store.put("key", 1, 0)  # type: ignore[misc]
    with pytest.raises(TypeError):
        store.delete("key", True)  # type: ignore[misc]
    with pytest.raises(TypeError):
        memstore.open(store.root, "a", "disk")  # type: ignore[misc]
