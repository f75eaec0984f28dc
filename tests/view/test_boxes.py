"""Views of leaves that lie in boxes: the same as of one that lies whole, and no more is read."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import memstore
from memstore.sharding import Box
from memstore.view.leaf_boxes import region_of
from tests.boxed import BoxedStore, grid, partitions
from tests.examples import examples
from tests.support.equality import assert_same
from tests.view.strategies import DTYPES, indices

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@pytest.fixture
def boxed(root: str) -> Iterator[BoxedStore]:
    with memstore.open(root, inline_limit=0) as store:
        yield BoxedStore(store)


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).remainder(251).reshape(shape).to(dtype)


_VIEWS = ("slice", "step", "permute", "select", "expand", "flat", "none", "unfold", "dtype", "diagonal")


@st.composite
def views(draw: st.DrawFn, tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Operators that make views, to be applied one after the other."""
    found: list[Callable[[torch.Tensor], torch.Tensor]] = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(_VIEWS))
        dim = draw(st.integers(0, max(tensor.ndim - 1, 0)))
        size = tensor.shape[dim] if tensor.ndim else 0
        view: Callable[[torch.Tensor], torch.Tensor] | None = None
        if kind == "none":
            view = lambda x: x.unsqueeze(0)  # noqa: E731
        elif not tensor.ndim:
            continue
        elif kind == "slice":
            start = draw(st.integers(0, size))
            length = draw(st.integers(0, size - start))
            view = lambda x, d=dim, s=start, n=length: x.narrow(d, s, n)  # noqa: E731
        elif kind == "step":
            index = (slice(None),) * dim + (slice(draw(st.integers(0, 2)), None, draw(st.integers(2, 3))),)
            view = lambda x, i=index: x[i]  # noqa: E731
        elif kind == "permute":
            order = draw(st.permutations(range(tensor.ndim)))
            view = lambda x, o=order: x.permute(o)  # noqa: E731
        elif kind == "select" and size:
            at = draw(st.integers(-size, size - 1))
            view = lambda x, d=dim, a=at: x.select(d, a)  # noqa: E731
        elif kind == "expand" and size == 1:
            sizes = [3 if d == dim else -1 for d in range(tensor.ndim)]
            view = lambda x, s=sizes: x.expand(s)  # noqa: E731
        elif kind == "flat" and tensor.ndim > 1:
            first = min(dim, tensor.ndim - 2)
            view = lambda x, f=first: x.flatten(f, f + 1)  # noqa: E731
        elif kind == "unfold" and size > 1:
            view = lambda x, d=dim: x.unfold(d, 2, 1)  # noqa: E731
        elif kind == "dtype" and not tensor.is_complex() and tensor.dtype != torch.bool:
            wanted = draw(st.sampled_from((torch.uint8, torch.int32, torch.int64)))
            view = lambda x, t=wanted: x.view(t)  # noqa: E731
        elif kind == "diagonal" and tensor.ndim > 1:
            view = lambda x: x.diagonal(0, 0, 1)  # noqa: E731
        if view is None:
            continue
        try:
            made = view(tensor)
        except RuntimeError:
            continue
        if made.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and made.ndim < 6:
            found.append(view)
            tensor = made
    return found


@settings(max_examples=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_any_view_of_any_partition(boxed: BoxedStore, data: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = numbered(shape, dtype)
    boxes = data.draw(partitions(shape))
    boxed.put("key", [value], lambda i, _: boxes)
    leaf = boxed.store.view("key")[0]
    expected = value
    for view in data.draw(views(value)):
        leaf, expected = view(leaf), view(expected)
    assert type(leaf) is memstore.StoredTensor and leaf.stride() == expected.stride()
    before = memstore.bytes_read()
    got = leaf.clone()
    assert torch.equal(got, expected) and got.dtype == expected.dtype
    strides = zip(got.stride(), expected.clone().stride(), expected.shape, strict=True)
    assert all(one == other for one, other, size in strides if size > 1)
    assert memstore.bytes_read() - before <= value.nbytes
    sent = pickle.loads(pickle.dumps(leaf))
    assert torch.equal(sent, expected) and sent.dtype == expected.dtype
    with torch.inference_mode():
        assert torch.equal(leaf, expected)


@settings(max_examples=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_any_index(boxed: BoxedStore, data: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = numbered(shape, dtype)
    boxes = data.draw(partitions(shape))
    boxed.put("key", [value], lambda i, _: boxes)
    leaf, expected = boxed.store.view("key")[0], value
    if shape and data.draw(st.booleans()):
        order = data.draw(st.permutations(range(len(shape))))
        leaf, expected = leaf.permute(order), expected.permute(order)
    index = data.draw(indices(tuple(expected.shape)))
    try:
        wanted = expected[index]
    except (IndexError, RuntimeError) as error:
        with pytest.raises(type(error)):
            leaf[index].clone()
        return
    before = memstore.bytes_read()
    got = leaf[index]
    assert torch.equal(got, wanted) and got.shape == wanted.shape and got.dtype == wanted.dtype
    assert memstore.bytes_read() - before == wanted.nbytes


def test_a_slice_reads_just_its_bytes(boxed: BoxedStore, reads: Callable[[], Any]) -> None:
    value = numbered((12, 10))
    boxed.put("key", [value], grid(3, 2))
    leaf = boxed.store.view("key")[0]
    cases: list[tuple[Callable[[torch.Tensor], torch.Tensor], int]] = [
        (lambda x: x[3:6], 30),
        (lambda x: x[3:6].T, 30),
        (lambda x: x[:, 4:6], 24),
        (lambda x: x[::5, ::3], 12),
        (lambda x: x[3].expand(5, 10), 10),
        (lambda x: x[3:6].flatten(), 30),
        (lambda x: x.view(4, 3, 10)[1:3, 1], 20 + 10),  # two rows, and what lies between them
        (lambda x: x[[3, 7, 3]], 30),
        (lambda x: x[:, [1, 5]], 24),
        (lambda x: x[[1, 5], [2, 9]], 2),
        (lambda x: x[x > 115] if type(x) is torch.Tensor else x[value > 115], 4),
        (lambda x: x.index_select(1, torch.tensor([9])), 12),
        (lambda x: torch.take(x, torch.tensor([-1, 5])), 2),
        (lambda x: x.gather(1, torch.tensor([[1, 2]])), 2),
        (lambda x: torch.masked_select(x, torch.arange(10) > 8), 12),
        (lambda x: torch.nn.functional.embedding(torch.tensor([[1, 2]]), x), 20),
        (lambda x: x[5:5], 0),
        (lambda x: x[torch.zeros(0, dtype=torch.int64)], 0),
    ]
    for number, (case, elements) in enumerate(cases):
        with reads() as count:
            got = case(leaf)
            assert torch.equal(got, case(value)), number
            assert count() == elements * 4 or number == 6 and count() <= 50 * 4, number
        assert torch.equal(got, case(value))


def test_what_lies_in_one_box_is_not_copied(boxed: BoxedStore) -> None:
    boxed.put("key", [numbered((12, 10))], grid(3))
    leaf = boxed.store.view("key")[0]
    source = leaf.stored.source
    values = leaf.stored.read(leaf.shown[5:7, 2:].T)
    assert source.address <= values.data_ptr() < source.address + source.memory.nbytes


def test_nothing_finds_the_zeros(boxed: BoxedStore) -> None:
    value = numbered((6, 4))
    boxed.put("key", [value], grid(3))
    leaf = boxed.store.view("key")[0]
    for look in (
        lambda: leaf.data_ptr(),
        lambda: torch.Tensor.data_ptr(leaf),
        lambda: leaf.untyped_storage().data_ptr(),
        lambda: torch.Tensor.untyped_storage(leaf)[0],
        lambda: torch.Tensor.numpy(leaf),
        lambda: leaf.untyped_storage().tolist(),
        lambda: torch.utils.dlpack.to_dlpack(leaf),
        lambda: setattr(torch.nn.Parameter(torch.zeros(6, 4)), "data", leaf),
        lambda: setattr(torch.zeros(6, 4), "data", leaf[1:]),
    ):
        with pytest.raises((RuntimeError, memstore.ReadOnlyError, TypeError, NotImplementedError)):
            look()
    assert leaf.numpy().tolist() == leaf.tolist() == value.tolist()
    assert torch.equal(torch.from_dlpack(leaf), value)
    assert torch.equal(leaf.data, value) and torch.equal(torch.stack([leaf, leaf]), torch.stack([value, value]))
    assert torch.equal(leaf.to(torch.float64), value.double()) and torch.equal(leaf.contiguous(), value)
    assert torch.equal(torch.zeros_like(leaf), torch.zeros(6, 4)) and leaf.new_ones(3).device.type == "cpu"
    with torch.inference_mode():
        for made in (leaf.to(torch.float64), leaf.float(), leaf.cpu(), leaf.reshape(-1), leaf.T.contiguous()):
            assert made.sum() == value.sum() and made.device.type == "cpu"
    with pytest.raises(memstore.ReadOnlyError):
        leaf.add_(1)
    for made in (leaf.clone(), leaf + 0, leaf[:2].clone(), leaf.float(), leaf.cpu(), leaf.contiguous()):
        if type(made) is torch.Tensor:
            made.zero_()
    assert torch.equal(boxed.store.view("key")[0], value)


def test_devices_and_dtypes_of_values(boxed: BoxedStore) -> None:
    value = torch.complex(numbered((6, 4)), -numbered((6, 4)))
    boxed.put("key", [value], grid(3, 2))
    leaf = boxed.store.view("key")[0]
    assert (
        torch.equal(leaf.conj(), value.conj()) and torch.equal(leaf.real, value.real) and torch.equal(leaf.mH, value.mH)
    )
    assert boxed.store.view("key", device="meta")[0].sum().device.type == "meta"
    assert (
        leaf.device.type == "cpu"
        and leaf.is_cpu
        and not leaf.is_meta
        and "meta" not in repr(leaf)
        and "shape=(6, 4)" in repr(leaf)
    )


def test_parameters_and_containers(boxed: BoxedStore) -> None:
    shared = torch.randn(5, 7)
    value = {
        "w": torch.nn.Parameter(torch.randn(8, 6)),
        "tied": [shared, shared],
        "td": TensorDict(a=torch.randn(4, 3), batch_size=4),
        "rows": numbered((4,)).numpy(),
    }
    boxed.put("key", value, grid(3))
    view = boxed.store.view("key")
    assert isinstance(view["w"], torch.nn.Parameter) and view["w"].requires_grad
    (view["w"] * 2).sum().backward()
    assert torch.equal(view["w"].grad, torch.full((8, 6), 2.0))
    assert torch.equal(view["w"][2:4], value["w"][2:4]) and torch.equal(view["w"][[1, 2]], value["w"][[1, 2]])
    assert view["tied"][0] is view["tied"][1] and torch.equal(view["tied"][0], shared)
    assert torch.equal(view["td"][1:3]["a"], value["td"][1:3]["a"])
    assert view["rows"].tolist() == [0, 1, 2, 3]
    assert torch.equal(copy.deepcopy(view["w"]), value["w"]) and torch.equal(copy.copy(view["w"]), value["w"])


def test_references_are_small_and_a_part_is_enough(boxed: BoxedStore) -> None:
    value = numbered((64, 64))
    boxed.put("key", {"a": value}, grid(16, 16))
    view = boxed.store.view("key")
    row = pickle.dumps(view["a"][5, 3:6])
    assert len(row) < len(pickle.dumps(view["a"])) / 5
    sent = pickle.loads(row)
    assert sent.tolist() == value[5, 3:6].tolist()
    assert len(sent.stored.stored) == 2
    with pytest.raises(IndexError, match="that was sent as a part"):
        sent.as_strided((64,), (1,), 0).clone()
    whole = pickle.loads(pickle.dumps(view))
    assert torch.equal(whole["a"], value) and torch.equal(whole["a"][3:40, ::7], value[3:40, ::7])


def test_a_damaged_reference(boxed: BoxedStore) -> None:
    from memstore.view.views import pack_leaf, restore_leaf

    boxed.put("key", [numbered((8, 4))], grid(4))
    leaf = boxed.store.view("key")[0]
    packed = pack_leaf(leaf)
    for at in range(len(packed)):
        for bit in range(8):
            damaged = bytearray(packed)
            damaged[at] ^= 1 << bit
            try:
                restore_leaf(leaf.stored.source, bytes(damaged)).clone()
            except (memstore.MemstoreError, IndexError):
                continue


def test_files_and_puts_of_a_view(boxed: BoxedStore) -> None:
    value = {"a": numbered((8, 4)), "b": torch.randn(3, 3)}
    boxed.put("key", value, grid(4, 2))
    view = boxed.store.view("key")
    buffer = io.BytesIO()
    torch.save({"a": view["a"], "part": view["a"][1:3]}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert torch.equal(loaded["a"], value["a"]) and torch.equal(loaded["part"], value["a"][1:3])
    boxed.store.put("copy", {"all": view, "part": view["a"][:, 1:3]})
    got = boxed.store.get("copy")
    assert torch.equal(got["all"]["a"], value["a"]) and torch.equal(got["part"], value["a"][:, 1:3])


def test_rows(boxed: BoxedStore, reads: Callable[[], Any]) -> None:
    value = {"x": numbered((40, 6)), "y": numbered((40,)).long(), "t": numbered((5, 40)).bfloat16()}
    boxed.put("key", value, grid(3, 2))
    view = boxed.store.view("key")
    chosen = {"x": view["x"], "y": view["y"], "t": view["t"].T, "step": view["x"][:, ::2]}
    expected = {"x": value["x"], "y": value["y"], "t": value["t"].T, "step": value["x"][:, ::2]}
    for index in ([3, 39, 3, -1], slice(5, 30, 4), torch.arange(40) % 3 == 0, [], range(10, 20)):
        rows = torch.arange(40)[list(index) if isinstance(index, range) else index]
        with reads() as count:
            got = memstore.read_rows(chosen, index)
            assert count() == sum(one[rows].nbytes for one in expected.values())
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor[rows]), name
        out = {name: torch.zeros_like(one[rows]) for name, one in expected.items()}
        memstore.read_rows(chosen, index, out=out)
        assert all(torch.equal(out[name], one[rows]) for name, one in expected.items())
        wide = {name: out[name].zero_().double() if name != "y" else out[name].zero_() for name in out}
        memstore.read_rows(chosen, index, out=wide, cast=True)
        assert all(torch.equal(wide[name], one[rows].to(wide[name].dtype)) for name, one in expected.items())
        memstore.prefetch_rows(chosen, index)
    assert torch.equal(memstore.read_rows(view["x"].view(20, 2, 6), [3, 1]), value["x"].view(20, 2, 6)[[3, 1]])
    with pytest.raises(IndexError):
        memstore.read_rows(view["x"], [40])


def test_rows_on_a_disk(disk_root: str) -> None:
    with memstore.open(disk_root, durability="disk", inline_limit=0, verify=True) as store:
        boxed = BoxedStore(store)
        value = numbered((40, 600))
        boxed.put("key", [value], grid(3, 2))
        leaf = store.view("key")[0]
        memstore.prefetch_rows(leaf, [3, 39])
        assert torch.equal(memstore.read_rows(leaf, [3, 39, 5]), value[[3, 39, 5]])
        assert torch.equal(leaf[[3, 39, 5]], value[[3, 39, 5]]) and torch.equal(leaf[2:7, ::2], value[2:7, ::2])


def test_checksums_of_the_boxes_that_are_read(root: str) -> None:
    value = torch.ones(8, 4)
    with memstore.open(root, checksum=True, verify=True, inline_limit=0) as store:
        boxed = BoxedStore(store)
        boxed.put("key", [value], grid(4))
        with open(store.info("key").files[0], "r+b") as file:
            start = file.read().index(torch.ones(8).numpy().tobytes())
            file.seek(start + 64 * 2 + 5)  # the third box
            file.write(b"\x01")
        leaf = store.view("key")[0]
        assert leaf[:4].sum() == 16 and leaf[[0, 7]].sum() == 8
        for read in (
            lambda: leaf.sum(),
            lambda: leaf[4:5].clone(),
            lambda: leaf[[5]],
            lambda: memstore.read_rows(leaf, [5]),
            lambda: pickle.loads(pickle.dumps(leaf))[5].sum(),
        ):
            with pytest.raises(
                memstore.CorruptionError, match=r"'key'.*box at \[4, 0\], of shape \[2, 4\], put by rank 2"
            ):
                read()


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, leaf: torch.Tensor) -> None:
        self.leaf = leaf

    def __len__(self) -> int:
        return len(self.leaf)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.leaf[row].clone()


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers(boxed: BoxedStore, context: str) -> None:
    value = numbered((8, 4))
    boxed.put("key", [value], grid(4, 2))
    loader = torch.utils.data.DataLoader(
        _Rows(boxed.store.view("key")[0]), batch_size=4, num_workers=1, multiprocessing_context=context
    )
    assert torch.equal(torch.cat(list(loader)), value)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_workers_collate_lazy_rows(boxed: BoxedStore, context: str) -> None:
    value = numbered((8, 4))
    boxed.put("key", [value], grid(4, 2))
    rows: Any = list(boxed.store.view("key")[0])
    loader = torch.utils.data.DataLoader[Any](rows, batch_size=4, num_workers=1, multiprocessing_context=context)
    assert torch.equal(torch.cat(list(loader)), value)


def test_new_tensors_like_a_leaf_have_memory(boxed: BoxedStore) -> None:
    boxed.put("key", [numbered((8, 4), torch.float64)], grid(4, 2))
    leaf = boxed.store.view("key")[0]
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for made in (leaf.new([1, 2]), leaf.new(expected), leaf.new_tensor([1, 2]), leaf[1].new_tensor(data=[1, 2])):
        assert_same(made, expected)
    assert_same(leaf.new_tensor([1, 2], dtype=torch.int8), torch.tensor([1, 2], dtype=torch.int8))
    assert leaf.new(2, 3).shape == (2, 3) and leaf.new().is_cpu


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
def test_regions_have_all_of_a_view(data: Any, shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    view = whole
    for make in data.draw(views(whole)):
        view = make(view)
    if not view.numel() or view.dtype != whole.dtype:
        return
    region = region_of(shape, view.shape, view.stride(), view.storage_offset())
    part = whole
    for dim, one in enumerate(region.ranges):
        part = part.index_select(dim, torch.tensor(one))
    assert torch.equal(part.contiguous().as_strided(view.shape, region.stride, region.offset), view)
    assert Box(tuple(one.start for one in region.ranges), region.shape).shape == tuple(part.shape)
