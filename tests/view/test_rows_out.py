"""What rows are read into, by its kind: all that keep their tensors are filled, others are refused untouched."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictParams, tensorclass

import memstore
import memstore.aio
import memstore.rows
from memstore.errors import StructureMismatchError
from tests.support.equality import assert_same


@tensorclass
class Step:
    x: torch.Tensor
    n: TensorDict


def entries(rows: int, number: int) -> dict[str, Any]:
    return {"x": torch.full((rows, 3), float(number)), "n": {"done": torch.full((rows,), number)}}


def stack(rows: int, number: int) -> LazyStackedTensorDict:
    return LazyStackedTensorDict(*TensorDict(entries(rows, number), [rows]).clone().unbind(0))


MAKE: dict[str, Callable[[int, int], Any]] = {
    "dict": entries,
    "mixed": lambda rows, number: {**entries(rows, number), "n": TensorDict(entries(rows, number)["n"], [rows])},
    "TensorDict": lambda rows, number: TensorDict(entries(rows, number), [rows]),
    "no batch": lambda rows, number: TensorDict(entries(rows, number), []),
    "tensorclass": lambda rows, number: Step.from_dict(entries(rows, number), batch_size=[rows]),
    "params": lambda rows, number: TensorDictParams(TensorDict(entries(rows, number), [rows]), no_convert=True),
    "part": lambda rows, number: TensorDict(entries(2 * rows, number), [2 * rows])._get_sub_tensordict(slice(0, rows)),
}
SOURCES = [name for name in MAKE if name != "no batch"]


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for name in value.keys() for leaf in leaves(value.get(name))]  # noqa: SIM118 - also of TensorDicts


@pytest.mark.parametrize("out_kind", MAKE)
@pytest.mark.parametrize("source_kind", [*SOURCES, "stack"])
def test_containers_with_names_are_read_into_each_other(source_kind: str, out_kind: str) -> None:
    source = stack(5, 1) if source_kind == "stack" else MAKE[source_kind](5, 1)
    out = MAKE[out_kind](2, 0)
    assert memstore.read_rows(source, [4, 0], out=out) is out
    assert [(len(leaf), bool((leaf == 1).all())) for leaf in leaves(out)] == [(2, True)] * 2


@pytest.mark.parametrize("source_kind", [*SOURCES, "stack"])
@pytest.mark.parametrize("wrong", ["rows", "inner rows", "dtype", "missing", "no dict", "None"])
def test_a_dict_that_does_not_fit_is_refused_untouched(source_kind: str, wrong: str) -> None:
    source = stack(5, 1) if source_kind == "stack" else MAKE[source_kind](5, 1)
    out = entries(2, 0)
    message = r"value\['n'\]\['done'\] of out"
    if wrong == "rows":
        out = entries(3, 0)
        message = r"value\['x'\] of out is torch.float32 of shape \(3, 3\), and takes torch.float32 of shape \(2, 3\)"
    elif wrong == "missing":
        out["n"], message = {}, r"value\['n'\] of out has other entries than the source: missing \['done'\]"
    elif wrong == "no dict":
        out["n"], message = torch.zeros(2), r"value\['n'\] of out is a Tensor, and that of the source has entries"
    else:
        bad = {"inner rows": torch.zeros(3, dtype=torch.int64), "dtype": torch.zeros(2), "None": None}
        out["n"]["done"] = bad[wrong]
    with pytest.raises(ValueError, match=message):
        memstore.read_rows(source, [4, 0], out=out)
    assert not out["x"].any()


@pytest.mark.parametrize("source_kind", SOURCES)
def test_an_out_that_copies_its_entries_is_refused(source_kind: str) -> None:
    """It was returned as it was: the rows went into a copy."""
    out = stack(2, 0)
    with pytest.raises(ValueError, match="LazyStackedTensorDict, which copies 'x' when it is asked for it"):
        memstore.read_rows(MAKE[source_kind](5, 1), [4, 0], out=out)
    rows = TensorDict({"x": torch.zeros(4, 3)}, [4])
    with pytest.raises(ValueError, match="_SubTensorDict, which copies 'x'"):
        memstore.read_rows({"x": torch.ones(5, 3)}, [4, 0], out=rows._get_sub_tensordict(torch.tensor([0, 3])))


@pytest.mark.parametrize("along", [0, 1])
def test_a_stack_is_read_into_a_stack(store: memstore.Store, along: int) -> None:
    members = [TensorDict({"x": torch.arange(6).view(6, 1) + 10 * i}, [6]) for i in range(6)]
    store.put("stack", LazyStackedTensorDict(*members, stack_dim=along))
    view = store.view("stack")
    out = memstore.read_rows(view, [0, 1])
    assert memstore.read_rows(view, [-1, 3], out=out) is out
    assert torch.equal(out["x"], store.get("stack")[[5, 3]]["x"])
    before = out["x"].clone()
    with pytest.raises(ValueError, match="of out is a stack of"):
        memstore.read_rows(view, [0, 1], out=LazyStackedTensorDict(*out.unbind(along), out[0], stack_dim=along))
    whole = torch.zeros(2)
    with pytest.raises(ValueError, match=r"value\['stack'\]\['x'\] of out is torch.float32"):
        memstore.read_rows(
            {"stack": view, "whole": torch.ones(6)}, [0, 1], out={"stack": {"x": torch.zeros(2, 6, 1)}, "whole": whole}
        )
    with pytest.raises(ValueError, match=r"value\['whole'\] of out"):
        memstore.read_rows({"stack": view, "whole": torch.ones(6)}, [0, 1], out={"stack": out, "whole": None})
    assert torch.equal(out["x"], before)
    assert not whole.any()


def test_what_is_no_tensor_is_compared(store: memstore.Store) -> None:
    source = TensorDict({"texts": NonTensorStack("a", "b"), "all": NonTensorData("c", [2]), "x": torch.ones(2)}, [2])
    out = {"texts": ["b", "a"], "all": "c", "x": torch.zeros(2)}
    assert memstore.read_rows(source, [1, 0], out=out)["x"].all()
    for wrong in ({"texts": ["a", "b"]}, {"texts": "ba"}, {"texts": 3}, {"all": "d"}):
        with pytest.raises(ValueError, match="is no tensor, and out has other values there"):
            memstore.read_rows(source, [1, 0], out={**out, **wrong})


@pytest.mark.parametrize("out", [Step, TensorDict, {"x": None}.keys(), 3, "x", [torch.zeros(2)]])
def test_what_has_no_entries_is_refused(out: Any) -> None:
    with pytest.raises(ValueError, match="that of the source has entries by name"):
        memstore.read_rows(TensorDict({"x": torch.ones(3)}, [3]), [0], out=out)
    with pytest.raises(TypeError, match="type ABCMeta without a tensor has no rows"):
        memstore.read_rows(TensorDict, [0])


def test_a_dataset_fills_a_dict(store: memstore.Store) -> None:
    dataset = store.create_dataset_from("rows", TensorDict(entries(5, 1), [5]))
    out = entries(2, 0)
    assert dataset.read_rows([4, 0], out=out) is out
    assert all(leaf.all() for leaf in leaves(out))
    with pytest.raises(ValueError, match=r"value\['x'\] of out is torch.float32 of shape \(3, 3\)"):
        dataset.read_rows([4, 0], out=entries(3, 0))

    async def awaited() -> dict[str, Any]:
        async with memstore.aio.open(store.root) as opened:
            again = await opened.open_dataset("rows")
            return await again.read_rows([4, 0], out=entries(2, 0))

    assert all(leaf.all() for leaf in leaves(asyncio.run(awaited())))


def test_texts_of_a_stack_go_into_a_stack(store: memstore.Store) -> None:
    """Once all was checked, and only then; those of nested collections too."""

    def texts(numbers: Sequence[int]) -> LazyStackedTensorDict:
        members = [
            TensorDict(
                {
                    "x": torch.full((2,), float(i)),
                    "text": NonTensorData(f"t{i}"),
                    "more": TensorDict({"text": NonTensorData(f"m{i}")}),
                }
            )
            for i in numbers
        ]
        return LazyStackedTensorDict(*members, stack_dim=0)

    store.put("stack", texts(range(6)))
    for source in (texts(range(6)), store.view("stack")):
        out = memstore.read_rows(source, [0, 1])
        with pytest.raises(ValueError, match="of out"):
            memstore.read_rows({"s": source, "y": torch.ones(6)}, [3, 2], out={"s": out, "y": torch.ones(3)})
        assert_same(list(out.unbind(0)), list(texts([0, 1]).unbind(0)))
        assert memstore.read_rows(source, [3, 2], out=out) is out
        assert_same(list(out.unbind(0)), list(texts([3, 2]).unbind(0)))


def test_many_targets_are_compared_with_what_is_read_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [0]
    plain = memstore.rows._range  # pyright: ignore[reportPrivateUsage]

    def counted(tensor: torch.Tensor) -> tuple[int, int]:
        counts[0] += 1
        return plain(tensor)

    monkeypatch.setattr(memstore.rows, "_range", counted)
    members = [TensorDict({"x": torch.full((2,), float(i))}) for i in range(50)]
    source = LazyStackedTensorDict(*members, stack_dim=0)
    memstore.read_rows(source, range(50), out=source.clone())
    assert 100 <= counts[0] <= 200
    with pytest.raises(ValueError, match="overlaps what is read"):
        memstore.read_rows(source, range(50), out=source)


# --- other floating dtypes --------------------------------------------------------------------------------------------

HALF = torch.bfloat16


def test_rows_are_cast_into_other_floating_dtypes_if_it_is_asked_for(store: memstore.Store, reads: Any) -> None:
    x, done = torch.randn(50, 7, 3), torch.arange(50)
    store.put("rows", TensorDict({"x": x, "n": {"t": x.half(), "done": done}}, [50]))
    dataset = store.create_dataset_from("dataset", TensorDict({"x": x, "n": {"t": x.half(), "done": done}}, [50]))
    index = [49, 0, -2, 0]
    targets: list[Callable[[], torch.Tensor]] = [
        lambda: torch.zeros(4, 7, 3, dtype=HALF),
        lambda: torch.zeros(4, 7, 6, dtype=torch.float64)[..., ::2],
        lambda: torch.zeros(4, 7, 3, dtype=torch.complex64).conj().imag,
        lambda: torch.nn.Parameter(torch.zeros(4, 7, 3, dtype=HALF)),
    ]
    view = store.view("rows")
    for source in (view, store.get("rows"), dataset):
        read = dataset.read_rows if source is dataset else partial(memstore.read_rows, source)
        for make in targets:
            out = {"x": make(), "n": {"t": make(), "done": torch.zeros(4, dtype=torch.int64)}}
            with reads() as count:
                assert read(index, out=out, cast=True) is out
            assert torch.equal(out["x"].detach(), x[index].to(out["x"].dtype))
            assert torch.equal(out["n"]["t"].detach(), x.half()[index].to(out["x"].dtype))
            assert torch.equal(out["n"]["done"], done[index])
            if source is view:
                assert count() == 4 * (21 * 4 + 21 * 2 + 8), "what is stored counts, and not what becomes of it"


@pytest.mark.parametrize("source_kind", [*SOURCES, "stack"])
def test_another_floating_dtype_is_refused_untouched_unless_it_is_asked_for(source_kind: str) -> None:
    source = stack(5, 1) if source_kind == "stack" else MAKE[source_kind](5, 1)
    out = {"x": torch.zeros(2, 3, dtype=HALF), "n": {"done": torch.zeros(2, dtype=torch.int64)}}
    with pytest.raises(StructureMismatchError, match=r"value\['x'\] of out is torch.bfloat16 .*; cast=True casts it"):
        memstore.read_rows(source, [4, 0], out=out)
    assert not out["n"]["done"].any()
    assert memstore.read_rows(source, [4, 0], out=out, cast=True) is out
    assert out["x"].all() and out["n"]["done"].all()


@pytest.mark.parametrize("stored", [torch.int64, torch.complex64, torch.bool])
def test_rows_of_what_is_no_floating_dtype_are_never_cast(stored: torch.dtype) -> None:
    source = {"a": torch.ones(4), "b": torch.ones(4, dtype=stored)}
    out = {"a": torch.zeros(2, dtype=HALF), "b": torch.zeros(2)}
    with pytest.raises(StructureMismatchError, match=rf"value\['b'\] of out is .*takes {stored} of shape \(2,\)$"):
        memstore.read_rows(source, [0, 1], out=out, cast=True)
    assert not out["a"].any()


def test_a_cast_of_rows_needs_a_target(store: memstore.Store) -> None:
    dataset = store.create_dataset_from("rows", torch.ones(4))
    for read in (partial(memstore.read_rows, torch.ones(4)), dataset.read_rows):
        for options in ({}, {"device": "cpu"}):
            with pytest.raises(TypeError, match="cast= is for out="):
                read([0], cast=True, **options)
        with pytest.raises(TypeError, match="cast is True or False, and not 'yes'"):
            read([0], out=torch.zeros(1), cast="yes")


def test_rows_are_cast_for_tasks(store: memstore.Store) -> None:
    store.put("rows", torch.arange(5.0))
    store.create_dataset_from("dataset", torch.arange(5.0))

    async def awaited() -> list[torch.Tensor]:
        async with memstore.aio.open(store.root) as opened:
            view, dataset = await opened.view("rows"), await opened.open_dataset("dataset")
            reads = [partial(memstore.aio.read_rows, view), dataset.read_rows]
            for read in reads:
                with pytest.raises(StructureMismatchError, match="cast=True casts it"):
                    await read([4, 1], out=torch.zeros(2, dtype=HALF))
            return [await read([4, 1], out=torch.zeros(2, dtype=HALF), cast=True) for read in reads]

    assert [found.tolist() for found in asyncio.run(awaited())] == [[4.0, 1.0]] * 2
