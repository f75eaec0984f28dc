"""This host's place in its cluster: checks when its index process starts, and what people are told.

`own_member` refuses to serve a root that was removed, or a copy. `Membership` hears of each change of the standing: it
writes ROOT/cluster, prints what has changed, tells the agent that this host is a member, and ends the process where it
can't be one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from memstore._parsing import UNDECODABLE
from memstore.distributed.catalog import entry_of
from memstore.distributed.links import Hello, Links
from memstore.distributed.rules import Entry, Index, Meet, Member, Met, Roster, Standing, send
from memstore.distributed.serving.duties import Driver, Ending, ProcessEnded
from memstore.distributed.serving.questions import standing_of
from memstore.distributed.serving.supervision import CLUSTER_FILE, Kind, News, Options, say, tell
from memstore.engine import FoundPart, Record, Root, create_file, read_left, segments_of, syscalls
from memstore.errors import NotServedError

_LONG = 2.0  # seconds after which people are told what a host waits for
_END = ".json"
_ID = re.compile(r"[0-9a-f]{32}")
_LONGEST = 4096  # bytes
_LEFT = "memstore.contents.left"
_LEFT_WITHIN = 120.0  # seconds
_BACK = "serve it again, and it comes back as a new host, with what nobody has put or deleted since"
_ANOTHER = "serve an empty folder to make another host of it"

log = logging.getLogger("memstore")


def own_member(root: Root, options: Options) -> Member:
    """Returns this host as a member.

    Raises:
        NotServedError: the root was removed from its cluster; or it was served at another address, and it isn't said
            that it has moved: a copy of it may be served there.
    """
    member = Member(root.member_id(), options.address, socket.gethostname(), options.is_owner)
    standing = standing_of(root)
    if standing is None:
        return member
    if standing.is_removed:
        raise NotServedError(_was_removed(root))
    known = standing.roster.member(member.id)
    if known is not None and known.address != options.address and not options.moved:
        raise NotServedError(
            f"{root.path} is the host {known.address} of its cluster: serve it there; at {options.address} with "
            f"--moved, if nobody serves it at {known.address} any more; or, if it is a copy, {_ANOTHER}"
        )
    return member


class Membership:
    """Follows changes of the standing.

    Args:
        member: this host.
        hello: what this process says of itself.
        news: the pipe to the agent.
        clear: has all hosts take over what a removed one has left on the storage; then it calls what it is given.
    """

    def __init__(
        self,
        root: Root,
        options: Options,
        member: Member,
        index: Index,
        driver: Driver,
        links: Links,
        ending: Ending,
        *,
        hello: Hello,
        news: int,
        clear: Callable[[bytes, Callable[[], None]], None],
    ) -> None:
        self._root, self._options, self._member = root, options, member
        self._index, self._driver, self._links, self._ending = index, driver, links, ending
        self._hello, self._news, self._clear = hello, news, clear
        self._standing: Standing | None = None
        self._asked, self._began = "", time.monotonic()  # the seed that is asked, and since when
        self._told: set[str] = set()

    def has_changed(self, standing: Standing | None) -> None:
        """Takes in another standing than the last one."""
        before, self._standing = self._standing, standing
        if standing is None:
            return
        for line in changes_of(before, standing, self._member):
            say(line)
        write_cluster_file(self._root, self._member, standing)
        if standing.is_removed and standing.is_sealed and not _has_records(self._root):
            self._ending.removes = self._ending.is_drained = True
            self._ending.end()
        elif standing.is_removed:
            self._root.host_lease[0] = 0  # no new value is lost by a get: what is here can be read, and exported
            # Who removes a host that runs wants it to end; a clock that does so doesn't mind.
            wants_end = self._index.was_member and not self._options.remove_after
            may_return = not wants_end and not standing.is_sealed and self._root.settings.shared is None
            self._ending.fail(Kind.REMOVED if may_return else Kind.LOST, _was_removed(self._root))
        if before is None:
            tell(self._news, News(Kind.READY))
            self._clear_former_lives(standing)

    def has_asked(self, standing: Standing | None) -> None:
        """Looks at what a question to the seed has brought."""
        refusal = self._index.refusal
        if refusal is not None and not refusal.is_removed:
            text = f"{self._root.path} at {self._member.address}: the cluster says: {refusal.why}"
            self._ending.fail(Kind.REFUSED if standing is None else Kind.LOST, text)
        elif standing is None:
            self._look_at_named()
        else:
            self._compare_versions(standing.roster.seed_address)

    def compare_clusters(self) -> None:
        """Ends the process if the root is a member of one cluster, and was told to join another."""
        standing = self._standing
        known = () if standing is None else [member.address for member in standing.roster.members]
        for address in self._options.join:
            if standing is None or address in known:
                continue
            with contextlib.suppress(ProcessEnded):
                met = self._driver.run(send(address, Meet(self._member, None)))
                if isinstance(met, Met) and met.roster is not None and met.roster.cluster != standing.roster.cluster:
                    self._ending.fail(
                        Kind.LOST,
                        f"{self._root.path} belongs to the cluster of the seed {standing.roster.seed_address}, not to "
                        f"that of {address}: {_ANOTHER}",
                    )

    def _look_at_named(self) -> None:
        """Looks at hosts that were named to a root without a cluster: one may refuse to speak with it at all."""
        for address in self._options.join:
            why = self._driver.refused.get(address) or _other_storage(self._root, self._links.hello_of(address))
            if why:
                text = why if address in why else f"{address} {why}"
                self._ending.fail(Kind.REFUSED, f"{self._root.path} at {self._member.address}: {text}")
        asked = self._index.asked
        if asked != self._asked:
            self._asked, self._began = asked, time.monotonic()
        elif time.monotonic() - self._began >= _LONG:
            others = ", ".join(self._options.join)
            self._say_once(
                f"{name_of(self._member)} is no member yet: the seed {asked} has not let it in. Where that host is "
                "lost, another one is to be the seed: memstore promote, at one of the others"
                if asked
                else f"{name_of(self._member)} is no member yet: it waits for an answer of each of {others}"
                if others
                else ""
            )

    def _compare_versions(self, seed: str) -> None:
        hello = self._links.hello_of(seed)
        if hello is None:
            return
        theirs, ours = _versions(hello), _versions(self._hello)
        differences = [f"{name} {theirs[name]}, this host {ours[name]}" for name in ours if theirs[name] != ours[name]]
        if differences:
            self._say_once(f"{hello.host or 'the host'} at {seed} has {'; '.join(differences)}")

    def _say_once(self, text: str) -> None:
        if text and text not in self._told:
            self._told.add(text)
            say(text)

    def _clear_former_lives(self, standing: Standing) -> None:
        """Removes, on storage that hosts share, what this host has left there before it lost its state folder."""
        if self._root.settings.shared is None:
            return
        member = self._member
        try:
            note_owner(self._root, member)
            for former in former_lives(self._root, member, standing.roster):
                self._clear(bytes.fromhex(former), partial(self._remove_former_life, former))
        except OSError as error:
            log.warning("%s: what former hosts at %s have left stays: %s", self._root.path, member.address, str(error))

    def _remove_former_life(self, former: str) -> None:
        folder = os.path.dirname(self._root.segments)
        shutil.rmtree(f"{folder}/{former}", ignore_errors=True)
        syscalls.unlink(f"{folder}/{former}{_END}")  # last: what was left of the folder is found again
        say(f"removed what the host {former} has left on the storage, which was served at this address")


# --- what people are told ---------------------------------------------------------------------------------------------


def _was_removed(root: Root) -> str:
    return f"{root.path} was removed from its cluster: {_ANOTHER if root.settings.shared else _BACK}"


def _has_records(root: Root) -> bool:
    """Returns whether something is left of what was drained: what is damaged stays, for a repair."""
    return root.catalog.view(lambda transaction: transaction.count("entries")) > 0


def name_of(member: Member) -> str:
    """Returns a member's name and address, for people: `Member.label` says "the host" of one without a name."""
    return f"{member.name or 'a host'} at {member.address}"


def changes_of(before: Standing | None, after: Standing, own: Member) -> list[str]:
    """Returns lines that say what has changed of the cluster."""
    roster = after.roster
    if before is None:
        hosts = "1 host" if len(roster.members) == 1 else f"{len(roster.members)} hosts"
        return [f"{name_of(own)} is a member: epoch {roster.epoch}, {hosts}, seed {roster.seed_address}"]
    old = {member.id: member for member in before.roster.members}
    new = {member.id: member for member in roster.members}
    changes = [f"{name_of(member)} has joined" for key, member in new.items() if key not in old]
    changes += [f"{name_of(member)} was removed" for key, member in old.items() if key not in new]
    for key, member in new.items():
        if key not in old or old[key] == member:
            continue
        if old[key].address != member.address:
            changes.append(f"{member.name or 'a host'} is at {member.address} now, and was at {old[key].address}")
        if old[key].is_owner != member.is_owner:
            owns = "what it puts first" if member.is_owner else "what it has, and no new groups"
            changes.append(f"{name_of(member)} owns {owns}")
    for key, _ in roster.leavers:
        if not before.roster.is_leaver(key):
            changes.append(f"{name_of(new[key])} is drained: what it has goes to others, and then it leaves")
    for key, _ in before.roster.leavers:
        if key in new and not roster.is_leaver(key):
            changes.append(f"{name_of(new[key])} stays: its drain is cancelled")
    changes += recovered_of(before.roster, roster)
    if before.roster.seed != roster.seed:
        changes.append(f"the seed is {roster.seed_address} now, and was {before.roster.seed_address}")
    if before.is_joining and not after.is_joining:
        changes.append("the keys that this root had are the cluster's now")
    waits = "" if not after.unheard or after.unheard == before.unheard else _names_of(roster, after.unheard)
    if waits:
        changes.append(f"the directory is made anew: what they own is still to be said by {waits}")
    elif before.unheard and not after.unheard:
        changes.append("the directory is made anew: all members have said what they own")
    return [f"epoch {roster.epoch}: {change}" for change in changes]


def recovered_of(before: Roster, roster: Roster) -> list[str]:
    """Returns what has changed of the recovery of removed members' groups."""
    old, new = ({one.member.id: one for one in each.departed} for each in (before, roster))
    changes: list[str] = []
    for key, one in new.items():
        heir = roster.member(one.heir)
        if heir is not None and (key not in old or old[key].heir != one.heir):
            changes.append(f"{name_of(heir)} recovers what {name_of(one.member)} owned: calls for it wait until then")
    changes += [f"what {name_of(one.member)} owned is recovered" for key, one in old.items() if key not in new]
    return changes


def _names_of(roster: Roster, members: tuple[bytes, ...]) -> str:
    return ", ".join(name_of(member) for member in roster.members if member.id in members)


def _versions(hello: Hello) -> dict[str, str]:
    return {"memstore": hello.memstore, "torch": hello.torch or "missing", "monarch": hello.monarch or "missing"}


def _other_storage(root: Root, hello: Hello | None) -> str:
    """Returns what is wrong, if a named host has its store elsewhere than this one."""
    own = "" if root.settings.shared is None else root.settings.shared.store
    if hello is None or own == hello.storage:
        return ""
    if not own:
        return (
            f"has its store on storage that hosts share (store {hello.storage}): mount that here, and serve the same "
            "folder with --shared"
        )
    if not hello.storage:
        return "serves a store that is not on storage that hosts share: serve it with --shared too, or this one without"
    return (
        f"has another store on its storage ({hello.storage}) than {root.path} has here ({own}): is the same storage "
        "mounted on both?"
    )


# --- ROOT/cluster -----------------------------------------------------------------------------------------------------


def write_cluster_file(root: Root, member: Member, standing: Standing) -> None:
    """Writes what a member knows of its cluster, as JSON, for people and tools: whole, or not at all.

    Nobody decides by it. Of a store on storage that hosts share, it lies in the state folder.
    """
    roster = standing.roster
    content = {
        "cluster": roster.cluster.hex(),
        "term": roster.term,
        "epoch": roster.epoch,
        "seed": roster.seed_address,
        "deputies": [one.address for one in roster.members if one.id in roster.deputies],
        "address": member.address,
        "agent": os.getppid(),
        "index_process": os.getpid(),
        "is_removed": standing.is_removed,
        "is_joining": standing.is_joining,
        "lease": roster.lease / 1e9,
        "leased": [one.address for one in roster.members if one.id in roster.leased],
        "members": [
            {"id": one.id.hex(), "address": one.address, "name": one.name, "is_owner": one.is_owner}
            for one in roster.members
        ],
    }
    create_file(root.state, CLUSTER_FILE, msgspec.json.format(msgspec.json.encode(content)) + b"\n", root.settings)


def remove_cluster_file(root: Root) -> None:
    """Removes it after a clean end: nobody answers there."""
    with contextlib.suppress(OSError):
        syscalls.unlink(f"{root.state}/{CLUSTER_FILE}")


# --- shared storage ---------------------------------------------------------------------------------------------------
# What a removed host has left on storage that hosts share. Its heir reads there what it has put into its own groups
# (`read_left_of`), and records of other hosts that name its files stay. Its next life removes the folder, once all
# have copied what they name there (`rules.Takeovers`).
#
# Beside the folder of a host's files there is a file of the same name that says at which address the host is served.
# What another id has left at this host's address is that of a former life, once the seed has removed that from the
# members. Nobody else may know that a host won't come back.


class Owner(msgspec.Struct, frozen=True):
    """The host whose files a folder has: it is served at an address, and has a name for people."""

    address: str
    name: str


def note_owner(root: Root, member: Member) -> None:
    """Writes whose files these are: whole, or not at all, by a rename within one folder. Raises OSError."""
    path = f"{root.segments}{_END}"
    temporary = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        syscalls.unlink(temporary)
    fd = syscalls.open_file(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        syscalls.write_at(fd, msgspec.json.encode(Owner(member.address, member.name)), 0)
    finally:
        syscalls.close(fd)
    syscalls.rename(temporary, path)


def former_lives(root: Root, member: Member, roster: Roster) -> list[str]:
    """Returns the ids of hosts that were served at this one's address, and are members no more. Raises OSError."""
    folder, own = os.path.split(root.segments)
    found: list[str] = []
    for name in os.listdir(folder):
        former = name.removesuffix(_END)
        if former in (name, own) or any(former == one.id.hex() for one in roster.members):
            continue
        if _ID.fullmatch(former) and _address_in(f"{folder}/{name}") == member.address:
            found.append(former)
    return found


def read_left_of(root: Root, member: bytes) -> list[tuple[bytes, Entry]] | None:
    """Reads what a removed host has put into groups of its own, from its folder: a `rules.Left`.

    It only reads: a host that was removed, and runs still, isn't disturbed.
    """
    folder, sharded = segments_of(root.path, member.hex()), list[str]()

    def note(key: str, parts: Sequence[FoundPart]) -> None:
        sharded.append(key)

    try:
        left = read_left(folder, member.hex(), note)
    except OSError as error:
        log.warning("%s: what the removed host has left there can't be read yet: %s", folder, str(error))
        return None
    if sharded:
        left = _read_left_apart(folder, member.hex()) or left
    return [(key, entry_of(record, member)) for key, record in left]


def _read_left_apart(folder: str, store: str) -> list[tuple[bytes, Record]] | None:
    """Reads it in a process that has torch, to merge the parts of sharded values. None: that can't be."""
    try:
        done = subprocess.run([sys.executable, "-m", _LEFT, folder, store], capture_output=True, timeout=_LEFT_WITHIN)
        done.check_returncode()
        return msgspec.msgpack.decode(done.stdout, type=list[tuple[bytes, Record]])
    except (OSError, subprocess.SubprocessError, *UNDECODABLE) as error:
        log.warning("%s: sharded values that the removed host has left there stay lost: %s", folder, str(error))
        return None


def _address_in(path: str) -> str | None:
    try:
        fd = syscalls.open_file(path, os.O_RDONLY)
        try:
            return msgspec.json.decode(syscalls.read_at(fd, _LONGEST, 0), type=Owner).address
        finally:
            syscalls.close(fd)
    except (OSError, *UNDECODABLE):
        return None
