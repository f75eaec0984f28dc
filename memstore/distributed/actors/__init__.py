"""Actors of Monarch: what supervises an agent on a mesh, and Monarch in an index process. No door for requests.

monarch_process  Monarch in a process of ours
"""

from __future__ import annotations

from memstore.distributed.actors.monarch_process import first_line, need_monarch, start_monarch

__all__ = ["first_line", "need_monarch", "start_monarch"]
