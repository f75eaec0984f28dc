"""Every lack at every call: an error that says what is lacking and what to do, and a store that is as it was.

A limit that is met in the middle of something may look like damage, like a value that can't be stored, or like a bare
error of the kernel. So this is a table: all limits that a process may have, and all calls that need something.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import memstore
from memstore.convert import convert
from memstore.errors import ResourceLimitError, StoreFullError
from memstore.integrations import dcp
from tests.children import in_child
from tests.small_tmpfs import fill, on_small_tmpfs
from tests.users import USER, as_user, needs_root

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled")

VALUE = torch.arange(10_000)  # 80 KB
LARGE = torch.ones(1 << 20)  # 4 MiB
SPEC = {"x": ((1000,), torch.float32)}
PATIENCE = 60  # seconds for a call, that must not hang


# --- the lacks --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def small_files(nbytes: int, _: str) -> AbstractContextManager[None]:
    return limited(resource.RLIMIT_FSIZE, nbytes)


def few_addresses(room: int, _: str) -> AbstractContextManager[None]:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    return limited(resource.RLIMIT_AS, used + room)


def no_processes(more: int, _: str) -> AbstractContextManager[None]:
    return limited(resource.RLIMIT_NPROC, more)


@contextlib.contextmanager
def few_files(leave: int, _: str) -> Iterator[None]:
    opened: list[int] = []
    with limited(resource.RLIMIT_NOFILE, 256):
        try:
            with contextlib.suppress(OSError):
                while True:
                    opened.append(os.open("/dev/null", os.O_RDONLY))
            for _ in range(leave):
                os.close(opened.pop())
            yield
        finally:
            for fd in opened:
                os.close(fd)


@contextlib.contextmanager
def full_disk(leave: int, folder: str) -> Iterator[None]:
    ballast = fill(folder, leave)
    try:
        yield
    finally:
        os.unlink(ballast)


Lack = Callable[[int, str], AbstractContextManager[None]]
WAYS_OUT: dict[Lack, str] = {  # what the messages name
    small_files: "ulimit -f",
    few_files: "ulimit -n",
    few_addresses: "free memory|ulimit -v|Snapshot.take or dcp.save|there is no memory",
    no_processes: "ulimit -u|no process could be started",
    full_disk: "has no room|no room for",
}


NAMED_OTHERWISE = ("stage the snapshot", "no process could be started", "can't be imported now")  # no path is to blame


# --- the calls --------------------------------------------------------------------------------------------------------


class World:
    """A store and checkpoints in a folder, and all calls that need something of the machine.

    A method is called under a limit, and again without it. What it makes has a new name each time.
    """

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.made = 0
        self.store = memstore.open(f"{folder}/store", timeout=10.0)
        self.store.put_many({"file": VALUE, "small": 1, "large": LARGE, "dict": {"w": VALUE, "b": LARGE}})
        self.rows = self.store.create_dataset("rows", SPEC, capacity=100)
        self.rows.extend({"x": torch.ones(50, 1000)})
        self.ring = memstore.ReplayBuffer(self.store, "ring", SPEC, capacity=100)
        self.ring.extend({"x": torch.ones(50, 1000)})
        self.store.save_model("model", torch.nn.Linear(200, 200))
        memstore.Snapshot.take(f"{folder}/snapshot", self.app_state(), durability="process")
        dcp.save({"w": VALUE, "b": LARGE}, checkpoint_id=f"{folder}/dcp")
        torch.save({"w": VALUE, "b": LARGE}, f"{folder}/source.pt")
        self.store.export("dict", f"{folder}/source.safetensors")

    def app_state(self) -> dict[str, Any]:
        return {"s": memstore.StateDict(w=VALUE, b=LARGE)}

    def target(self) -> dict[str, Any]:
        return {"w": torch.zeros_like(VALUE), "b": torch.zeros_like(LARGE)}

    def new(self, name: str) -> str:
        self.made += 1
        return f"{self.folder}/new-{os.getpid()}-{self.made}-{name}"

    def check(self) -> None:
        """Nothing that was there has suffered; what the calls have made goes."""
        for name in os.listdir(self.folder):
            if name.startswith(("new-", ".memstore-convert")):
                path = f"{self.folder}/{name}"
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
        assert torch.equal(self.store.get("file"), VALUE) and torch.equal(self.store.get("large"), LARGE)
        assert torch.equal(self.store.get("dict")["w"], VALUE) and self.store.get("small") == 1
        assert (self.rows.read_rows(slice(0, 50))["x"] == 1).all()
        self.store.gc()

    # what each is called is its name in the table

    def open(self) -> None:
        memstore.open(self.new("store"), timeout=10.0).close()

    def put(self) -> None:
        self.store.put("file", VALUE)

    def put_inline(self) -> None:
        self.store.put("small", 1)

    def put_large(self) -> None:
        self.store.put("new", LARGE)

    def put_many(self) -> None:
        self.store.put_many({"file": VALUE, "dict": {"w": VALUE, "b": LARGE}})

    def put_sharded(self) -> None:
        attempt = uuid.uuid4().hex
        self.store.put_sharded("sharded", {"w": VALUE, "b": LARGE}, rank=0, world_size=1, attempt=attempt)

    def delete(self) -> None:
        self.store.delete("new", missing_ok=True)

    def get(self) -> None:
        assert torch.equal(self.store.get("file"), VALUE)

    def get_into(self) -> None:
        self.store.get("large", out=torch.zeros_like(LARGE))

    def view(self) -> None:
        assert torch.equal(self.store.view("dict")["w"].clone(), VALUE)

    def wait(self) -> None:
        self.store.wait("file", timeout=10.0)

    def verify_store(self) -> None:
        assert self.store.verify().ok

    def read_rows(self) -> None:
        self.store.open_dataset("rows").read_rows(slice(0, 10))

    def create_and_seal(self) -> None:
        self.store.delete("sealed", missing_ok=True)
        rows = self.store.create_dataset("sealed", SPEC, capacity=100)
        rows.extend({"x": torch.ones(50, 1000)})
        rows.flush()
        rows.seal()

    def extend(self) -> None:
        if len(self.rows) < 100:
            self.rows.extend({"x": torch.ones(1, 1000)})

    def replay_buffer(self) -> None:
        self.store.delete("another", missing_ok=True)
        memstore.ReplayBuffer(self.store, "another", SPEC, capacity=100)

    def add_to_buffer(self) -> None:
        self.ring.extend({"x": torch.ones(2, 1000)})

    def sample(self) -> None:
        self.ring.sample(4)

    def take(self) -> None:
        memstore.Snapshot.take(self.new("snapshot"), self.app_state())

    def async_take(self) -> None:
        memstore.Snapshot.async_take(self.new("snapshot"), self.app_state()).wait()

    def restore(self) -> None:
        state = memstore.StateDict(**self.target())
        memstore.Snapshot(f"{self.folder}/snapshot").restore({"s": state})
        assert torch.equal(state["w"], VALUE)

    def read_object(self) -> None:
        assert torch.equal(memstore.Snapshot(f"{self.folder}/snapshot").read_object("0/s/w"), VALUE)

    def verify(self) -> None:
        memstore.Snapshot(f"{self.folder}/snapshot").verify()

    def dcp_save(self) -> None:
        dcp.save({"w": VALUE, "b": LARGE}, checkpoint_id=self.new("dcp"))

    def dcp_async_save(self) -> None:
        dcp.async_save({"w": VALUE, "b": LARGE}, checkpoint_id=self.new("dcp")).result()

    def dcp_load(self) -> None:
        state = self.target()
        dcp.load(state, checkpoint_id=f"{self.folder}/dcp")
        assert torch.equal(state["w"], VALUE)

    def convert(self) -> None:
        convert(f"{self.folder}/source.pt", self.new("model.safetensors"))

    def convert_to_torch(self) -> None:
        convert(f"{self.folder}/source.safetensors", self.new("model.pt"))

    def convert_to_snapshot(self) -> None:
        convert(f"{self.folder}/source.pt", self.new("snapshot"))

    def convert_dcp(self) -> None:
        convert(f"{self.folder}/dcp", self.new("model.safetensors"))

    def export(self) -> None:
        self.store.export("dict", self.new("model.safetensors"))

    def export_shards(self) -> None:
        self.store.export("dict", self.new("shards"), max_shard_size="1MiB")

    def export_memmap(self) -> None:
        self.store.export("dict", self.new("memmap"), format="memmap")

    def export_torch(self) -> None:
        self.store.export("dict", self.new("model.pt"), format="torch")

    def attach(self) -> None:
        self.store.attach("attached", f"{self.folder}/source.safetensors")
        assert torch.equal(self.store.get("attached")["w"], VALUE)

    def attach_torch(self) -> None:
        self.store.attach("attached", f"{self.folder}/source.pt")
        assert torch.equal(self.store.get("attached")["w"], VALUE)

    def attach_copy(self) -> None:
        self.store.attach("attached", f"{self.folder}/source.pt", copy=True)

    def save_model(self) -> None:
        self.store.save_model("model", torch.nn.Linear(200, 200))

    def load_model(self) -> None:
        self.store.load_model("model", torch.nn.Linear(200, 200))


CALLS = [name for name, found in vars(World).items() if callable(found) and name[0] != "_"]
CALLS = [name for name in CALLS if name not in ("app_state", "target", "new", "check")]
WRITES = ("put_inline", "put_sharded", "dcp_save", "convert", "export_memmap", "export_torch")  # of the fast tests
OPENS = ("put", "take", "dcp_load", "attach_torch", "export_shards")


class HungError(BaseException):
    """A call has hung."""


def told(call: Callable[[], object]) -> Exception | None:
    """What a call raises, which is a typed error."""

    def hang(*_: object) -> None:
        raise HungError

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(PATIENCE)
    try:
        call()
    except (ResourceLimitError, StoreFullError) as error:
        return error
    except CheckpointException as error:
        ((found, _),) = error.failures.values()
        assert isinstance(found, ResourceLimitError | StoreFullError), repr(found)
        return found
    finally:
        signal.alarm(0)
    return None


def go_through(folder: str, lack: Lack, amounts: Iterable[int], names: Iterable[str]) -> dict[str, int]:
    """Makes each call under each limit, then without. Returns how many of each have failed."""
    os.chmod(folder, 0o700)
    world = World(folder)
    failed = dict.fromkeys(names, 0)
    for name in failed:
        call = getattr(world, name)
        for amount in amounts:
            what = f"{name}, {lack.__name__}({amount})"
            try:
                with lack(amount, folder):
                    error = told(call)
                if error is not None:
                    failed[name] += 1
                    _check_message(str(error), folder, WAYS_OUT[lack])
                call()
                world.check()
            except BaseException as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert lack is no_processes or world.store.verify().ok
    return failed


def _check_message(text: str, folder: str, ways_out: str) -> None:
    assert any(way in text for way in ways_out.split("|")), text
    assert any(where in text for where in (folder, *NAMED_OTHERWISE)), text
    assert ".memstore-convert" not in text, f"it names what is written beside the target: {text}"


@pytest.fixture
def folder(scratch: str) -> str:
    os.mkdir(scratch)
    return scratch


def test_files_may_have_no_bytes(folder: str) -> None:
    failed = in_child(go_through, folder, small_files, (0,), WRITES)
    assert all(failed.values()), failed


def test_a_limit_within_the_catalog(folder: str) -> None:
    """A write that it cuts short is an I/O error to LMDB."""
    assert in_child(_put_within_limits, folder) > 2


def _put_within_limits(folder: str) -> int:
    failed = 0
    with memstore.open(f"{folder}/store") as store:
        for number in range(60):
            with small_files(number * mmap.PAGESIZE + 100, folder):
                error = told(partial(store.put, "key", number))
            failed += error is not None
            assert error is None or (isinstance(error, ResourceLimitError) and error.errno == errno.EFBIG), repr(error)
            if error is not None:
                store.put("key", number)
            assert store.get("key") == number
    return failed


def test_no_file_can_be_opened(folder: str) -> None:
    failed = in_child(go_through, folder, few_files, (0, 2), OPENS)
    assert all(failed.values()), failed


def test_the_disk_is_full() -> None:
    failed = on_small_tmpfs(80, go_through, full_disk, (0,), ("export", "export_shards", "create_and_seal"))
    assert all(failed.values()), failed


# --- all of them ------------------------------------------------------------------------------------------------------

READS = {"get", "get_into", "view", "wait", "verify_store", "read_rows", "restore", "read_object", "verify", "sample"}
IN_PLACE = {"extend", "add_to_buffer"}  # what they write to is there


@pytest.mark.full
def test_all_calls_with_small_files(folder: str) -> None:
    failed = in_child(go_through, folder, small_files, (0, 1000, 5000, 200_000, 1_000_000), CALLS, timeout=600.0)
    need_none = READS | IN_PLACE | {"dcp_load", "load_model"}
    assert {name for name, count in failed.items() if not count} == need_none


@pytest.mark.full
def test_all_calls_with_few_files(folder: str) -> None:
    failed = in_child(go_through, folder, few_files, range(8), CALLS, timeout=600.0)
    assert {"open", "put", "put_large", "get", "take", "async_take", "restore", "dcp_load", "export", "convert"} <= {
        name for name, count in failed.items() if count
    }


@pytest.mark.full
def test_all_calls_with_few_addresses(folder: str) -> None:
    """Not with none at all: Python waits for ever for a thread that has no memory to begin."""
    amounts = (1 << 20, 3 << 20, 10 << 20, 30 << 20)
    failed = in_child(go_through, folder, few_addresses, amounts, CALLS, timeout=600.0)
    assert sum(map(bool, failed.values())) > 5, failed


@pytest.mark.full
def test_all_calls_with_a_full_disk() -> None:
    failed = on_small_tmpfs(200, go_through, full_disk, (0, 4096, 100_000, 2_000_000), CALLS)
    need_none = READS | IN_PLACE | {"delete", "dcp_load", "load_model"}
    assert {name for name, count in failed.items() if not count} <= need_none | {"put_inline", "attach", "attach_torch"}


@pytest.mark.full
@needs_root
def test_all_calls_without_processes_and_threads(shared: str) -> None:
    """Root has no such limit, so this is another user."""
    os.mkdir(shared)
    os.chown(shared, USER, USER)
    start_a_program = ("async_take", "verify_store")
    names = [name for name in CALLS if name not in start_a_program or not _is_hidden(sys.executable)]
    failed = as_user(USER, [], go_through, shared, no_processes, (0,), names)
    assert failed["dcp_async_save"] and not failed["put"]


def _is_hidden(path: str) -> bool:
    """Whether other users can't get at it."""
    path = os.path.realpath(path)
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return True
    return False


# --- forked children, and commands ------------------------------------------------------------------------------------


OF_CHILDREN = ("put", "get", "take", "dcp_save", "dcp_load", "export", "attach", "read_rows", "extend")


@pytest.mark.full
@pytest.mark.parametrize("name", OF_CHILDREN)
def test_the_first_call_of_a_forked_child(folder: str, name: str) -> None:
    in_child(_fork_and_call, folder, name)


def _fork_and_call(folder: str, name: str) -> None:
    world = World(folder)
    for lack, amount in ((few_files, 0), (few_files, 1), (small_files, 0)):
        in_child(_call_once, world, name, lack, amount)
    world.check()


def _call_once(world: World, name: str, lack: Lack, amount: int) -> None:
    with lack(amount, world.folder):
        error = told(getattr(world, name))
    needs_none = name in READS | IN_PLACE | {"dcp_load"} and lack is small_files
    assert (error is None) == needs_none or (lack is few_files and amount), repr(error)
    getattr(world, name)()


COMMANDS = {
    "put": "put {store} key {folder}/source.pt",
    "put small": "put {store} key {folder}/small.pt",
    "attach": "attach {store} key {folder}/source.safetensors",
    "cp": "cp {store} file {store} copy",
    "cp to another": "cp {store} file {folder}/new-store",
    "rm": "rm {store} file",
    "export": "export {store} dict {folder}/new.safetensors",
    "export torch": "export {store} dict {folder}/new.pt --format torch",
    "export memmap": "export {store} dict {folder}/new-memmap --format memmap",
    "get": "get {store} file -o {folder}/new.npy",
    "convert": "convert {folder}/source.pt {folder}/new-model.safetensors",
    "convert snapshot": "convert {folder}/snapshot {folder}/new-model.pt",
}


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_say_it(folder: str, name: str) -> None:
    in_child(_prepare, folder)
    text = COMMANDS[name].format(store=f"{folder}/store", folder=folder)
    command = f'ulimit -f 0; exec "{sys.executable}" -m memstore {text}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE, cwd="/")
    assert done.returncode == 3 and "ulimit -f" in done.stderr, done
    assert "Traceback" not in done.stderr
    with memstore.open(f"{folder}/store", "r") as store:
        assert torch.equal(store.get("file"), VALUE) and "copy" not in store and "key" not in store
    assert not [name for name in os.listdir(folder) if name.startswith("new") and name != "new-store"]


def _prepare(folder: str) -> None:
    with memstore.open(f"{folder}/store") as store:
        store.put_many({"file": VALUE, "dict": {"w": VALUE, "b": LARGE}})
        store.export("dict", f"{folder}/source.safetensors")
    torch.save({"w": VALUE, "b": LARGE}, f"{folder}/source.pt")
    torch.save(torch.ones(2), f"{folder}/small.pt")
    memstore.Snapshot.take(f"{folder}/snapshot", {"s": memstore.StateDict(w=VALUE)}, durability="process")
