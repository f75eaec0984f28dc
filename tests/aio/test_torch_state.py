"""What torch keeps for the awaiting task's thread holds in the thread that makes the call."""

from __future__ import annotations

import asyncio
import contextvars

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memstore
import memstore.aio
from memstore.aio import AsyncStore
from memstore.aio import calls as aio_calls

STATES = {
    "inference": lambda: torch.inference_mode(),
    "no grad": lambda: torch.no_grad(),
    "device": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
    "nothing": lambda: torch.enable_grad(),
}
GETS = [{}, {"dtype": torch.float64}, {"like": torch.zeros(100, dtype=torch.float16)}]


def described(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.is_inference(), tensor.requires_grad, tensor.device, tensor.dtype, tensor.sum().item()


@pytest.mark.parametrize("state", STATES)
async def test_a_get_gives_what_a_blocking_one_gives(root: str, store: AsyncStore, state: str) -> None:
    await store.put("x", {"a": torch.ones(100)})
    await store.put("bare", torch.ones(100))
    with memstore.open(root) as blocking:
        for options in GETS:
            with STATES[state]():
                ours, theirs = await store.get("bare", **options), blocking.get("bare", **options)
            assert described(ours) == described(theirs)
        with STATES[state]():
            nested = await store.get("x", dtype=torch.float16)
            theirs = blocking.get("x", dtype=torch.float16)
        assert described(nested["a"]) == described(theirs["a"])


async def test_a_put_under_a_mode_stores_what_the_value_holds(store: AsyncStore) -> None:
    real = torch.arange(1000.0)
    for state in STATES.values():
        with state():
            await store.put("x", real)
        assert torch.equal(await store.get("x"), real)
    with FakeTensorMode():
        fake = torch.ones(3)
        with pytest.raises(memstore.UnsupportedValueError):
            await store.put("x", fake)


async def test_tasks_of_one_loop_have_states_of_their_own() -> None:
    """Each is that of the moment of the call, whatever the loop's thread has when a thread comes to it."""

    def state(waited: float) -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    tasks: list[asyncio.Future[tuple[bool, bool]]] = []
    for number in range(40):
        with torch.inference_mode(number % 2 == 0), torch.set_grad_enabled(number % 3 == 0):
            tasks.append(asyncio.ensure_future(aio_calls.call(aio_calls.HERE, state)))
            await asyncio.sleep(0)  # so that it has begun
    expected = [(number % 2 == 0, number % 3 == 0) for number in range(40)]
    assert await asyncio.gather(*tasks) == expected
    assert await aio_calls.call(aio_calls.HERE, state) == (False, True)


async def test_context_variables_are_those_of_the_task() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")
    name.set("somebody")
    assert await aio_calls.call(aio_calls.HERE, lambda waited: name.get()) == "somebody"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
async def test_copies_to_a_gpu_are_ordered_on_the_tasks_stream(store: AsyncStore) -> None:
    value = torch.arange(32 << 20, dtype=torch.float32)
    await store.put("x", value)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        got = await store.get("x", device="cuda", non_blocking=True)
        double = got * 2
        done = stream.record_event()
    done.synchronize()
    assert torch.equal(double.cpu(), value * 2)
    assert (
        await aio_calls.call(aio_calls.HERE, lambda waited: torch.cuda.current_stream()) == torch.cuda.default_stream()
    )
    with torch.cuda.stream(stream):
        assert await aio_calls.call(aio_calls.HERE, lambda waited: torch.cuda.current_stream()) == stream
