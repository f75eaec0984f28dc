"""memstore.serve: a store on the hosts of a Monarch mesh. Only `launcher` and `launchers` import Monarch, when called.

serve        what a user calls; the order of things
launchers    the launchers of a mesh, as `serve` gives them orders
launcher     the actors: launchers, and the overseer who hears of their failures
launcher_address  where Monarch reaches a host
launching    what a launcher does on its host
reach        at which address the hosts reach the first one
settling     when all are ready
plan         who is who, from what the launchers have seen: pure
messages     what they tell each other
far_cluster  the cluster, for a process on none of its hosts
"""

from __future__ import annotations

from memstore.distributed.meshes.serve import serve

__all__ = ["serve"]
