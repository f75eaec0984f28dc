"""Index actors: the second door of an index process, on Monarch. Off unless it is asked for.

It answers what the listener answers, by the same bytes. **Monarch authenticates nobody, and unpickles what it is sent:
whoever can connect to its port may run code in the index process.** This module imports no Monarch, which takes
seconds: that happens when an actor is started, or a reference to one opened.

notes        what an actor is given and gives back
asked        a request, as it is answered
desk         where it takes requests in, and gives answers out
index_actor  the actor, as Monarch calls it
standing     an index process starts it
reference    where an actor is, as bytes that may be handed on
requests     what is asked of an actor, and its answer
actor_links  ActorLinks: requests by actors in place of sockets
forks        that a forked child has no Monarch
"""

from __future__ import annotations

from memstore.distributed.actors.actor_links import ActorLinks
from memstore.distributed.actors.asked import Asked
from memstore.distributed.actors.reference import (
    FindActor,
    FoundActor,
    Reference,
    need_monarch,
    use_actors,
    used_actors,
)
from memstore.distributed.actors.requests import first_line
from memstore.distributed.actors.standing import start_actor, start_monarch

__all__ = [
    "ActorLinks",
    "Asked",
    "FindActor",
    "FoundActor",
    "Reference",
    "first_line",
    "need_monarch",
    "start_actor",
    "start_monarch",
    "use_actors",
    "used_actors",
]
