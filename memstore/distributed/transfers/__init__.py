"""How bytes move between hosts, over TCP. No torch.

ranges     sets of ranges of bytes
pieces     ranges of memory on their way through a socket
messages   what is said on a stream
sending    the sender: answers what is asked on one stream
senders    the threads that do so
keeping    segments of this host that readers of others look at
streams    the reader's streams, of which a few are kept
relay      whether this host's index process brings bytes, by memory that it has registered (memstore/distributed/rdma)
asking     one request, and its answer
receiving  a transfer: what is asked of each host, over one or two streams
kept       what this process looks at, and other hosts keep
absent     values in memory of a process, of which the bytes come that are needed
copies     values in segments of this host, for all of its processes
trimming   which of these copies stay
turn       one of these processes makes a copy, and the others wait
transfers  what a process asks for: which of these it gets
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
