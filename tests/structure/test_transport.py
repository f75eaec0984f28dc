"""Leaves through multiprocessing: they arrive, and the sender's memory stays the sender's."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset, TensorDataset

from memstore import structure
from memstore.engine.files.mapping import map_file
from tests.structure.test_matrix import jagged
from tests.support.equality import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

# What is started anew imports torch anew: one test does in the fast run, the others there by the fork server only.
STARTED = ["forkserver", pytest.param("spawn", marks=pytest.mark.full)]


def mapped(value: Any) -> Any:
    """The value as a get gives it: over a real mapping of a file."""
    flat = structure.flatten(value, inline_limit=0)
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, max(flat.plan.nbytes, 1))
        content = np.zeros(flat.plan.nbytes, np.uint8)
        structure.fill(flat, content)
        os.pwrite(fd, content.tobytes(), 0)
        mapping = map_file(fd, max(flat.plan.nbytes, 1))
    finally:
        os.close(fd)
    return structure.rebuild(flat.plan, flat.objects, np.asarray(mapping)[: flat.plan.nbytes], mapping)


def contents() -> Any:
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "a": torch.randn(5),
        "p": torch.nn.Parameter(torch.randn(3)),
        "i": torch.arange(4)[1:],
        "turned": base.t(),
        "wide": torch.randn(3).expand(4, 3),
        "half": torch.randn(3).bfloat16(),
        "empty": torch.zeros(0, 3),
        "td": TensorDict({"x": torch.randn(2, 3), "s": "text"}, [2]),
        "j": jagged(),
    }


def answer(inbox: Any, outbox: Any) -> None:
    """In the other process: writes into what arrives, and sends it back."""
    while True:
        value = inbox.get()
        if value is None:
            return
        outbox.put(dict(value))
        if inbox.get() == "write":
            value["a"].fill_(7)
            value["td"]["x"].fill_(7)
            outbox.put("written")


@pytest.mark.parametrize("method", ["fork", *STARTED])
def test_leaves_arrive_and_the_sender_keeps_its_own(method: str) -> None:
    context = multiprocessing.get_context(method)
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=answer, args=(inbox, outbox))
    process.start()
    try:
        value = contents()
        got = mapped(value)
        addresses = [got["a"].data_ptr(), got["td"]["x"].data_ptr(), got["j"]._values.data_ptr()]
        alias = got["a"].numpy()
        inbox.put(got)
        assert_same(value, outbox.get(timeout=200))
        inbox.put("write")
        assert outbox.get(timeout=200) == "written"
        assert_same(value, got)
        assert (alias == value["a"].numpy()).all()
        assert addresses == [got["a"].data_ptr(), got["td"]["x"].data_ptr(), got["j"]._values.data_ptr()]
        inbox.put(None)
        process.join(100)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()


def sizes_of_sent(value: torch.Tensor) -> int:
    """The bytes of shared memory that a send of the tensor makes."""
    made: list[int] = []
    original = torch.UntypedStorage._new_shared

    def counting(size: int, *arguments: Any, **options: Any) -> Any:
        made.append(size)
        return original(size, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "_new_shared", counting)
        ForkingPickler.dumps(value)
    return sum(made)


def test_a_send_copies_the_bytes_of_the_view_and_no_more() -> None:
    got = mapped({"big": torch.zeros(1000, 100), "small": torch.zeros(3)})
    assert sizes_of_sent(got["small"]) == 12
    assert sizes_of_sent(got["big"][10:12]) == 800
    assert sizes_of_sent(got["big"][:, :2]) == 8000
    assert sizes_of_sent(got["big"][:, :1].expand(1000, 300)) == 4000
    assert sizes_of_sent(got["big"].untyped_storage()) == 400_000
    assert sizes_of_sent(torch.zeros(5)) == 0  # not ours: torch's own way
    assert not got["big"].is_shared()


def test_sparse_tensors_of_leaves() -> None:
    got = mapped({"i": torch.tensor([[0, 1]]), "v": torch.ones(2)})
    with torch.sparse.check_sparse_tensor_invariants(False):
        sparse = torch.sparse_coo_tensor(got["i"], got["v"], (3,), is_coalesced=True)
    sizes_of_sent(sparse)
    assert not got["v"].is_shared() and not got["i"].is_shared()


def test_non_leaves_are_refused_as_by_torch() -> None:
    got = mapped({"p": torch.nn.Parameter(torch.ones(2))})
    with pytest.raises(RuntimeError, match="non-leaf"):
        sizes_of_sent(got["p"] * 1 + got["p"])
    with pytest.raises(RuntimeError, match="non-leaf"):
        sizes_of_sent(got["p"][0:1])


class Rows(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.data = mapped(torch.arange(40.0).reshape(10, 4))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_data_loader_workers() -> None:
    rows = Rows()
    batches = list(DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork"))
    assert torch.equal(torch.cat(batches), rows.data)
    single = list(DataLoader(rows, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    assert torch.equal(torch.stack(single), rows.data)


# -- arguments of a process that is started --------------------------------------------------------------------------


@pytest.mark.parametrize("method", STARTED)
def test_leaves_in_the_data_set_of_started_workers(method: str) -> None:
    got = mapped({"x": torch.arange(40.0).reshape(10, 4), "y": torch.arange(10)})
    dataset = TensorDataset(got["x"], got["x"][:, 1], got["y"])
    loader = DataLoader(dataset, batch_size=5, num_workers=2, multiprocessing_context=method)
    batches = list(loader)
    assert torch.equal(torch.cat([rows for rows, _, _ in batches]), got["x"])
    assert torch.equal(torch.cat([column for _, column, _ in batches]), got["x"][:, 1])
    assert torch.equal(torch.cat([labels for _, _, labels in batches]), got["y"])
    assert not got["x"].is_shared()


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.full), "forkserver"])
def test_each_started_process_gets_the_contents_of_its_time(method: str) -> None:
    context = multiprocessing.get_context(method)
    value = contents()
    got = mapped(value)
    processes: list[Any] = []
    try:
        for number in range(2):
            got["a"].fill_(number)
            outbox = context.SimpleQueue()
            processes.append(context.Process(target=report, args=(outbox, got)))
            processes[-1].start()
            assert outbox.get() == (number, "text")
            holding = [len(process._popen._memstore_copies) for process in processes]
            assert holding[-1] >= len(value) - 1 and not any(holding[:-1])  # those of the last one only
        copies = [weakref.ref(copy) for copy in processes[-1]._popen._memstore_copies]
        for process in processes:
            process.join(100)
            assert process.exitcode == 0
        assert_same(value["td"], got["td"])
        processes.clear()
        process = None
        gc.collect()
        assert not any(copy() for copy in copies)
    finally:
        for process in processes:
            process.kill()
            process.join()


def report(outbox: Any, value: Any) -> None:
    outbox.put((int(value["a"][0]), value["td"]["s"]))


def test_a_queue_keeps_no_copies() -> None:
    got = mapped(torch.zeros(1000))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        ForkingPickler.dumps(got)
    gc.collect()
    # torch's resource sharer duplicates each descriptor until it is fetched; the copies' own are closed
    assert len(os.listdir("/proc/self/fd")) <= before + 51 + 2
