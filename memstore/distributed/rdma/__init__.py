"""Bytes of other hosts by RDMA, through Monarch. Experimental: it has run over Monarch's TCP fallback only.

One index process reads memory of another's. Both have registered it once, and keep it: slots, into which values are
copied on the one side and out of which on the other. No file of a store is ever registered: whoever has the handle of
memory may write into it, and may do so late. What is read, and when, is said on a stream (`transfers`), as all else:
Monarch moves bytes, and nothing is asked of its actors. This module imports no Monarch: a plane does that as it opens.

memory  what is said to Monarch; memory that is registered, in slots, and who uses it
plane   the host where bytes lie, which puts them into slots; the one where they are needed, which reads them; both
"""

from __future__ import annotations

from memstore.distributed.rdma.memory import has_ibverbs
from memstore.distributed.rdma.plane import Plane, open_plane

__all__ = ["Plane", "has_ibverbs", "open_plane"]
