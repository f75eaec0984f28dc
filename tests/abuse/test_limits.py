"""Too many open files, too many mappings: an error that says so, and a store that works again afterwards."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import sys
from collections.abc import Callable

import pytest
import torch

import memstore
from memstore._threads import between_forks
from memstore.distributed.transfers.transfers import Pinned
from memstore.engine.files.mapping import LockFile, OwnedFile, SharedMemory
from tests.children import in_child
from tests.leaks import open_files
from tests.support import faults
from tests.support.equality import assert_same
from tests.support.fork_server import Worker

VALUE = torch.arange(5000)


def use_up_files(leave: int) -> list[int]:
    """Opens files until `leave` more could be opened."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    opened: list[int] = []
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(leave):
        os.close(opened.pop())
    return opened


def close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def calls(store: memstore.Store) -> dict[str, Callable[[], object]]:
    return {
        "get": lambda: store.get("file"),
        "get_many": lambda: store.get_many(["file", "small"]),
        "put": lambda: store.put("file", VALUE),
        "put new": lambda: store.put("new", VALUE),
        "put large": lambda: store.put("file", torch.zeros(1 << 20)),
        "put_many": lambda: store.put_many({"a": VALUE, "file": VALUE}),
        "put small": lambda: store.put("small", 1),
        "delete": lambda: store.delete("other"),
        "ref": lambda: store.ref("file").get(),
        "gc": lambda: store.gc(),
        "stats": lambda: store.stats(),
        "version": lambda: store.version("file"),
        "keys": lambda: list(store),
    }


NEED_NO_FILE = {"put small", "version", "keys", "stats"}


@pytest.mark.parametrize("name", calls(None))
def test_no_file_can_be_opened(root: str, name: str) -> None:
    in_child(_without_files, root, name)
    assert in_child(_still_works, root)


def _without_files(root: str, name: str) -> None:
    with memstore.open(root, timeout=5.0) as store:
        store.put_many({"file": VALUE, "other": VALUE, "small": 0})
        store.get("file")
        store.stats()  # its module is imported now
        before = open_files(root)
        call = calls(store)[name]
        files = use_up_files(leave=0)
        try:
            call()
            failed = False
        except memstore.ResourceLimitError as error:
            failed = True
            assert isinstance(error, OSError) and error.errno == errno.EMFILE
            assert "ulimit -n" in str(error) and root in str(error)
        assert not (failed and name in NEED_NO_FILE)
        assert store.get("small") in (0, 1)  # inline, and in the catalog that is open
        close_all(files)
        if failed:
            call()
        assert_same(VALUE, store.get("other", VALUE))
        store.put("other", VALUE)
        store.gc()  # also what is kept open for the next put
        assert open_files(root) == before


def _still_works(root: str) -> bool:
    with memstore.open(root, timeout=5.0) as store:
        store.put("file", VALUE)
        assert_same(VALUE, store.get("file"))
        store.gc()
        assert store.stats().filling_bytes == 0
    return True


@pytest.mark.parametrize("mode", ["r", "r+", "a"])
def test_a_store_cant_be_opened_for_want_of_files(root: str, mode: str) -> None:
    with memstore.open(root) as store:
        store.put("file", VALUE)
    in_child(_open_with_few_files, root, mode)


def test_a_store_cant_be_created_for_want_of_files(root: str) -> None:
    in_child(_open_with_few_files, root, "a")


def _open_with_few_files(root: str, mode: str) -> None:
    import lmdb._envid  # noqa: F401 - imported by the first opening, which takes a file

    refused = 0
    for leave in range(12):
        path = root if os.path.exists(f"{root}/memstore.json") else f"{root}{leave}"
        files = use_up_files(leave)
        try:
            memstore.open(path, mode, timeout=2.0).close()
        except memstore.ResourceLimitError as error:
            refused += 1
            assert error.errno == errno.EMFILE and "ulimit -n" in str(error)
        finally:
            close_all(files)
        with memstore.open(path, mode, timeout=2.0) as store:
            assert store.get("file", None) is None or (store.get("file") == VALUE).all()
        assert open_files(path) == []
    assert 2 < refused < 12


# --- mappings ---------------------------------------------------------------------------------------------------------


def use_up_mappings(leave: int) -> list[mmap.mmap]:
    """Makes mappings until the kernel gives no more, then lets `leave` go."""
    held: list[mmap.mmap] = []
    try:
        while len(held) < 200_000:
            held.append(mmap.mmap(-1, 4096))
    except OSError as error:
        assert error.errno == errno.ENOMEM
    else:
        pytest.skip("this machine has no limit of mappings that a test could reach")
    del held[-leave:]
    return held


def test_no_mapping_can_be_made(root: str) -> None:
    in_child(_without_mappings, root)
    assert in_child(_still_works, root)


def _without_mappings(root: str) -> None:
    with memstore.open(root, timeout=5.0) as store:
        store.put_many({"file": VALUE, "large": torch.ones(1 << 20), "small": 1})
        store.get_many(["file", "large"])
        values, zeros = [], torch.zeros(1 << 20)
        held = use_up_mappings(leave=20)
        with pytest.raises(memstore.ResourceLimitError, match="max_map_count.*drop held values") as caught:
            for _ in range(100):
                values.append(store.get("file"))
        assert caught.value.errno == errno.ENOMEM and caught.value.key == "file"
        for _ in range(3):
            with pytest.raises(memstore.ResourceLimitError):
                store.get("large")
            with pytest.raises(memstore.ResourceLimitError):
                store.put("large", zeros)
        assert store.get("small") == 1  # needs none
        store.put("small", 2)
        store.delete("small")
        assert all((value == VALUE).all() for value in values)
        values.clear()
        held.clear()
        assert store.get("large").sum() == 1 << 20
        store.put("large", torch.zeros(1 << 20))
        assert_same(VALUE, store.get("file"))
        assert open_files(f"{root}/segments") == []


def test_a_value_of_many_leaves_takes_one_mapping(root: str) -> None:
    in_child(_many_leaves_and_few_mappings, root)


def _many_leaves_and_few_mappings(root: str) -> None:
    with memstore.open(root) as store:
        store.put("key", [torch.full((20,), number) for number in range(500)])
        store.get("key")
        held = use_up_mappings(leave=40)
        assert store.get("key")[499].sum() == 9980
        held.clear()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_no_address_space_is_left(root: str) -> None:
    in_child(_without_address_space, root)


def _without_address_space(root: str) -> None:
    with memstore.open(root, timeout=5.0) as store:
        store.put("large", torch.ones(16 << 20))
        used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE  # noqa: SIM115
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), limits[1]))
        with pytest.raises(memstore.ResourceLimitError) as caught:
            store.get("large")
        assert caught.value.errno == errno.ENOMEM
        resource.setrlimit(resource.RLIMIT_AS, limits)
        assert store.get("large").sum() == 16 << 20


# --- batches of more files than a process may open --------------------------------------------------------------------

MANY = 200


def test_a_batch_of_more_files_than_may_be_open(root: str) -> None:
    in_child(_batch_with_few_files, root)
    with memstore.open(root) as store:
        assert dict(store.items()).keys() == {"other"}


def _leave_few_files() -> None:
    """Lets this process open 70 files more, however many those have left open that ran in it before."""
    used, limit = {int(fd) for fd in os.listdir("/proc/self/fd")}, 0
    while limit - len({fd for fd in used if fd < limit}) < 70:
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _batch_with_few_files(root: str) -> None:
    _leave_few_files()
    sizes = [1 << 18 if number % 50 == 0 else 1000 for number in range(MANY)]  # some are mapped, from 2 MiB on
    with memstore.open(root, timeout=5.0) as store:
        store.put("other", VALUE)
        before = open_files(root)
        for turn in range(3):
            items = {f"{number:03}": torch.full((size,), turn) for number, size in enumerate(sizes)}
            versions = store.put_many(items)
            assert open_files(root) == before
            assert {key: store.version(key) for key in items} == versions
            got = store.get_many(items)
            assert all(torch.equal(got[key], value) for key, value in items.items())
            del got
            assert len(os.listdir(f"{root}/segments")) <= 2 * MANY + 1
        assert store.delete_many(items) == MANY
        store.gc()
        assert len(os.listdir(f"{root}/segments")) == 1
        assert open_files(root) == before


def test_a_failed_batch_of_more_files_than_may_be_open(root: str) -> None:
    in_child(_failed_batch_with_few_files, root)


def _failed_batch_with_few_files(root: str) -> None:
    _leave_few_files()
    with memstore.open(root, timeout=5.0) as store:
        before = open_files(root)
        store.put("000", VALUE)
        failure = faults.raising(OSError(errno.EIO, "injected"))
        with (
            pytest.raises(OSError, match="injected"),
            faults.at_step(1000, failure, names=faults.STEPS - faults.CLEANUPS),
        ):
            store.put_many({f"{number:03}": VALUE + 1 for number in range(MANY)})
        assert list(store) == ["000"] and torch.equal(store.get("000"), VALUE)
        assert open_files(root) == before
        assert len(os.listdir(f"{root}/segments")) == 1
        assert store.stats().filling_bytes == 0


@pytest.mark.parametrize("name", ["get", "put", "put small", "delete", "keys"])
def test_a_forked_child_that_can_open_no_file_says_so(root: str, name: str) -> None:
    """It has to open the catalog anew."""
    with memstore.open(root, timeout=5.0) as store:
        store.put_many({"file": VALUE, "other": VALUE, "small": 0})
        child = os.fork()
        if child == 0:
            code = 1
            try:
                use_up_files(leave=0)
                calls(store)[name]()
            except memstore.ResourceLimitError as error:
                code = 0 if error.errno == errno.EMFILE and root in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    "error, code",
    [
        (OSError(errno.EMFILE, "Too many open files"), errno.EMFILE),
        (ImportError("libx.so: cannot open shared object file: Too many open files"), errno.EMFILE),
        (ImportError("libx.so: failed to map segment from shared object"), errno.ENOMEM),
        (MemoryError(), errno.ENOMEM),
    ],
)
def test_what_is_lacking_at_a_late_import_is_said(error: Exception, code: int) -> None:
    with pytest.raises(memstore.ResourceLimitError, match="can't be imported now") as found, between_forks():
        raise error
    assert found.value.errno == code


def test_other_errors_of_late_imports_stay() -> None:
    with pytest.raises(ImportError, match="no such thing"), between_forks():
        raise ImportError("no such thing")


@pytest.mark.parametrize("kind", [OwnedFile, LockFile, SharedMemory, Pinned, Worker])
def test_a_finalizer_of_a_half_made_object_is_silent(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt before the first line of `__init__` leaves it so."""
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: said.append(found.exc_value))
    half = kind.__new__(kind)
    del half
    assert said == []
