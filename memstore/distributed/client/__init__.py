"""The part of a process of a served root that handles keys whose owner, or whose bytes, are elsewhere.

driving    runs the rules' steps: transactions of this host's catalog, messages by links, pauses, a deadline
elsewhere  the engine's `Elsewhere`: what a root asks, by the rules; bytes of entries, mapped; ranks of sharded puts
"""

from __future__ import annotations

from memstore.distributed.client.driving import drive
from memstore.distributed.client.elsewhere import open_elsewhere

__all__ = ["drive", "open_elsewhere"]
