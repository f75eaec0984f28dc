"""A process that makes hosts, starts something on them, and ends in one way or another: run as a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from tests.support.hosts import Host, Hosts
from tests.testing import peer


def main(way: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    with Hosts(2) as hosts:
        family = [sys.executable, "-I", "-S", peer.__file__, "family", "3"]
        first = hosts[0].popen(family, stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None and first.stdout.readline() == "all there\n"
        heir = os.fork() if way == "killed" else 0
        if way == "killed" and not heir:  # it has all files of its parent open, and outlives it
            signal.pause()
        print(json.dumps({"heir": heir, "networks": [network_of(host) for host in hosts]}), flush=True)
        if way == "exception":
            raise ValueError("on purpose")
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "interrupted":
            signal.pause()
        if way == "return":
            hosts[0].kill()


def network_of(host: Host) -> str:
    return host.run(["readlink", "/proc/self/ns/net"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main(sys.argv[1])
