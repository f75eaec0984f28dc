"""How a root is served: the agent of a host, and its index process.

agent          starts the index process, and starts it again
supervision    what the two share: lock, options, news, pulse, transports
joining        memstore.join, under a launcher
returns        a host that was removed: its folder is set aside, and its values are put anew
cluster        Cluster: status, remove, drain, promote
questions      what is asked of index processes for it
__main__       the agent's program

index_process  the program: all of what follows, put together
membership     who this host is in its cluster, and what people are told of it
requests       requests, and their answers, at once or once there is one
duties         what it does by itself, and how it takes the rules' steps
"""

from __future__ import annotations

from memstore.distributed.serving.agent import serve
from memstore.distributed.serving.cluster import Cluster, cluster_of, known_cluster, policy_of, remove_member
from memstore.distributed.serving.joining import (
    ADDRESS_VARIABLE,
    LOG,
    PORT_VARIABLE,
    PROGRAM,
    given_secret,
    is_served_on,
    join,
    start_agent,
    turn,
    wait_until_member,
)
from memstore.distributed.serving.questions import standing_at, standing_of
from memstore.distributed.serving.supervision import (
    PROMOTE_AFTER,
    agent_of,
    check_silence,
    has_ended_well,
    has_rdma,
    is_served,
    need_monarch,
)

__all__ = [
    "ADDRESS_VARIABLE",
    "LOG",
    "PORT_VARIABLE",
    "PROGRAM",
    "PROMOTE_AFTER",
    "Cluster",
    "agent_of",
    "check_silence",
    "cluster_of",
    "given_secret",
    "has_ended_well",
    "has_rdma",
    "is_served",
    "is_served_on",
    "join",
    "known_cluster",
    "need_monarch",
    "policy_of",
    "remove_member",
    "serve",
    "standing_at",
    "standing_of",
    "start_agent",
    "turn",
    "wait_until_member",
]
