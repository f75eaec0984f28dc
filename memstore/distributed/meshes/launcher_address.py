"""Where Monarch reaches an actor, as its id tells."""

from __future__ import annotations

import re

_OF_TCP = re.compile(r"tcp:(?://)?\[?([0-9.]+|[0-9a-fA-F:]+)\]?:\d+$")


def ips_of(actor_id: str) -> tuple[str, ...]:
    """The IP at which Monarch reaches the process of an actor, if it does so by one."""
    found = _OF_TCP.search(actor_id)
    return (found[1],) if found else ()
