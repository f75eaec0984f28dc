"""A state dict put into a bucket, and what a read of some of it fetches: against a server on loopback."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any
from unittest import mock

import torch

from memstore import Snapshot, StateDict, TensorShard
from tests.benchmarks.measure import WARM_UP_CALLS, Contestant, compare
from tests.benchmarks.report import Absent, Beside, Figure, Goal, Series, Workload, exactly
from tests.benchmarks.session import Session
from tests.benchmarks.workloads.put_get import at_most, times_faster
from tests.support.buckets import KEYS, options_for
from tests.support.sink import SinkServer

OURS, BARE, FSSPEC = "memstore", "bare puts of 64 MiB", "DCP with its FsspecWriter"
TORCHSNAPSHOT = "torchsnapshot with its S3 plugin"
PIECE, AT_ONCE = 64 << 20, 8
MOST_ROUNDS = 5
RANKS, ROWS = 4, 64

Put = Callable[[str], Any]


def measure(session: Session) -> Workload:
    total = (64 if session.quick else 1024) << 20
    size = f"{total >> 20} MiB"
    rounds = min(session.rounds, MOST_ROUNDS)
    series: list[Series] = []
    goals: list[Goal] = []
    absent: list[Absent] = []
    for tensors in (1, 256):
        found = _compare_takes(total, tensors, rounds, absent)
        series.append(found)
        what = f"{size} put into a bucket as {tensors} tensors"
        goals += [at_most(what, found, 1.25, BARE), *times_faster(what, found, 1.5, [FSSPEC, TORCHSNAPSHOT])]
    increments, bytes_of = _increments(total, rounds)
    fetched = _reads(total)
    series += [increments, Series("bytes", f"bytes on the way, of {size}", "B", [*bytes_of, *fetched])]
    part, rows = (figure.value.median for figure in fetched)
    share = bytes_of[1].value.median / bytes_of[0].value.median
    goals += [
        at_most("an increment of which 1 % has changed", increments, 0.05, "a whole take", name=OURS),
        Goal("bytes of that increment, of the whole", exactly(share), "<=", 0.02, "x"),
        Goal("bytes of a quarter of the rows, of their size", exactly(part / (total / RANKS)), "<=", 1.05, "x"),
        Goal(f"bytes of {ROWS} rows of 4 KiB", exactly(rows), "<=", 2 << 20, "B", limit=Beside("rows", ROWS * 4096)),
    ]
    return Workload(
        id="buckets",
        title=f"A state dict of {size} in a bucket",
        text="The server, a process of this machine, takes what is put as S3 would, and forgets it; for reads it keeps "
        "all. It and the client share the cores. The bare puts are obstore's, of one buffer, several at once.",
        series=series,
        goals=goals,
        absent=absent,
    )


def _state(total: int, tensors: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((total // tensors // 4,), float(i)) for i in range(tensors)}


def _contestant(name: str, role: Any, put: Put, rounds: int) -> Contestant:
    numbers = count()
    return Contestant(name, role, lambda: put(f"{name.split()[0]}-{next(numbers)}"), most=rounds + WARM_UP_CALLS)


def _compare_takes(total: int, tensors: int, rounds: int, absent: list[Absent]) -> Series:
    state = _state(total, tensors)
    server = SinkServer()
    try:
        options = options_for(server.url)
        contestants = [
            _contestant(OURS, "memstore", lambda name: _take(f"s3://bucket/{name}", state, options), rounds),
            _contestant(BARE, "limit", _bare(server.url, total), rounds),
        ]
        for name, lacks, put in (
            (FSSPEC, "s3fs isn't installed", _dcp(server.url, state)),
            (TORCHSNAPSHOT, "torchsnapshot or aiobotocore isn't installed", _torchsnapshot(server.url, state)),
        ):
            if put is not None:
                contestants.append(_contestant(name, "peer", put, rounds))
            elif all(one.name != name for one in absent):
                absent.append(Absent(name, lacks))
        title = f"{total >> 20} MiB as {tensors} tensors, put into a bucket"
        return compare(f"take-{tensors}", title, contestants, rounds=rounds, reference=OURS)
    finally:
        server.close()


def _take(url: str, state: dict[str, torch.Tensor], options: dict[str, Any], **more: Any) -> None:
    Snapshot.take(url, {"state": StateDict(state)}, storage_options=options, **more)


def _bare(url: str, total: int) -> Put:
    import obstore
    from obstore.store import S3Store

    store = S3Store("bucket", config={**KEYS, "endpoint": url}, client_options={"allow_http": True})
    memory = memoryview(torch.rand(total // 4).numpy()).cast("B")  # zeros would be one page, in the cache

    def put(name: str) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [
                pool.submit(obstore.put, store, f"{name}/{at}", memory[at : at + PIECE], use_multipart=False)
                for at in range(0, total, PIECE)
            ]:
                done.result()

    return put


def _dcp(url: str, state: dict[str, torch.Tensor]) -> Put | None:
    try:
        importlib.import_module("s3fs")
    except ImportError:
        return None
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _fsspec_filesystem as fsspec_filesystem

    given = {"key": KEYS["access_key_id"], "secret": KEYS["secret_access_key"], "endpoint_url": url}

    def put(name: str) -> None:
        writer = fsspec_filesystem.FsspecWriter(f"s3://bucket/{name}", thread_count=AT_ONCE, **given)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)

    return put


def _torchsnapshot(url: str, state: dict[str, torch.Tensor]) -> Put | None:
    """Its plugin looks at no `storage_options`: the environment says where the service is."""
    try:
        library = importlib.import_module("torchsnapshot")
        importlib.import_module("aiobotocore")
    except ImportError:
        return None
    app_state = {"state": library.StateDict(**state)}
    given = {
        "AWS_ACCESS_KEY_ID": KEYS["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": KEYS["secret_access_key"],
        "AWS_DEFAULT_REGION": KEYS["region"],
        "AWS_ENDPOINT_URL": url,
    }

    def put(name: str) -> None:
        with mock.patch.dict(os.environ, given):
            library.Snapshot.take(f"s3://bucket/{name}", app_state)

    return put


def _increments(total: int, rounds: int) -> tuple[Series, list[Figure]]:
    """Of 100 leaves one has changed since the base."""
    state = _state(total, 100)
    server = SinkServer()
    try:
        options = options_for(server.url)
        _take("s3://bucket/run/base", state, options)
        server.counted()
        state["t50"].add_(1)

        def increment(name: str) -> None:
            _take(f"s3://bucket/run/{name}", state, options, base="s3://bucket/run/base")

        _take("s3://bucket/run/counted-whole", state, options)
        whole, _ = server.counted()
        increment("counted")
        changed, _ = server.counted()
        found = compare(
            "increment",
            f"{total >> 20} MiB of which one of 100 leaves has changed",
            [
                _contestant(OURS, "memstore", increment, rounds),
                _contestant(
                    "a whole take", "limit", lambda name: _take(f"s3://bucket/run/{name}", state, options), rounds
                ),
            ],
            rounds=rounds,
            reference=OURS,
        )
        return found, [
            Figure("a whole take puts", "memstore", exactly(float(whole)), 1),
            Figure("an increment puts", "memstore", exactly(float(changed)), 1),
        ]
    finally:
        server.close()


def _reads(total: int) -> list[Figure]:
    """The bytes of one of four ranks' rows, and of 64 rows."""
    rows = total // 4096
    weight = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, 1024).contiguous()
    server = SinkServer(keep=True)
    try:
        options, url = options_for(server.url), "s3://bucket/run"
        _take(url, {"weight": weight}, options)
        server.counted()
        share = rows // RANKS
        mine = TensorShard(torch.zeros(share, 1024), (rows, 1024), (share, 0))
        Snapshot(url, storage_options=options).restore({"state": StateDict(weight=mine)})
        if not torch.equal(mine.local, weight[share : 2 * share]):
            raise SystemExit("what was restored differs from what was saved")
        _, part = server.counted()
        view = Snapshot(url, storage_options=options).view()["state"]["weight"]
        first = rows // 3
        if not torch.equal(view[first : first + ROWS] + 0, weight[first : first + ROWS]):
            raise SystemExit("what was read differs from what was saved")
        _, few = server.counted()
        return [
            Figure("a quarter of the rows fetches", "memstore", exactly(float(part)), 1),
            Figure(f"{ROWS} rows of 4 KiB fetch", "memstore", exactly(float(few)), 1),
        ]
    finally:
        server.close()
