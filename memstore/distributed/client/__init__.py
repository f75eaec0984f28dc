"""What a process of a served root does for keys whose home, or whose bytes, are elsewhere.

driving     runs the rules' steps: transactions of this host's catalog, messages by links, pauses, a deadline
begun_wait  a wait at another home that no thread waits for
homes       which keys have their home here, by what was read of the catalog last
sharded     a rank's share in sharded puts
seen        what was looked up lately, for gets with `max_age`
bytes_of    where the bytes of an entry are, mapped
elsewhere   the engine's `Elsewhere`: what a root asks, by the rules
"""

from __future__ import annotations

from memstore.distributed.client.driving import drive
from memstore.distributed.client.elsewhere import open_elsewhere

__all__ = ["drive", "open_elsewhere"]
