"""How a root is served: the agent of a host, and its index process.

agent          starts the index process, and starts it again          ranks        memstore.join, under a launcher
child, signals how it forks and hears it                               cluster      Cluster; how a dead host is removed
watchdog       and when it takes it for hung                           asking       what they ask other hosts by
agent_lock     who serves a root
agent_process  its program

index_process  the program: all of what follows, put together
membership     how a root becomes a member                             taken_keys   and what it looks at before
answering      requests, and their answers                             waiting      those that wait for a version
connections    whose clients are there
duties         what it does by itself                                  driving      how it takes the rules' steps
reporting      how the host is                                         cluster_file ROOT/cluster
pulse          and that it goes on                                     notices      what has changed, for people
former         and what it has left on shared storage before
silence        and who hasn't answered for a while
lines          what both print                                         service      what systemd is told
options, news, messages, ending: what agent, index process and others tell each other
"""

from __future__ import annotations

from memstore.distributed.serving.agent import serve
from memstore.distributed.serving.agent_lock import agent_of, has_ended_well, is_served
from memstore.distributed.serving.asking import Asker, served_standing, standing_at
from memstore.distributed.serving.cluster import (
    Cluster,
    ClusterReference,
    actors_at,
    cluster_of,
    learn,
    reference_to,
    remove_host,
    settled_in,
    status_at,
    status_of,
)
from memstore.distributed.serving.ranks import (
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
from memstore.distributed.serving.transports import has_rdma

__all__ = [
    "ADDRESS_VARIABLE",
    "Asker",
    "Cluster",
    "ClusterReference",
    "LOG",
    "PORT_VARIABLE",
    "PROGRAM",
    "actors_at",
    "agent_of",
    "cluster_of",
    "given_secret",
    "has_ended_well",
    "has_rdma",
    "is_served",
    "is_served_on",
    "join",
    "learn",
    "reference_to",
    "remove_host",
    "serve",
    "served_standing",
    "settled_in",
    "standing_at",
    "start_agent",
    "status_at",
    "status_of",
    "turn",
    "wait_until_member",
]
