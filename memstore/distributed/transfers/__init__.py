"""How bytes move between hosts, over TCP. No torch.

messages   what is said on a stream; ranges of bytes, and of memory on their way through a socket
sending    the host where bytes lie: answers what is asked on streams, and pins what others look at
receiving  the host where they are needed: streams, requests, and transfers over several of them
copies     values, and parts of sharded ones, in segments of this host, for all of its processes
transfers  what a process asks for: which of these it gets, and values of which bytes are absent
"""

from __future__ import annotations

from memstore.distributed.transfers.copies import trim
from memstore.distributed.transfers.messages import (
    BUSY,
    ELSEWHERE,
    FAILED,
    FAILURE_LIMIT,
    FOLLOWS,
    GONE,
    HEAD,
    LENGTH,
    STAGED_LIMIT,
    STAGED_UNIT,
    TORN,
    WHOLE,
    BadRequestError,
    Bring,
    Pieces,
    Stage,
    Staged,
    decode_staged,
    encode,
)
from memstore.distributed.transfers.receiving import BrokenStreamError, Stream, Streams, announce, receive_bytes
from memstore.distributed.transfers.receiving import Links as Streamer
from memstore.distributed.transfers.sending import (
    Senders,
    end_of_answer,
    map_segments,
    ranges_of,
    send_all,
    send_elsewhere,
    send_failure,
)
from memstore.distributed.transfers.transfers import Transfers

__all__ = [
    "BUSY",
    "ELSEWHERE",
    "FAILED",
    "FAILURE_LIMIT",
    "FOLLOWS",
    "GONE",
    "HEAD",
    "LENGTH",
    "STAGED_LIMIT",
    "STAGED_UNIT",
    "TORN",
    "WHOLE",
    "BadRequestError",
    "Bring",
    "BrokenStreamError",
    "Pieces",
    "Senders",
    "Stage",
    "Staged",
    "Stream",
    "Streamer",
    "Streams",
    "Transfers",
    "announce",
    "decode_staged",
    "encode",
    "end_of_answer",
    "map_segments",
    "ranges_of",
    "receive_bytes",
    "send_all",
    "send_elsewhere",
    "send_failure",
    "trim",
]
