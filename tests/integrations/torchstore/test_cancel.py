"""TorchStore's calls, cancelled: what a task does with its tensors afterwards is in no value, and undone by none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import memstore.integrations.torchstore as ts
from memstore import structure
from memstore.integrations.torchstore import calls
from tests.aio.loops import until

pytestmark = pytest.mark.usefixtures("job")

SIZE = 50_000


class Held:
    """A function whose calls in threads stop, before or after what they do, until they may go on."""

    def __init__(self, original: Callable[..., Any], *, before: bool) -> None:
        self._original, self._before = original, before
        self.came, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        made = None if self._before else self._original(*arguments, **options)
        self.came.set()
        assert self.may_go_on.wait(60)
        return self._original(*arguments, **options) if self._before else made


def noting_its_end(function: Callable[..., Any], ended: threading.Event) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        finally:
            ended.set()

    return call


PUTS: dict[str, Callable[[torch.Tensor], Coroutine[Any, Any, None]]] = {
    "put": lambda tensor: ts.put("key", tensor),
    "put_batch": lambda tensor: ts.put_batch({"key": tensor, "other": tensor}),
    "put_state_dict": lambda tensor: ts.put_state_dict({"w": tensor}, "key"),
}


@pytest.mark.parametrize("name", PUTS)
async def test_a_put_that_is_cancelled_in_its_copy_is_not_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a trainer whose time is up may make its next step at once."""
    await ts.put("key", 7)
    held = Held(structure.fill, before=False)
    monkeypatch.setattr(structure, "fill", held)
    ended = threading.Event()
    for call in ("put", "put_batch"):
        monkeypatch.setattr(calls, call, noting_its_end(getattr(calls, call), ended))
    tensor = torch.ones(SIZE)
    putting = asyncio.ensure_future(PUTS[name](tensor))
    await until(held.came.is_set)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    tensor.fill_(2)
    held.may_go_on.set()
    await until(ended.is_set)
    assert await ts.get("key") == 7 and not await ts.exists("other")


FILLS: dict[str, Callable[[torch.Tensor], Coroutine[Any, Any, Any]]] = {
    "get": lambda tensor: ts.get("w", inplace_tensor=tensor),
    "get_batch": lambda tensor: ts.get_batch({"w": tensor, "key": None}),
    "get_state_dict": lambda tensor: ts.get_state_dict("key", user_state_dict={"w": tensor}),
}


@pytest.mark.parametrize("name", FILLS)
async def test_a_fill_that_is_cancelled_is_left_when_nothing_is_written_any_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ts.put_batch({"w": torch.ones(SIZE), "key": {"w": torch.ones(SIZE)}})
    held = Held(structure.get_into, before=True)
    monkeypatch.setattr(structure, "get_into", held)
    tensor = torch.zeros(SIZE)
    filling = asyncio.ensure_future(FILLS[name](tensor))
    await until(held.came.is_set)
    filling.cancel()
    await asyncio.sleep(0.02)
    assert not filling.done()
    held.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await filling
    assert tensor.sum() == SIZE  # the copy is over
    tensor.zero_()
    await asyncio.sleep(0.05)
    assert tensor.sum() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="orders copies of a GPU")
async def test_calls_are_ordered_on_the_stream_of_the_task() -> None:
    await ts.put("ready", 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        weights = torch.zeros(SIZE, device="cuda")
        torch.cuda._sleep(500_000_000)
        weights.fill_(1)  # this step ends long after the call of the put
        await ts.put("w", weights)
        assert (await ts.get("w")).sum() == SIZE
        torch.cuda._sleep(500_000_000)
        weights.zero_()
        await ts.get("w", inplace_tensor=weights)  # behind what the stream does still
        assert weights.sum().item() == SIZE
