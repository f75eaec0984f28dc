"""How bytes move between hosts, over TCP or, through Monarch, by RDMA. No torch.

messages   what is said on a stream; ranges of bytes, and of memory on their way through a socket
sending    the host where bytes lie: answers what is asked on streams, and pins what others look at
receiving  the host where they are needed: streams, requests, and transfers over several of them
relays     which of these are passed on to other hosts while they are filled, and whom readers are sent to
copies     values, and parts of sharded ones, in segments of this host, for all of its processes
transfers  what a process asks for: which of these it gets, and values of which bytes are absent
rdma       registered memory of index processes, in place of streams; imported when it is needed
"""

from __future__ import annotations

from memstore.distributed.transfers.copies import GoneError, read_file, take_values
from memstore.distributed.transfers.receiving import announce
from memstore.distributed.transfers.sending import Senders
from memstore.distributed.transfers.transfers import Transfers

__all__ = ["GoneError", "Senders", "Transfers", "announce", "read_file", "take_values"]
