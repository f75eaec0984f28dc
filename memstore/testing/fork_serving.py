"""The other end of `fork_server`: the process that forks, and the workers that it becomes.

A request is the fd of a worker's channel. The reply is the worker's pid, with the fds of its process and of a pipe that
brings its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any, NoReturn

PID = struct.Struct("<i")  # a reply; negative: a fork failed with this errno
STATUS = struct.Struct("<i")  # an exit code, or minus a signal
ENVIRONMENT = {
    # One thread: OpenMP's and OpenBLAS's pools would not live on in a fork, and whoever used them there would hang.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # The heap in huge pages: 150 MB of small ones make a fork and its end take 20 ms, instead of 5.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "PYTHONMALLOC": "malloc",
}


class Traceback:
    def __init__(self, text: str) -> None:
        self.text = text


def serve(control: int, preload: Sequence[str]) -> None:
    """The whole life of the server, and of each worker. In the server it returns, to the interpreter's own end."""
    import torch

    for name in ENVIRONMENT:
        os.environ.pop(name, None)  # what workers start in their turn is started as usual
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    for name in ("memstore.store.opening", "memstore.contents", *preload):
        importlib.import_module(name)
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.atexit = False  # what a worker imports later has its finalizers; torch's take 40 ms
    gc.collect()
    gc.freeze()  # collections in the workers would copy the pages of every object
    channel = _Server(socket.socket(fileno=control)).run()
    if channel is not None:
        _end(_work(channel))


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._workers: dict[int, tuple[int, int]] = {}  # fd of the process -> pid, status pipe
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> int | None:
        """Serves until the client is gone. Returns twice, as fork does: in a worker with the fd of its channel."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._workers:
                    self._reap(fd)
                    continue
                request, fds, _, _ = socket.recv_fds(self._control, 4, 1)
                if not request:
                    for process in list(self._workers):
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                        self._reap(process)
                    return None
                if self._fork(fds[0]):
                    return fds[0]

    def _fork(self, channel: int) -> bool:
        """True in the worker."""
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            raise RuntimeError(f"the fork server has {threads} threads: a module that it imports has started some")
        server = os.getpid()
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            for fd in (reader, writer, channel):
                os.close(fd)
            self._control.sendall(PID.pack(-(error.errno or 1)))
            return False
        if pid == 0:
            os.close(reader)
            os.close(writer)
            self._leave(server)
            return True
        os.close(channel)
        process = os.pidfd_open(pid)
        socket.send_fds(self._control, [PID.pack(pid)], [process, reader])
        os.close(reader)
        self._workers[process] = (pid, writer)
        self._poll.register(process, select.POLLIN)
        return False

    def _leave(self, server: int) -> None:
        """In a worker: it dies with the server, and keeps nothing of it."""
        from torch.multiprocessing import _prctl_pr_set_pdeathsig  # pyright: ignore[reportUnknownVariableType, reportAttributeAccessIssue, reportPrivateUsage]

        _prctl_pr_set_pdeathsig(signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        self._control.close()
        for process, (_, writer) in self._workers.items():
            os.close(process)
            os.close(writer)

    def _reap(self, process: int) -> None:
        self._poll.unregister(process)
        pid, writer = self._workers.pop(process)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # the client has dropped it
            os.write(writer, STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(writer)
        os.close(process)


def _work(fd: int) -> int:
    """The whole life of a worker. Returns its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    channel = Connection(fd)
    try:
        reference, arguments = channel.recv()
        module, _, name = reference.partition(":")
        function: Any = reduce(getattr, name.split("."), importlib.import_module(module))
        function(channel, *arguments)
    except EOFError:
        raise
    except Exception:
        with contextlib.suppress(OSError):
            channel.send(Traceback(traceback.format_exc()))
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Ends a worker as multiprocessing ends its children. To take torch apart would need 0.2 s of CPU for each."""
    threading._shutdown()  # type: ignore[attr-defined] - it waits for threads that aren't daemons
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed; or None, where there is none
            stream.flush()
    os._exit(code)
