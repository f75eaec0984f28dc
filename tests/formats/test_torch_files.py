"""Files of torch.save: what they may hold, and what is refused."""

from __future__ import annotations

import io
import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import memstore
from memstore import structure
from memstore.errors import MemstoreError
from memstore.formats import Frames, PlacedTensor
from tests.examples import examples
from tests.support.equality import assert_same
from tests.support.strategies import tied_tensors

REFUSALS = (memstore.CorruptionError, memstore.UnsupportedValueError)


class Opened:
    """Unpickled, it leaves a mark."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3))


def optimizer_state() -> dict[str, Any]:
    found = model()
    optimizer = torch.optim.Adam(found.parameters())
    found(torch.randn(5, 30)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


VALUES: dict[str, Any] = {
    "state_dict": lambda: model().state_dict(),
    "optimizer": optimizer_state,
    "scheduler": lambda: torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [2, 2, 5]).state_dict(),
    "tensor": lambda: torch.arange(5),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "gradient": lambda: torch.ones(3, requires_grad=True),
    "list": lambda: [torch.ones(3), (torch.zeros(2), None)],
    "ordered": lambda: OrderedDict(b=torch.ones(1), a=torch.zeros(1)),
    "number": lambda: {"t": torch.tensor(3.0)},
    "empty": lambda: {"t": torch.empty(0, 3)},
    "transposed": lambda: {"t": torch.arange(12).reshape(3, 4).t()},
    "expanded": lambda: {"t": torch.arange(3).expand(4, 3)},
    "dtypes": lambda: [torch.ones(3).to(d) for d in (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2)],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_get_gives_what_torch_load_does(store: memstore.Store, folder: Path, name: str) -> None:
    torch.save(VALUES[name](), folder / "x.pt")
    store.attach("key", folder / "x.pt")
    assert_same(torch.load(folder / "x.pt"), store.get("key"))


@hypothesis.settings(max_examples=examples(40), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(value=tied_tensors())
def test_tied_tensors_stay_tied(store: memstore.Store, folder: Path, value: dict[str, torch.Tensor]) -> None:
    (folder / "x.pt").unlink(missing_ok=True)
    dtype = next(iter(value.values())).dtype  # torch.save refuses one memory with two
    value = {name: tensor for name, tensor in value.items() if tensor.dtype == dtype}
    torch.save(value, folder / "x.pt")
    store.attach("key", folder / "x.pt")
    loaded, got = torch.load(folder / "x.pt"), store.get("key")
    for name, tensor in loaded.items():
        assert torch.equal(tensor.contiguous().view(torch.uint8), got[name].contiguous().view(torch.uint8))
        assert (tensor.shape, tensor.stride(), tensor.dtype) == (got[name].shape, got[name].stride(), got[name].dtype)


def test_views_of_one_tensor_share_its_memory(store: memstore.Store, folder: Path) -> None:
    w = torch.arange(3000.0).reshape(50, 60)
    torch.save({"w": w, "row": w[3], "column": w[:, 2], "same": w}, folder / "x.pt")
    store.attach("key", folder / "x.pt")
    got = store.get("key")
    assert got["same"] is got["w"]
    got["w"].zero_()
    assert not got["row"].any()
    assert not got["column"].any()


def test_objects_need_pickle_and_so_permission(store: memstore.Store, folder: Path) -> None:
    torch.save({"o": Opened(str(folder / "opened"))}, folder / "x.pt")
    with pytest.raises(memstore.UnsupportedValueError, match="allow_pickle"):
        store.attach("key", folder / "x.pt")
    assert not (folder / "opened").exists()
    torch.save({"o": slice(1, 2), "t": torch.ones(3)}, folder / "x.pt")
    with pytest.raises(memstore.UnsupportedValueError, match="allow_pickle"):
        store.attach("key", folder / "x.pt")
    with memstore.open(store.root, allow_pickle=True) as trusting:
        trusting.attach("key", folder / "x.pt")
        assert trusting.get("key")["o"] == slice(1, 2)


@pytest.mark.full
def test_a_small_file_of_shared_lists_takes_no_time_and_no_memory(store: memstore.Store, folder: Path) -> None:
    value: Any = ["x"] * 10
    for _ in range(10):
        value = [value] * 10
    for whole, copy in ((value, False), ({"t": torch.ones(3), "v": value}, True)):
        torch.save(whole, folder / "x.pt")
        assert os.path.getsize(folder / "x.pt") < 2000
        with pytest.raises(memstore.UnsupportedValueError, match="containers that stand in so many places"):
            store.attach("key", folder / "x.pt", copy=copy)
    assert "key" not in store


def test_conjugated_views_are_refused(store: memstore.Store, folder: Path) -> None:
    torch.save({"c": torch.ones(3, dtype=torch.complex64).conj()}, folder / "x.pt")
    with pytest.raises(memstore.UnsupportedValueError, match="conjugated"):
        store.attach("key", folder / "x.pt")


def test_other_files_are_refused(store: memstore.Store, folder: Path) -> None:
    torch.save({"t": torch.ones(3)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.jit.script(torch.nn.Linear(3, 3)).save(str(folder / "script.pt"))
    with zipfile.ZipFile(folder / "other.zip", "w") as archive:
        archive.writestr("a/data/0", b"\0" * 100)
    (folder / "empty.pt").touch()
    for name in ("old.pt", "script.pt", "other.zip", "empty.pt"):
        with pytest.raises(REFUSALS, match=name):
            store.attach("key", folder / name)


@pytest.mark.parametrize("fault", ["compressed storages", "compressed", "big-endian", "name twice"])
def test_zips_that_torch_does_not_write_are_refused(store: memstore.Store, folder: Path, fault: str) -> None:
    torch.save({"t": torch.ones(3000)}, folder / "x.pt")
    with zipfile.ZipFile(folder / "x.pt") as source, zipfile.ZipFile(folder / "y.pt", "w") as target:
        for member in source.infolist():
            data = source.read(member)
            if fault == "big-endian" and member.filename.endswith("byteorder"):
                data = b"big"
            squeeze = fault == "compressed" or (fault == "compressed storages" and "/data/" in member.filename)
            target.writestr(member.filename, data, zipfile.ZIP_DEFLATED if squeeze else zipfile.ZIP_STORED)
            if fault == "name twice" and member.filename.endswith("data.pkl"):
                with pytest.warns(UserWarning, match="Duplicate"):
                    target.writestr(member.filename, data)
    with pytest.raises(REFUSALS, match=r"y\.pt"):
        store.attach("key", folder / "y.pt")


def test_cut_files_are_refused(store: memstore.Store, folder: Path) -> None:
    torch.save({"t": torch.ones(3000), "u": torch.ones(5)}, folder / "x.pt")
    whole = (folder / "x.pt").read_bytes()
    for size in (0, 1, 4, 100, len(whole) // 2, len(whole) - 100, len(whole) - 1):
        (folder / "x.pt").write_bytes(whole[:size])
        with pytest.raises(REFUSALS):
            store.attach("key", folder / "x.pt", format="torch")


@hypothesis.settings(max_examples=examples(80), suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_damaged_files_never_give_bytes_from_elsewhere(
    store: memstore.Store, folder: Path, data: st.DataObject
) -> None:
    path = folder / "x.pt"
    path.unlink(missing_ok=True)
    torch.save({"t": torch.full((40,), 7, dtype=torch.uint8), "u": torch.full((5, 4), 7, dtype=torch.uint8).t()}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.integers(0, 4)):
            content[at] = data.draw(st.integers(0, 255))
        else:
            del content[at : at + data.draw(st.integers(1, 64))]
    path.write_bytes(content)
    try:
        store.attach("key", path, format="torch")
        got = store.get("key")
    except REFUSALS:
        return
    except MemoryError:
        return
    for _, tensor in structure.iter_tensors(got):
        assert tensor.nbytes <= 40  # of a storage
        tensor.clone()


def test_a_tensor_longer_than_its_storage_is_refused(store: memstore.Store, folder: Path) -> None:
    """torch would show what lies behind the storage in the file."""
    torch.save({"t": torch.zeros(40, dtype=torch.uint8)}, folder / "x.pt")
    for size in (40, 100):
        with zipfile.ZipFile(folder / "x.pt") as source, zipfile.ZipFile(folder / f"{size}.pt", "w") as target:
            for member in source.infolist():
                data = source.read(member)
                if member.filename.endswith("data.pkl"):
                    assert data.count(b"K\x28") == 2  # the storage's elements and the tensor's
                    data = data.replace(b"K\x28", bytes([ord("K"), size]))
                target.writestr(member.filename, data)
    store.attach("key", folder / "40.pt")
    assert torch.load(folder / "100.pt", mmap=True)["t"].shape == (100,)
    with pytest.raises(memstore.CorruptionError, match="none of its storages"):
        store.attach("key", folder / "100.pt")


# --- tensors that torch.save wrote into larger files ------------------------------------------------------------------


SIMILAR = [  # of one size, as files of torch.save too
    torch.zeros(2, 8),
    torch.ones(2, 8),
    torch.zeros(8, 2),
    torch.zeros(4, 4),
    torch.zeros(4, 4, dtype=torch.int32),
    torch.zeros(4, 4).t(),
    torch.nn.Parameter(torch.zeros(4, 4)),
    torch.zeros(1, dtype=torch.float64),
    torch.zeros(0, 3),
]


def saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def test_tensors_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    """As in a checkpoint: tensors one behind the other, some of them as one that was there before."""
    parts = [saved(tensor) for tensor in SIMILAR * 2]
    path = tmp_path / "file"
    path.write_bytes(b"".join(parts))
    frames, known = Frames(), 0
    with path.open("rb") as file:
        memory, start = memoryview(path.read_bytes()), 0
        for part in parts:
            found = frames.locate(memory, start, len(part))
            known += found is not None
            found = found or frames.read(str(path), file.fileno(), start, len(part))
            assert found == Frames().read(str(path), file.fileno(), start, len(part))
            start += len(part)
    assert known >= len(SIMILAR)


def test_where_any_byte_differs_nothing_else_is_found_than_by_reading_it(tmp_path: Path) -> None:
    """But for the checksums, a byte that was looked at makes it another frame; what was not changes nothing."""
    path, data = tmp_path / "file", saved(torch.arange(16.0))
    path.write_bytes(data)
    frames = Frames()
    with path.open("r+b", buffering=0) as file:
        found = frames.read(str(path), file.fileno(), 0, len(data))
        assert frames.locate(memoryview(data), 0, len(data)) == found
        unlike = 0
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 1
            os.pwrite(file.fileno(), changed[at : at + 1], at)
            again = frames.locate(memoryview(changed), 0, len(data))
            assert again in (None, found)
            if again is None:
                unlike += 1
            else:
                assert located(path, file.fileno(), len(data)) == again
            os.pwrite(file.fileno(), data[at : at + 1], at)
    assert unlike > 500  # the directory, the headers, the pickle


def located(path: Path, fd: int, size: int) -> PlacedTensor | None:
    try:
        return Frames().read(str(path), fd, 0, size)
    except MemstoreError:
        return None


def test_a_frame_that_was_cut_off_is_none_that_is_known(tmp_path: Path) -> None:
    data = saved(torch.arange(16.0))
    path = tmp_path / "file"
    path.write_bytes(data)
    frames = Frames()
    with path.open("rb") as file:
        frames.read(str(path), file.fileno(), 0, len(data))
        assert frames.locate(memoryview(data)[:-1], 0, len(data)) is None
        assert frames.locate(memoryview(data), 1, len(data)) is None
        path.write_bytes(data[:-1])
        with pytest.raises(MemstoreError, match="truncated"):
            frames.read(str(path), file.fileno(), 0, len(data))
