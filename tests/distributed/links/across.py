"""A program for tests on several hosts: `serve ADDRESS`, or `ask ADDRESS`, which says of each call how it ended.

It imports the links alone, so that it starts in a fraction of a second.
"""

from __future__ import annotations

import sys
import threading
import time

from memstore.distributed.links import CLIENT, Asked, Hello, Links, Listener
from memstore.errors import HomeUnavailableError

MEMBER = bytes(range(16))
SECRET = b"s" * 32
LONG = 120.0  # seconds: no call of these tests ends by its own deadline


def serve(address: str) -> None:
    def echo(asked: Asked) -> None:
        asked.reply(asked.message)

    listener = Listener(
        address, secret=SECRET, member=MEMBER, hello=Hello(memstore="1"), serve=echo, stream=lambda sock: sock.close()
    )
    listener.start()
    print(listener.address, flush=True)
    threading.Event().wait()


def ask(address: str) -> None:
    links = Links(secret=SECRET, kind=CLIENT, hello=Hello(memstore="1"))
    number = 0
    while True:
        number += 1
        message = b"%d" % number
        try:
            answer = links.send(address, MEMBER, message, time.monotonic() + LONG)
        except HomeUnavailableError:
            answer = None
        assert answer in (message, None)
        print("no answer" if answer is None else "answer", flush=True)
        time.sleep(0.02)  # the test reads all of them


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](sys.argv[2])
