"""Plain TCP sockets between two hosts: a request, and its bytes from memory to memory. The limit of all others."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, cast

import torch

from tests.benchmarks.on_hosts import OWNER, READER
from tests.benchmarks.peers import Value
from tests.benchmarks.peers.far import ROW, Far, Taken, Work, take_each, value_of
from tests.benchmarks.report import Role

REQUEST = struct.Struct(">QQ")  # how many bytes follow that are echoed, or 0; how many rows, whose numbers follow
AT_ONCE = 512  # pieces of one sendmsg; the kernel takes 1,024
SMALL = 1 << 20  # bytes; below, a second stream costs more than it brings
ECHOED = 1 << 10  # bytes


class FarSockets(Far):
    id: ClassVar[str] = "sockets"
    name: ClassVar[str] = "plain sockets"
    settings: ClassVar[str] = "one for 1 KiB, else two; from memory into memory that is warm"
    role: ClassVar[Role] = "limit"

    def setup(self) -> None:
        self.owner, self.reader = self.hosts.process_on(OWNER), self.hosts.process_on(READER)
        port = self.owner.run(listen, self.hosts.address(OWNER))
        self.reader.run(connect, self.hosts.address(OWNER), port)

    def offer(self, work: Work, numbers: Sequence[int]) -> None:
        self.owner.run(hold, work, numbers[-1])

    def take(self, work: Work, numbers: Sequence[int], *, check: bool) -> list[Taken]:
        taken = self.reader.run(take, work, numbers, False)
        if check and not work.is_put:  # it holds one value at a time
            self.reader.run(take, work, numbers[-1:], True)
        return taken

    def close(self) -> None:
        for name in ("owner", "reader"):
            if hasattr(self, name):
                getattr(self, name).close()


# --- on the owner's host ----------------------------------------------------------------------------------------------


class _Held(NamedTuple):
    bytes: memoryview
    row: int  # bytes


_held: list[_Held] = []


def hold(work: Work, number: int) -> None:
    value = value_of(work, number)
    whole = torch.cat(list(value.values())) if isinstance(value, dict) else value
    _held[:] = [_Held(_memory(whole), ROW)]


def _memory(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).numpy()
    return memoryview(array).cast("B")


def listen(address: str) -> int:
    server = socket.create_server((address, 0))
    threading.Thread(target=_accept, args=(server,), daemon=True).start()
    return server.getsockname()[1]


def _accept(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    """A part of what is held, by two numbers: from, to. Or rows of it, by theirs. Or what was sent."""
    while head := connection.recv(REQUEST.size, socket.MSG_WAITALL):
        echoed, rows = REQUEST.unpack(head)
        if echoed:
            connection.sendall(connection.recv(echoed, socket.MSG_WAITALL))
            continue
        numbers = struct.unpack(f">{rows or 2}Q", connection.recv((rows or 2) * 8, socket.MSG_WAITALL))
        held = _held[0]
        if not rows:
            connection.sendall(held.bytes[numbers[0] : numbers[1]])
        for at in range(0, rows, AT_ONCE):
            _send([held.bytes[row * held.row : (row + 1) * held.row] for row in numbers[at : at + AT_ONCE]], connection)


def _send(pieces: list[memoryview], connection: socket.socket) -> None:
    while pieces:
        sent = connection.sendmsg(pieces)
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][sent:]


# --- on the reader's host ---------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, address: str, port: int) -> None:
        self.sockets = [socket.create_connection((address, port)) for _ in range(2)]
        for one in self.sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.beside = ThreadPoolExecutor(1)
        self.target = torch.zeros(0, dtype=torch.int64)


_reader: list[_Reader] = []


def connect(address: str, port: int) -> None:
    _reader[:] = [_Reader(address, port)]


def take(work: Work, numbers: Sequence[int], check: bool) -> list[Taken]:
    here = _reader[0]
    if here.target.nbytes != work.moved:
        here.target = torch.zeros(work.moved // 8, dtype=torch.int64)
    return take_each(_echo if work.is_put else _fetch, work, numbers, check)


def _echo(work: Work, number: int, _: Value) -> None:
    """What a put of any size sends at least: a message, and its answer."""
    connection = _reader[0].sockets[0]
    connection.sendall(REQUEST.pack(ECHOED, 0) + bytes(ECHOED))
    connection.recv(ECHOED, socket.MSG_WAITALL)


def _fetch(work: Work, number: int, picks: torch.Tensor | None) -> Value:
    here = _reader[0]
    memory = _memory(here.target)
    rows: list[int] = [] if picks is None else cast("Any", picks).tolist()
    if work.moved < SMALL:
        _receive(here.sockets[0], memory, rows, (0, work.moved))
    else:
        middle, row = work.moved // 2 // ROW * ROW, work.moved // 2 // ROW
        second = here.beside.submit(_receive, here.sockets[1], memory[middle:], rows[row:], (middle, work.moved))
        _receive(here.sockets[0], memory[:middle], rows[:row], (0, middle))
        second.result()
    if work.leaves > 1:
        return dict(zip(work.names, here.target.chunk(work.leaves), strict=True))
    return here.target.reshape(-1, min(ROW, work.nbytes) // 8)


def _receive(connection: socket.socket, memory: memoryview, rows: list[int], part: tuple[int, int]) -> None:
    numbers: Any = rows or part
    connection.sendall(REQUEST.pack(0, len(rows)) + struct.pack(f">{len(numbers)}Q", *numbers))
    at = 0
    while at < len(memory):
        received = connection.recv_into(memory[at:], 0, socket.MSG_WAITALL)
        if not received:
            raise ConnectionError("the owner's process has ended")
        at += received
