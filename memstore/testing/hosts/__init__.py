"""Hosts for tests: several on one machine, each with its own network, `/dev/shm`, hostname and boot id.

    from memstore.testing.hosts import Hosts

    with Hosts(3) as hosts:
        server = hosts[0].popen(["python", "serve.py", hosts[0].address])
        done = hosts[1].run(["python", "client.py", hosts[0].address], capture_output=True, timeout=10)
        hosts.cut(0, 1)                    # packets vanish, as when a cable is pulled
        hosts.heal(0, 1)
        hosts.delay(0, 2, 0.01)            # 10 ms each way
        hosts[0].kill()                    # all of its processes

They are namespaces of the kernel, joined by virtual cables and a switch. Root may make them; others may where the
system permits user namespaces. The commands `ip` (iproute2), `unshare`, `nsenter` and `mount` (util-linux) are needed:
`why_unavailable` says what is missing. When the `with` ends, or the process that made them, however it ends, then all
that runs on the hosts is killed, and nothing is left.

hosts        Hosts: makes them; cuts, heals and delays what is sent
host         Host: one of them; runs commands on it
cables       who reaches whom, and how
namespaces   the commands that make namespaces and enter them
holding      the program of the process that holds a host (a file to be run, as the next)
switching    the program of the process that holds the switch, and delays what passes
"""

from memstore.testing.hosts.host import Host
from memstore.testing.hosts.hosts import Hosts, why_unavailable
from memstore.testing.hosts.namespaces import HostGoneError, HostsUnavailableError

__all__ = ["Host", "HostGoneError", "Hosts", "HostsUnavailableError", "why_unavailable"]


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__file__", "__name__", "__path__"})  # completion offers what users call
