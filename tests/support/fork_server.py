"""Fork server: a process that has torch and memstore imported, and forks workers on request.

Importing torch takes seconds, a fork of a process that has it some milliseconds: so hundreds of processes can be
started and killed in a test.

::

    with ForkServer() as server:
        worker = server.start(function, 1, 2)     # calls function(channel, 1, 2) in a new process
        worker.send("to the worker")              # channel.recv() there
        worker.recv(timeout=5.0)                  # channel.send(...) there
        worker.kill()
        assert worker.wait(timeout=5.0) == -9

The server has one thread and opens no store, so that its forks inherit neither locks nor half-done work. A worker ends
as a child of multiprocessing does: its threads are waited for and the functions of `atexit` are called, but what still
exists has no finalizers. It is killed when the server ends, and the server ends with the process that started it. What
a worker starts in its turn is the worker's to end.

`ForkServer` and `Worker` are what a test uses. `serve` is the server's process: a request is the fd of a worker's
channel. The reply is the worker's pid, with the fds of its process and of a pipe that brings its exit code.
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
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

# --- The test's side -------------------------------------------------------------------------------------------------


_TIMEOUT = 60.0  # seconds
_CHECKOUT = str(Path(__file__).parents[2])  # all that another interpreter gets of this one's path


class WorkerError(RuntimeError):
    """A worker raised (the message is its traceback), or ended when more was expected of it."""


class ForkServer:
    """Starts workers. Use it in a `with`, or close it: that kills the workers that still run.

    Thread-safe. Not usable in forked children, which must not keep what they inherit of it either.

    Args:
        preload: names of modules to import before the first fork, beside torch and memstore.
        python: the interpreter, which has what is imported; None: this process's own.
    """

    def __init__(self, preload: Sequence[str] = (), *, python: str | None = None) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair()
        code = "import sys; from tests.support.fork_server import serve; serve(int(sys.argv[1]), sys.argv[2:])"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path if python is None) or _CHECKOUT
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
        with theirs:
            self._process = subprocess.Popen(
                [python or sys.executable, "-c", code, str(theirs.fileno()), *preload],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal is the client's to handle
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, function: Callable[..., object], *arguments: Any) -> Worker:
        """Calls `function(channel, *arguments)` in a new process.

        Args:
            function: one that the worker can import, by module and qualified name.
            arguments: anything that pickles. `channel` is a `multiprocessing.connection.Connection`.
        """
        reference = _reference(function)
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
                reply, fds, _, _ = socket.recv_fds(self._control, PID.size, 2)
            except OSError as error:
                ours.close()
                raise WorkerError(f"the fork server (pid {self.pid}) is gone: {error}") from error
        if len(reply) < PID.size or len(fds) < 2:
            ours.close()
            code = -PID.unpack(reply)[0] if len(reply) == PID.size else 0
            reason = os.strerror(code) if code else "it ended, see its output"
            raise WorkerError(f"the fork server (pid {self.pid}) did not fork: {reason}")
        worker = Worker(PID.unpack(reply)[0], Connection(ours.detach()), fds[0], fds[1])
        with contextlib.suppress(BrokenPipeError):  # killed already
            worker.send((reference, arguments))
        return worker

    def close(self) -> None:
        """Kills the workers and ends the server."""
        if os.getpid() == self._owner:  # a forked child that still runs has the other end of the channel, too
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worker:
    """Made by `ForkServer.start`: a process that runs a function. Use it in a `with`, which kills it if it still runs.

    Attributes:
        pid: its process id.
        channel: this side of its channel.
    """

    def __init__(self, pid: int, channel: Connection, process: int, status: int) -> None:
        self.pid, self.channel = pid, channel
        self._process, self._status = process, status  # fds: of the process, and of a pipe for its exit code
        self._code: int | None = None

    def send(self, message: Any) -> None:
        self.channel.send(message)

    def recv(self, timeout: float = _TIMEOUT) -> Any:
        """The next message of the worker. Raises WorkerError if it raised or ended, TimeoutError if there is none."""
        if not self.channel.poll(timeout):
            raise TimeoutError(f"no message from worker {self.pid} in {timeout:g} s")
        try:
            return self._receive()
        except (EOFError, ConnectionResetError):
            raise WorkerError(f"worker {self.pid} ended with {self.wait()} and sent nothing") from None

    def _receive(self) -> Any:
        message = self.channel.recv()
        if isinstance(message, Traceback):
            raise WorkerError(f"worker {self.pid} raised\n{message.text}")
        return message

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; nothing if the worker has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)

    def wait(self, timeout: float = _TIMEOUT) -> int:
        """Waits for the end. Returns the exit code, or minus the signal that ended it. Raises TimeoutError."""
        if self._code is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)
            if not poll.poll(timeout * 1000):
                raise TimeoutError(f"worker {self.pid} still runs after {timeout:g} s")
            packed = os.read(self._status, STATUS.size)
            if len(packed) < STATUS.size:
                raise WorkerError(f"the fork server ended, and worker {self.pid} with it")
            self._code = int(STATUS.unpack(packed)[0])
        return self._code

    def join(self, timeout: float = _TIMEOUT) -> None:
        """Waits for the end. Raises WorkerError unless the function returned. Messages left in the channel are lost."""
        code = self.wait(timeout)
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:  # up to the end of the channel
                self._receive()
        if code:
            raise WorkerError(f"worker {self.pid} ended with {code}")

    def close(self) -> None:
        """Kills the worker if it still runs, waits for its end, and closes the channel."""
        if self._process < 0:
            return
        try:
            self.kill()
            with contextlib.suppress(WorkerError):
                self.wait()
        finally:
            self._close_files()

    def _close_files(self) -> None:
        fds, self._process, self._status = (self._process, self._status), -1, -1
        self.channel.close()
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Worker can't be pickled or copied: send its pid")

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_process"):  # an interrupt may have left it half-made
            self._close_files()


def _reference(function: Callable[..., object]) -> str:
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise ValueError(f"{module}:{name} can't be imported by a worker: use a function of a module, by its own name")
    return f"{module}:{name}"


# --- The server and its workers --------------------------------------------------------------------------------------


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
