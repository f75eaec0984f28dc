"""What an agent tells the index process that it starts."""

from __future__ import annotations

import msgspec

from memstore.distributed.serving.watchdog import HANG_AFTER


class Options(msgspec.Struct, frozen=True):
    """How a root is served.

    Attributes:
        root: its folder, absolute.
        address: where its index process listens.
        seed: the address of the cluster's first member.
        is_home: keys may have their home here.
        insecure: listen without a secret where others can connect.
        monarch: there is an index actor too.
        hang_after: seconds of silence after which the index process is killed.
        transport: which way bytes of values take (`transports.py`).
    """

    root: str
    address: str
    seed: str
    is_home: bool = True
    insecure: bool = False
    monarch: bool = False
    hang_after: float = HANG_AFTER
    transport: str = "auto"


class Start(msgspec.Struct, frozen=True):
    """One start of an index process.

    Attributes:
        agent: the pid of who starts it.
        incarnation: how often it was started.
        news: a pipe's end, for what the agent is to hear (`news.py`).
        pulse: seconds between two words that it goes on.
        torch, monarch: versions, which the agent has looked up once: that takes longer than all else at a start.
    """

    options: Options
    agent: int
    incarnation: int
    news: int
    pulse: float
    torch: str
    monarch: str
