"""The secret of a cluster, the handshake that proves it, and the first message, which says who speaks."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import stat
import struct
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from memstore._threads import between_forks
from memstore._version import __version__
from memstore.engine import state_folder, syscalls
from memstore.errors import LinkRefusedError, SecretError

# --- The secret ------------------------------------------------------------------------------------------------------
# The secret that the hosts of a cluster share: ROOT/secret, or a file that MEMSTORE_SECRET_FILE names.
#
# ROOT/secret is written by `memstore.serve`, which brings one secret to all hosts. It goes before the environment's: a
# process that opens the root needs no environment then, and what other clusters use doesn't get in its way.

VARIABLE = "MEMSTORE_SECRET_FILE"
SECRET_FILE = "secret"  # in the root
SHORTEST = 32  # bytes
LONGEST = 4096


def secret_of(root: str, *, and_environment: bool = True) -> bytes | None:
    """The secret of a root's cluster: ROOT/secret if there is one, else, unless told otherwise, the environment's.

    Returns, and raises: as `read_secret`.
    """
    path = secret_path(root)
    if os.path.lexists(path):
        return read_secret(path)
    return read_secret() if and_environment else None


def secret_path(root: str) -> str:
    """Returns where the secret lies: of a store on storage that hosts share, in the state folder."""
    return f"{state_folder(root)}/{SECRET_FILE}"


def write_secret(root: str, secret: bytes) -> None:
    """Makes ROOT/secret, mode 0600, whole or not at all. Raises SecretError: it is too short or too long."""
    check_size(secret, "that was given")
    path = secret_path(root)
    temporary = f"{path}.{os.getpid()}.new"
    with contextlib.suppress(FileNotFoundError):
        syscalls.unlink(temporary)
    fd = syscalls.open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        syscalls.write_at(fd, secret, 0)
        syscalls.sync(fd)
    finally:
        syscalls.close(fd)
    syscalls.rename(temporary, path)


def read_secret(path: str | None = None) -> bytes | None:
    """Reads the secret. All of the file's bytes count, a line's end too.

    Args:
        path: its file; None: the one that the environment's MEMSTORE_SECRET_FILE names.

    Returns: 32 to 4,096 bytes; None if no file is named.

    Raises:
        SecretError: the file is missing, too short or too long, another user's, or open to others.
    """
    path = path or os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        fd = syscalls.open_file(os.path.realpath(path), os.O_RDONLY)  # links are common where secrets are mounted
        try:
            _check_mode(path, syscalls.status(fd))
            secret = syscalls.read_at(fd, LONGEST + 1, 0)
        finally:
            syscalls.close(fd)
    except OSError as error:
        raise SecretError(f"the secret {path!r} can't be read: {error.strerror}; {_SECRET_ADVICE}") from error
    check_size(secret, repr(path))
    return secret


_SECRET_ADVICE = "make it once with `(umask 077; head -c 32 /dev/urandom > FILE)`, and copy it to each host"


def check_size(secret: bytes, name: str) -> None:
    """Raises SecretError: it is too short or too long."""
    if not SHORTEST <= len(secret) <= LONGEST:
        size = len(secret) if len(secret) <= LONGEST else f"more than {LONGEST}"
        raise SecretError(f"the secret {name} has {size} bytes, and needs {SHORTEST} to {LONGEST}; {_SECRET_ADVICE}")


def _check_mode(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SecretError(f"the secret {path!r} is no regular file; {_SECRET_ADVICE}")
    if found.st_uid != os.geteuid():
        raise SecretError(
            f"the secret {path!r} belongs to user {found.st_uid}, and this process runs as {os.geteuid()}; "
            "it must be one's own"
        )
    if found.st_mode & 0o077:
        raise SecretError(
            f"the secret {path!r} has mode {stat.S_IMODE(found.st_mode):04o}, so that others may read or change it; "
            f"expected 0600: chmod 600 {path}, and make a new one if others may have seen it"
        )


# --- The handshake ---------------------------------------------------------------------------------------------------
# The first 192 bytes of a connection, without I/O. Decision 016, "Frames and messages", has the table.
#
# 1. The server greets: 64 bytes, with a nonce.
# 2. The client introduces itself: 64 bytes, with a nonce of its own, and proves by an HMAC over all 128 that it knows
#    the secret. The server compares that before it reads anything else in them.
# 3. The server proves the same. 32 zeros in its place say that the client's proof was wrong, so that a client can tell
#    a wrong secret from a server that died.

MAGIC = b"memstor1"
PROTOCOL = 1  # the newest that this version speaks
OLDEST = 1  # and the oldest. Two hosts speak the newest protocol that both do
CLIENT, INDEX, STREAM = 1, 2, 3  # kinds of connections: of a client, of an index process, of bytes as they are
HAS_SECRET = 1  # a flag
ANYBODY = bytes(16)  # as the store id that a client wants

GREETING_SIZE = 64
INTRODUCTION_SIZE = 96
PROOF_SIZE = 32
WRONG_PROOF = bytes(PROOF_SIZE)

_GREETING = struct.Struct(">8sHHH2s32s16s")
_NO_SECRET = b"memstore"


class Greeting(NamedTuple):
    """The 64 bytes of either side.

    Attributes:
        protocol: the newest one that the server speaks; the one that the client has chosen.
        word: flags of the server, or the kind that the client asks for.
        oldest: the oldest protocol that the server speaks; 0: it speaks one.
    """

    magic: bytes
    protocol: int
    word: int
    oldest: int
    zeros: bytes
    nonce: bytes
    member: bytes

    @staticmethod
    def decode(greeting: bytes) -> Greeting:
        return Greeting(*_GREETING.unpack_from(greeting))


# --- server -----------------------------------------------------------------------------------------------------------


def greet(member: bytes, secret: bytes | None) -> bytes:
    return _GREETING.pack(MAGIC, PROTOCOL, HAS_SECRET if secret else 0, OLDEST, bytes(2), os.urandom(32), member)


def is_proven(secret: bytes | None, greeting: bytes, introduction: bytes) -> bool:
    """Whether the client knows the secret. In constant time."""
    told, proof = introduction[:GREETING_SIZE], introduction[GREETING_SIZE:]
    return hmac.compare_digest(proof, _client_proof(secret, greeting + told))


class Wanted(NamedTuple):
    """The wish of a client: a kind of connection, and the protocol that both sides speak from then on."""

    kind: int
    protocol: int


def wanted(introduction: bytes, member: bytes) -> Wanted | None:
    """Returns what a client wants that has proven itself; None: it isn't here."""
    told = Greeting.decode(introduction)
    is_known = told.magic == MAGIC and OLDEST <= told.protocol <= PROTOCOL and told.word in (CLIENT, INDEX, STREAM)
    return Wanted(told.word, told.protocol) if is_known and told.member in (member, ANYBODY) else None


def server_proof(secret: bytes | None, greeting: bytes, introduction: bytes) -> bytes:
    return _proof(secret, b"server" + greeting + introduction)


# --- client -----------------------------------------------------------------------------------------------------------


def check_greeting(address: str, greeting: bytes, member: bytes | None, secret: bytes | None) -> bytes:
    """The store id of the server that has greeted so.

    Raises:
        LinkRefusedError: it is not the one that this process wants, or not for this process.
    """
    found = Greeting.decode(greeting)
    if found.magic != MAGIC:
        raise LinkRefusedError(f"{address} answers {greeting[:16]!r}: no memstore serves there; look at the address")
    if not max(OLDEST, found.oldest or found.protocol) <= min(PROTOCOL, found.protocol):
        theirs, ours = _range(found.oldest, found.protocol), _range(OLDEST, PROTOCOL)
        raise LinkRefusedError(
            f"{address} speaks protocol {theirs}, and this process protocol {ours}: "
            "run versions of memstore on both hosts that speak the same one"
        )
    if bool(found.word & HAS_SECRET) != bool(secret):
        theirs, ours = ("a", "none") if found.word & HAS_SECRET else ("no", "one")
        raise LinkRefusedError(
            f"{address} has {theirs} secret, and this process has {ours}: set MEMSTORE_SECRET_FILE to the same on all"
        )
    check_member(address, found.member, member)
    return found.member


def _range(oldest: int, newest: int) -> str:
    return f"{oldest} to {newest}" if oldest not in (0, newest) else str(newest)


class OtherMemberError(LinkRefusedError):
    """Another root is served at a member's address by now."""


def check_member(address: str, found: bytes, wanted: bytes | None) -> None:
    """Raises OtherMemberError if another member than `wanted` is at the address. None: any will do."""
    if wanted is not None and found != wanted:
        raise OtherMemberError(
            f"the member {found.hex()} serves at {address}, and {wanted.hex()} was expected there: another root is "
            "served under its address"
        )


def introduce(greeting: bytes, kind: int, member: bytes | None, secret: bytes | None) -> bytes:
    chosen = min(PROTOCOL, Greeting.decode(greeting).protocol)
    told = _GREETING.pack(MAGIC, chosen, kind, 0, bytes(2), os.urandom(32), member or ANYBODY)
    return told + _client_proof(secret, greeting + told)


def check_proof(address: str, proof: bytes, secret: bytes | None, greeting: bytes, introduction: bytes) -> None:
    """Raises LinkRefusedError if the server has another secret."""
    if not hmac.compare_digest(proof, server_proof(secret, greeting, introduction)):
        raise LinkRefusedError(
            f"{address} has another secret than this process (pid {os.getpid()}): MEMSTORE_SECRET_FILE must name the "
            "same bytes on all hosts"
        )


def _client_proof(secret: bytes | None, told: bytes) -> bytes:
    return _proof(secret, b"client" + told)


def _proof(secret: bytes | None, told: bytes) -> bytes:
    return hmac.digest(secret or _NO_SECRET, told, "sha256")


# --- The first message -----------------------------------------------------------------------------------------------
# The first message of a connection, both ways: who speaks. Nothing in it has to agree; `status` shows it.

_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, Meta(max_length=4096)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Attributes:
    memstore, torch, monarch: versions; empty where it isn't installed.
    incarnation: how often this index process was started; 0 for a client.
    host: the host's name.
    storage: of an index process whose store is on storage that hosts share: the id of that store; else empty.
    """

    memstore: _Text
    torch: _Text = ""
    monarch: _Text = ""
    incarnation: _Number = 0
    pid: _Number = 0
    host: _Text = ""
    storage: _Text = ""


def hello_of_this_process(incarnation: int = 0) -> Hello:
    """Returns the hello of this process. It loads neither torch nor monarch."""
    return Hello(
        memstore=__version__,
        torch=_version("torch"),
        monarch=_version("torchmonarch"),
        incarnation=incarnation,
        pid=os.getpid(),
        host=socket.gethostname(),
    )


def _version(package: str) -> str:
    with between_forks():
        from importlib import metadata
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


encode_hello = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode  # raises UNDECODABLE
