"""References that are sent to another host of the store: what they show there, and for how long.

Hosts have their folder at the same path. Here there are two in one machine, so the path is changed in the pickle.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import memstore
from memstore.errors import CrossHostError, VersionGoneError
from tests.distributed.client.hosts import Cluster, await_
from tests.patience import give_back_until

SIZE = 5000


def big(number: float) -> torch.Tensor:
    return torch.full((SIZE,), float(number))


def sent(value: Any, here: memstore.Store, there: memstore.Store) -> Any:
    assert len(here.root) == len(there.root)
    return pickle.loads(pickle.dumps(value).replace(here.root.encode(), there.root.encode()))


def replace_it(store: memstore.Store) -> None:
    for number in range(3):
        store.put("k", big(100 + number))
    store.gc()


@pytest.mark.parametrize("first", [0, 1], ids=["home elsewhere", "home here"])
def test_a_ref_shows_the_same_version_on_another_host(pair: Cluster, first: int) -> None:
    here, there = pair.stores[first], pair.stores[1 - first]
    here.put("k", {"x": big(1), "text": "words"})
    ref = sent(here.ref("k"), here, there)
    replace_it(here)
    assert ref.root == there.root
    assert torch.equal(ref.view()["x"][3:5], torch.ones(2))
    found = ref.get()
    assert torch.equal(found["x"], big(1)) and found["text"] == "words"
    assert torch.equal(there.get("k"), here.get("k"))  # the present one


def test_a_small_value_goes_along(pair: Cluster) -> None:
    here, there = pair.stores
    here.put("k", {"x": 7})
    ref = sent(here.ref("k"), here, there)
    here.put("k", 8)
    assert ref.get() == {"x": 7}


def test_a_ref_is_sent_on_and_back(pair: Cluster) -> None:
    here, there = pair.stores
    here.put("k", big(1))
    ref = sent(here.ref("k"), here, there)
    replace_it(here)
    back = sent(ref, there, here)
    del ref
    assert torch.equal(back.get(), big(1))


def test_a_view_shows_the_same_version_on_another_host(pair: Cluster) -> None:
    here, there = pair.stores
    here.put("k", {"x": big(1), "y": torch.arange(SIZE)})
    found = sent(here.view("k"), here, there)
    replace_it(here)
    assert torch.equal(found["x"][3:5], torch.ones(2)) and found["y"][7] == 7
    assert torch.equal(found["x"].clone(), big(1))
    with pytest.raises(CrossHostError, match="came from another host.*store.ref"):
        pickle.dumps(found)


def test_a_part_of_a_view_moves_its_bytes_and_no_more(pair: Cluster) -> None:
    here, there = pair.stores
    here.put("k", torch.arange(SIZE))
    rows = sent(here.view("k")[10:20], here, there)
    assert rows.sum() == sum(range(10, 20))
    assert not pair.homes[1].look(lambda tables: tables.copies(b"", 10))


def test_one_that_comes_after_its_lease_says_so(pair: Cluster) -> None:
    here, there = pair.stores
    here.put("k", big(1))
    ref = here.ref("k", lease=0)
    data = pickle.dumps(ref)
    del ref
    here.delete("k")
    await_(lambda: here.get("k", None) is None)
    give_back_until(here, lambda: here.stats().live_bytes == 0)
    here.gc()
    late = pickle.loads(data.replace(here.root.encode(), there.root.encode()))
    with pytest.raises(VersionGoneError, match="'k'"):
        late.get()
    assert late.get(default=None) is None


def test_another_store_is_no_host_of_this_one(pair: Cluster, scratch: str) -> None:
    here = pair.stores[0]
    here.put("k", big(1))
    with memstore.open(f"{scratch}-9") as other, pytest.raises(VersionGoneError, match="another store"):
        sent(here.ref("k"), here, other)


def test_datasets_and_buffers_are_used_on_their_host(pair: Cluster) -> None:
    here, there = pair.stores
    spec = {"x": ((), torch.int64)}
    dataset = here.create_dataset("k", spec, capacity=8)
    buffer = memstore.ReplayBuffer(here, "b", spec, capacity=8)
    for one, kind in ((dataset, "dataset"), (buffer, "buffer")):
        with pytest.raises(CrossHostError, match=f"{kind}.*{pair.homes[0].member.address}.*use it there"):
            sent(one, here, there)
    assert len(pickle.loads(pickle.dumps(dataset))) == 0
