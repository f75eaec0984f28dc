"""Views and lazy leaves travel as references: small, pinned on their way, checked when they arrive."""

from __future__ import annotations

import pickle
import shutil
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset

import memstore
from memstore import StoredTensor
from memstore.engine.sync.primitives import boot_clock
from tests.children import in_child
from tests.inside import root_of
from tests.store.backends import overwrite_and_delete
from tests.support.equality import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def value() -> TensorDict:
    inner = TensorDict({"b": torch.arange(500).reshape(500, 1)}, [500])
    return TensorDict({"a": torch.rand(500, 4), "p": torch.nn.Parameter(torch.rand(500)), "n": inner}, [500])


def test_a_view_is_some_hundred_bytes_and_40_a_leaf(store: memstore.Store, reads: Any) -> None:
    store.put("key", TensorDict({f"layer {i}": torch.rand(64, 64) for i in range(300)}, [64]))
    view = store.view("key")
    with reads() as count:
        names = len(pickle.dumps(list(view.keys())))
        assert len(pickle.dumps(view)) - names < 600 + 40 * 300
        assert len(pickle.dumps(view[3:9])) - names < 600 + 40 * 300
        assert len(pickle.dumps(view["layer 7"][5:, 3])) < 400
        assert len(ForkingPickler.dumps(view["layer 7"])) < 400
        assert count() == 0


@pytest.mark.parametrize("inline_limit", [0, 1 << 16])
def test_what_arrives_is_what_was_sent(root: str, inline_limit: int) -> None:
    with memstore.open(root, inline_limit=inline_limit) as store:
        store.put("key", value())
        view, plain = store.view("key"), store.get("key")
        sent = {
            "view": view,
            "leaf": view["a"],
            "part": view["a"][::3, 1:].transpose(0, 1)[None],
            "empty": view["a"][7:7],
            "scalar": view["n", "b"][3, 0],
            "complex": torch.view_as_complex(view["a"].view(500, 2, 2)),
            "expanded": view["p"].detach()[:1].expand(7, 1),
        }
        message = pickle.dumps(sent)
        overwrite_and_delete(store)
        found = pickle.loads(message)
        assert_same(plain.detach().clone(), found["view"].detach().clone())
        assert_same(plain["a"][::3, 1:].transpose(0, 1)[None].clone(), found["part"].clone())
        for name, leaf in sent.items():
            if name != "view":
                assert type(found[name]) is StoredTensor
                assert (found[name].stride(), found[name].dtype) == (leaf.stride(), leaf.dtype)
                assert torch.equal(found[name].clone(), leaf.clone())
        parameter = found["view"]["p"]
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.requires_grad
        assert found["view"]["a"].stored.source is found["leaf"].stored.source
        del view, plain, sent, found, leaf, parameter


def test_it_survives_a_lease_and_then_pins(store: memstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("key", value())
    expected = store.get("key").detach().clone()
    early, late = pickle.dumps(store.view("key")), pickle.dumps(store.view("key")["a"])
    view = pickle.loads(early)
    for module in ("reuse", "sweep"):
        monkeypatch.setattr(f"memstore.engine.protocols.{module}.boot_clock", lambda: boot_clock() + int(120e9))
    overwrite_and_delete(store)
    assert_same(expected, view.detach().clone())
    del view
    overwrite_and_delete(store)
    with pytest.raises(memstore.VersionGoneError, match=r"'key'.*60 s"):
        pickle.loads(late)


def test_a_ref_gives_its_own_lease(store: memstore.Store) -> None:
    store.put("key", value())
    view = store.ref("key", lease=7.0).view()
    assert view["a"].stored.source.pin.options.lease == 7.0


def test_where_the_store_isnt_it_says_what_it_looked_for(scratch: str) -> None:
    with memstore.open(scratch) as store:
        version = store.put("key", value())
        message = pickle.dumps(store.view("key")["a"])
        identity = root_of(store).settings.store
    shutil.move(scratch, f"{scratch}-elsewhere")
    with pytest.raises(memstore.NotAStoreError, match=f"version {version} of 'key'.*{identity}.*{scratch}"):
        in_child(pickle.loads, message)
    memstore.open(scratch).close()
    with pytest.raises(memstore.VersionGoneError, match="another store"):
        in_child(pickle.loads, message)


def test_a_store_that_is_only_read_sends_no_leases(root: str) -> None:
    with memstore.open(root, inline_limit=0) as store:
        store.put("key", torch.rand(10))
    with memstore.open(root, "r") as store, pytest.raises(memstore.ReadOnlyError, match="lease"):
        pickle.dumps(store.view("key"))


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.__setitem__(1, 1 << 40),
        lambda fields: fields.__setitem__(1, -4),
        lambda fields: fields.__setitem__(2, [1 << 20]),
        lambda fields: fields.__setitem__(3, [1, -1]),
        lambda fields: fields.__setitem__(3, [1]),
        lambda fields: fields.__setitem__(0, "float99"),
        lambda fields: fields.__setitem__(4, 99),
        lambda fields: fields.pop(),
    ],
)
def test_a_reference_is_checked_on_arrival(store: memstore.Store, change: Any) -> None:
    import msgspec

    store.put("key", torch.rand(100, 10))
    restore, (source, packed) = store.view("key")[3:, 1:].__reduce_ex__(2)
    assert torch.equal(restore(source, packed).clone(), store.get("key")[3:, 1:])
    fields = msgspec.msgpack.decode(packed)
    change(fields)
    with pytest.raises(memstore.CorruptionError, match="'key'.*reference"):
        restore(source, msgspec.msgpack.encode(fields))


# --- ways to send -----------------------------------------------------------------------------------------------------


def answer(inbox: Any, outbox: Any) -> None:
    view = inbox.get(timeout=200)
    outbox.put((type(view["a"]) is StoredTensor, view["a"][3:5].clone().tolist(), view["n"][2:4]))
    inbox.get(timeout=200)


def test_through_a_queue(store: memstore.Store) -> None:
    store.put("key", value())
    context = multiprocessing.get_context("fork")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=answer, args=(inbox, outbox))
    process.start()
    try:
        inbox.put(store.view("key"))
        is_lazy, rows, part = outbox.get(timeout=200)
        assert is_lazy
        assert rows == store.get("key")["a"][3:5].tolist()
        assert type(part["b"]) is StoredTensor
        assert part["b"].tolist() == [[2], [3]]
        inbox.put(None)
        process.join(100)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        del part


class Rows(Dataset[Any]):
    def __init__(self, view: Any) -> None:
        self.view = view

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.view["a"][index] * 2

    def __getitems__(self, indices: list[int]) -> Any:
        return memstore.read_rows(self.view["a"], indices)


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.full)])
def test_to_the_workers_of_a_data_loader(method: str, store: memstore.Store) -> None:
    store.put("key", value())
    plain = store.get("key")["a"]
    data = Rows(store.view("key"))
    loader = DataLoader(data, batch_size=100, num_workers=1, multiprocessing_context=method, collate_fn=same)
    assert torch.equal(torch.cat(list(loader)), plain)


def same(batch: torch.Tensor) -> torch.Tensor:
    return batch


def read_in_child(view: Any) -> Any:
    return view["a"][7:9].clone().tolist(), pickle.dumps(view["a"])


def test_a_forked_child_reads_and_sends(store: memstore.Store) -> None:
    store.put("key", value())
    view = store.view("key")
    rows, message = in_child(read_in_child, view)
    assert rows == view["a"][7:9].tolist()
    overwrite_and_delete(store)
    assert pickle.loads(message)[8].tolist() == rows[1]
