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
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from memstore.testing.fork_serving import ENVIRONMENT, PID, STATUS, Traceback

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
        code = "import sys; from memstore.testing.fork_serving import serve; serve(int(sys.argv[1]), sys.argv[2:])"
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
