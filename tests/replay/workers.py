"""Workers that do the same with one buffer again and again, until they are killed."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from typing import Any

import memstore
from tests.replay.rows import numbers_of, rows


def work(channel: Connection, root: str, role: str, sampler: Any, seed: int) -> None:
    """For a worker: does the same again and again. A writer says what was acknowledged, at which time."""
    chance = random.Random(seed)
    buffer = memstore.ReplayBuffer(memstore.open(root, timeout=60.0), "replay", sampler=sampler)
    channel.send("ready")
    number = 0
    while True:
        if role == "write":
            count = chance.choice([1, 1, 2, 7, 20])
            index = buffer.extend(rows(number, count)).tolist()
            channel.send((index, number))
            number += count
        elif role == "slices":
            sample = buffer.sample_slices(4, 3, end_key=None)
            numbers_of(sample)
            assert (sample["index"].diff() == 1).all()
        else:
            sample = buffer.sample(chance.choice([1, 16]))
            numbers_of(sample)
            if sampler == "prioritized":
                buffer.update_priority(sample["index"], chance.random())
