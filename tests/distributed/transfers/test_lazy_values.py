"""Of a value that lies on another host, what is read comes here, and nothing else."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore import contents
from memstore.distributed.transfers import transfers
from memstore.engine import MappedEntry, PinOptions
from memstore.errors import VersionGoneError
from memstore.rows import read_rows
from memstore.view import view
from tests.distributed.transfers.hosts import Hosts, two_hosts
from tests.distributed.transfers.wires import sent_bytes
from tests.examples import examples
from tests.inside import root_of

_OVERHEAD = 64  # bytes of a request's answer beside what was asked for


@pytest.fixture
def hosts(root: str) -> Iterator[Hosts]:
    with two_hosts(root) as made:
        yield made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return sent_bytes(monkeypatch)


@contextmanager
def moves(sent: list[int], nbytes: int, requests: int = 1) -> Generator[None]:
    sent.clear()
    yield
    assert nbytes <= sum(sent) <= nbytes + requests * _OVERHEAD, f"{sum(sent)} bytes instead of {nbytes}"


def hold(hosts: Hosts, key: str) -> MappedEntry:
    held = hosts.transfers.hold(key.encode(), hosts.record(key), time.monotonic() + 20, lazily=True)
    assert held is not None
    return held


def lazy(hosts: Hosts, key: str, *, verify: bool = False) -> Any:
    return view(root_of(hosts.here), key, hold(hosts, key), PinOptions("r+", 20.0, verify, False))


def test_a_slice_moves_its_bytes_and_no_more(hosts: Hosts, sent: list[int]) -> None:
    value = torch.arange(100_000, dtype=torch.int32).view(1000, 100)
    hosts.there.put("key", {"x": value, "y": torch.zeros(100_000)})
    with moves(sent, 0, 0):
        found = lazy(hosts, "key")
        part = found["x"][10:20]
    with moves(sent, 10 * 400):
        assert torch.equal(part.clone(), value[10:20])
    with moves(sent, 0, 0):
        assert part.sum() == value[10:20].sum()
    with moves(sent, 5 * 400):
        assert torch.equal(found["x"][15:25].clone(), value[15:25])
    with moves(sent, 4):
        assert found["x"][500, 3].item() == value[500, 3]


def test_a_column_moves_its_bytes_and_no_more(hosts: Hosts, sent: list[int]) -> None:
    value = torch.arange(100_000, dtype=torch.int32).view(1000, 100)
    hosts.there.put("key", value)
    found = lazy(hosts, "key")
    with moves(sent, 1000 * 8):
        assert torch.equal(found[:, 3:5].clone(), value[:, 3:5])


@pytest.mark.parametrize("index", [[1, 5, -1, 5], torch.tensor([7, 2, 2]), torch.arange(1000) % 100 == 1])
def test_rows_move_their_bytes_and_no_more(hosts: Hosts, sent: list[int], index: Any) -> None:
    value = torch.arange(100_000, dtype=torch.int32).view(1000, 100)
    hosts.there.put("key", value)
    found = lazy(hosts, "key")
    rows = {int(row) for row in value[index][:, 0]}
    with moves(sent, len(rows) * 400):
        assert torch.equal(found[index], value[index])


def test_batches_of_rows_move_their_bytes_and_no_more(hosts: Hosts, sent: list[int]) -> None:
    value = {"x": torch.arange(100_000).view(1000, 100), "y": torch.arange(1000)}
    hosts.there.put("key", value)
    found, rows = lazy(hosts, "key"), torch.tensor([5, 900, 17, 5])
    with moves(sent, 3 * 808, 2):
        made = read_rows(found, rows)
    assert torch.equal(made["x"], value["x"][rows]) and torch.equal(made["y"], value["y"][rows])


def test_large_rows_come_straight_to_where_they_are_read_and_are_kept_the_second_time(
    hosts: Hosts, sent: list[int]
) -> None:
    value = torch.arange(100_000).view(50, 2000)
    hosts.there.put("key", {"x": value, "y": value.to(torch.int32)})
    found, rows = lazy(hosts, "key"), torch.tensor([40, 3, 40, 7])
    for times in (1, 1, 0):
        with moves(sent, times * 3 * 24_000, 2 * times):
            made = read_rows(found, rows)
        assert torch.equal(made["x"], value[rows]) and torch.equal(made["y"], value[rows].to(torch.int32))
    with moves(sent, 16_000):
        assert torch.equal(read_rows(found["x"], [8]), value[8:9])
    assert torch.equal(read_rows(found["x"].t(), [5]), value.t()[5:6])


def test_rows_that_come_no_more_leave_the_memory_that_was_given(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.arange(100_000).view(50, 2000)
    hosts.there.put("key", value)
    found, out = lazy(hosts, "key"), torch.ones(2, 2000, dtype=torch.int64)
    assert torch.equal(read_rows(found, [4]), value[4:5])

    def gone(*_: object) -> bool:
        return False

    monkeypatch.setattr(transfers, "read_ranges", gone)  # what their host says when it has let go of them
    for rows in ([7, 8], [4, 8]):
        with pytest.raises(VersionGoneError, match="replaced"):
            read_rows(found, rows, out=out)
        with pytest.raises(VersionGoneError, match="replaced"):
            read_rows(found, rows)
    assert (out == 1).all()


_INDICES = st.lists(
    st.one_of(
        st.builds(slice, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
        st.integers(0, 4),
        st.lists(st.integers(-5, 4), min_size=1, max_size=6),
        st.just(None),
        st.just(...),
    ),
    max_size=3,
)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_INDICES)
def test_any_index_reads_what_torch_reads(hosts: Hosts, index: list[Any]) -> None:
    if index.count(...) > 1:
        index = [one for one in index if one is not ...]
    value = torch.arange(5 * 6 * 500).view(5, 6, 500)
    if "any" not in hosts.there:
        hosts.there.put("any", value)
    try:
        expected = value[tuple(index)]
    except IndexError:
        return
    assert torch.equal(lazy(hosts, "any")[tuple(index)].clone(), expected)


def test_operators_read_what_they_need(hosts: Hosts) -> None:
    value = torch.arange(60_000, dtype=torch.float32).view(600, 100)
    hosts.there.put("key", {"x": value})
    rows = torch.tensor([3, 599])
    operators: list[Callable[[Any], torch.Tensor]] = [
        lambda x: x.sum(),
        lambda x: x.t()[5].clone(),
        lambda x: torch.index_select(x, 0, rows),
        lambda x: torch.index_select(x, 1, torch.tensor([3, 99])),
        lambda x: torch.take(x, rows),
        lambda x: torch.gather(x, 0, rows[:, None]),
        lambda x: x[5:9] @ x[5:9].t(),
        lambda x: torch.nn.functional.embedding(rows, x),
        lambda x: x.view(torch.int32)[2:4].clone(),
        lambda x: x.masked_select(x > 50_000),
    ]
    for operator in operators:
        assert torch.equal(operator(lazy(hosts, "key")["x"]), operator(value))


def test_a_view_with_checksums_reads_whole_leaves(hosts: Hosts, sent: list[int]) -> None:
    hosts.there.put("key", {"x": torch.arange(5000), "y": torch.arange(5000)})
    found = lazy(hosts, "key", verify=True)
    with moves(sent, 40_000):
        assert found["x"][7].item() == 7


def test_a_get_into_a_part_moves_that_part(hosts: Hosts, sent: list[int]) -> None:
    value = {"x": torch.arange(5000), "y": torch.ones(100), "z": torch.zeros(5000)}
    hosts.there.put("key", value)
    for verify in (False, True):
        out = {"y": torch.zeros(100), "x": torch.zeros(5000, dtype=torch.int64)}
        with moves(sent, 40_400, 1 + verify):
            options = contents.ReadOptions(out=out, strict=False)
            contents.read(root_of(hosts.here), "key", hold(hosts, "key"), options, verify=verify, allow_pickle=False)
        assert torch.equal(out["x"], value["x"]) and out["y"].sum() == 100
    like = contents.ReadOptions(like={"y": torch.zeros(100)}, strict=False)
    with moves(sent, 400):
        made = contents.read(root_of(hosts.here), "key", hold(hosts, "key"), like, verify=False, allow_pickle=False)
    assert made["y"].sum() == 100


def test_large_objects_come_with_a_view(hosts: Hosts) -> None:
    words = ["word" * 10 + str(i) for i in range(1000)]
    hosts.there.put("key", {"t": torch.arange(2000), "words": words})
    assert lazy(hosts, "key")["words"] == words


def test_a_view_of_a_copy_uses_it(hosts: Hosts, sent: list[int]) -> None:
    hosts.there.put("key", torch.arange(5000))
    hosts.get("key")
    with moves(sent, 0, 0):
        assert lazy(hosts, "key").sum() == sum(range(5000))


def test_a_view_that_is_pickled_is_copied_first(hosts: Hosts) -> None:
    hosts.there.put("key", {"x": torch.arange(5000)})
    found = lazy(hosts, "key")
    sent = pickle.dumps(found["x"][10:20])
    assert hosts.copies() == ["key"] and len(sent) < 2000
    assert pickle.loads(sent).sum() == sum(range(10, 20))
    assert found["x"][:3].sum() == 3
