"""The program of the process that holds the switch: run as a file, with the standard library alone.

It delays frames. Those of host i to host j come here when i has DELAYED + j for j's hardware address (see `cables`);
they are sent on to HOST + j when their time has come, in order, as coming from DELAYED + i: so the switch learns where
that one is, and goes on to know where i is. To "i j seconds" on its standard input it says "done": what comes after
that is delayed so. It ends with its standard input, and with the process that started it.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque

HOST, DELAYED, NOWHERE = (bytes([2, 0, 0, 0, kind]) for kind in (0, 1, 2))  # + a host's number: hardware addresses

_SOL_PACKET, _PACKET_VNET_HDR, _ETH_P_ALL = 263, 15, 3
_HEADER = 10  # struct virtio_net_hdr before each frame: it carries checksums and segments that are not computed yet
_LARGEST = 1 << 18
_WAITING = 64 << 20  # bytes, each way between two hosts; what comes on top is lost, as in any switch


class Line:
    """What one host sends to one other: frames with the moments when they are due."""

    def __init__(self) -> None:
        self.delay = 0.0
        self._frames: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    def add(self, frame: bytes, now: float) -> None:
        if self._bytes + len(frame) <= _WAITING:
            self._frames.append((now + self.delay, frame))
            self._bytes += len(frame)

    def due(self, now: float) -> bytes | None:
        if not self._frames or self._frames[0][0] > now:
            return None
        frame = self._frames.popleft()[1]
        self._bytes -= len(frame)
        return frame

    @property
    def next_due(self) -> float:
        return self._frames[0][0] if self._frames else float("inf")


class Switch:
    def __init__(self, cable: socket.socket) -> None:
        self._cable = cable
        self._lines: dict[tuple[int, int], Line] = {}

    def set_delay(self, source: int, target: int, seconds: float) -> None:
        self._lines.setdefault((source, target), Line()).delay = seconds

    def receive(self, now: float) -> None:
        frame = self._cable.recv(_LARGEST)
        to, come = frame[_HEADER : _HEADER + 6], frame[_HEADER + 6 : _HEADER + 12]
        line = self._lines.get((come[5], to[5]))
        if to[:5] != DELAYED or come[:5] != HOST or line is None:
            return  # a broadcast, or a frame whose place the switch has not learned yet
        addresses = HOST + to[5:] + DELAYED + come[5:]
        line.add(frame[:_HEADER] + addresses + frame[_HEADER + 12 :], now)

    def send_due(self, now: float) -> float:
        """Returns when the next one is due."""
        for line in self._lines.values():
            while (frame := line.due(now)) is not None:
                try:
                    self._cable.send(frame)
                except OSError:  # no room, or the cable is being taken away: a lost frame
                    continue
        return min((line.next_due for line in self._lines.values()), default=float("inf"))


def hold(owner: int) -> None:
    process = os.pidfd_open(owner)
    if os.getppid() != owner:
        return
    os.write(1, b"ready\n")
    interface = os.read(0, 1000).decode().strip()  # when it is there
    if not interface:
        return
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as cable:
        cable.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        cable.bind((interface, _ETH_P_ALL))
        os.write(1, b"done\n")
        _serve(Switch(cable), cable.fileno(), process)


def _serve(switch: Switch, cable: int, process: int) -> None:
    poll = select.poll()
    for fd in (process, cable, 0):
        poll.register(fd, select.POLLIN)
    next_due = float("inf")
    while True:
        pause = None if next_due == float("inf") else max(0.0, next_due - time.monotonic()) * 1000
        ready = {fd for fd, _ in poll.poll(pause)}
        if process in ready:
            return
        if cable in ready:
            switch.receive(time.monotonic())
        if 0 in ready:
            line = os.read(0, 1000)  # a whole one: each is answered before the next is sent
            if not line:
                return
            source, target, seconds = line.split()
            switch.set_delay(int(source), int(target), float(seconds))
            os.write(1, b"done\n")
        next_due = switch.send_due(time.monotonic())


if __name__ == "__main__":
    hold(int(sys.argv[1]))
