"""memstore.serve: a store on the hosts of Monarch meshes. Only `index_actor` and `serve` import Monarch, when called.

serve        what a user calls: the order of things, the index actors as it gives them orders, and who is who
index_actor  the actors: index actors, and the overseer who hears of their failures
launching    what an index actor does on its host, and at which address hosts reach the first one
messages     what they tell each other
"""

from __future__ import annotations

from memstore.distributed.meshes.serve import serve

__all__ = ["serve"]
