"""What runs on the hosts of a test: a file with the standard library alone, so that it starts in some milliseconds."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time

PORT = 7000
_TCP_USER_TIMEOUT = 18


def kind(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def serve(*addresses: str) -> None:
    """Sends back what each connection sends."""
    servers = [socket.create_server((address, PORT), family=kind(address)) for address in addresses]
    print("listening", flush=True)
    for server in servers[1:]:
        threading.Thread(target=_accept, args=(server,)).start()
    _accept(servers[0])


def _accept(server: socket.socket) -> None:
    while True:
        threading.Thread(target=_echo, args=(server.accept()[0],), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def call(address: str, size: str = "10", timeout: str = "20", times: str = "1") -> None:
    """Prints "whole" and the shortest round trip in seconds, or the name of the error."""
    try:
        with socket.create_connection((address, PORT), timeout=float(timeout)) as connection:
            print("whole", min(_round_trip(connection, os.urandom(int(size))) for _ in range(int(times))))
    except OSError as error:
        print(errno.errorcode.get(error.errno or 0, type(error).__name__))


def reach(*addresses: str) -> None:
    """Prints those that answer."""
    for address in addresses:
        with socket.create_connection((address, PORT), timeout=20) as connection:
            connection.sendall(b"?")
            if connection.recv(1) == b"?":
                print(address)


def _round_trip(connection: socket.socket, data: bytes) -> float:
    started = time.monotonic()
    sender = threading.Thread(target=connection.sendall, args=(data,))
    sender.start()
    found = b""
    while len(found) < len(data) and (more := connection.recv(1 << 16)):
        found += more
    sender.join()
    if found != data:
        raise OSError(errno.EIO, "other bytes came back")
    return time.monotonic() - started


def stream(address: str, patience_ms: str) -> None:
    """Sends numbers until that fails for so long; prints the name of the error."""
    try:
        with socket.create_connection((address, PORT)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(patience_ms))
            number = 0
            while True:
                connection.sendall(b"%d\n" % number)
                number += 1
                time.sleep(0.002)
    except OSError as error:
        print(errno.errorcode[error.errno or 0])


def listen(address: str) -> None:
    """Prints what one connection sends."""
    with socket.create_server((address, PORT), family=kind(address)) as server:
        print("listening", flush=True)
        connection = server.accept()[0]
        while data := connection.recv(1 << 16):
            os.write(1, data)


def hear(address: str) -> None:
    """Prints the datagrams that come, a line each."""
    with socket.socket(kind(address), socket.SOCK_DGRAM) as ear:
        ear.bind((address, PORT))
        print("listening", flush=True)
        while True:
            print(ear.recv(1000).decode(), flush=True)


def shout(address: str, text: str) -> None:
    with socket.socket(kind(address), socket.SOCK_DGRAM) as mouth:
        mouth.sendto(text.encode(), (address, PORT))


def family(depth: str) -> None:
    """Forks children of children, each in a session of its own, and waits for ever."""
    for _ in range(int(depth)):
        if os.fork():
            break
        os.setsid()
    else:
        print("all there", flush=True)
    while True:
        time.sleep(100)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
