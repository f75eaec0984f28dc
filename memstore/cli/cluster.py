"""Commands for a store that hosts serve: serve, policy, status, remove, drain, promote."""

from __future__ import annotations

import os
import sys
import time
from typing import Literal

import click

from memstore import _wording as wording
from memstore._info import ClusterStatus, HostStatus
from memstore.cli import render
from memstore.cli.group import SILENT, Seconds, as_json, cli, root
from memstore.errors import NotServedError

_SAID_EVERY = 2.0  # seconds
_HOST_TITLES = ("address", "name", "alive", "epoch", "starts", "keys", "live", "by", "sent", "received")


def _open_fd(context: click.Context, option: click.Parameter, fd: int | None) -> int | None:
    """Refuses a number that is no open file's: it would be found out when the host is a member."""
    try:
        if fd is not None:
            os.fstat(fd)
    except OSError:
        raise click.BadParameter(
            f"{fd} is no open file descriptor: open one, as {fd}>FILE behind the command does in a shell",
            context,
            option,
        ) from None
    return fd


on_missing = click.option(
    "--on-missing",
    type=click.Choice(("fail", "warn")),
    default="fail",
    show_default=True,
    help="With --replicas: what becomes of a put that finds no second host.",
)


@cli.command(short_help="Serve the store to other hosts.")
@root
@click.option(
    "--address",
    required=True,
    help="Where other hosts reach this one: tcp://IP:PORT. Another one than before: --moved.",
)
@click.option(
    "--join",
    "named",
    multiple=True,
    help="The address of a member, or several. Hosts of a first boot name each other. A member needs none.",
)
@click.option("--new", is_flag=True, help="A store without a cluster makes one at once.")
@click.option("--moved", is_flag=True, help="The store was served at another address, and isn't there any more.")
@click.option("--no-owner", is_flag=True, help="Another host owns what is put here first: for hosts that come and go.")
@click.option(
    "--insecure", is_flag=True, help="Serve without a secret: whoever can connect may read and change the store."
)
@click.option(
    "--shared", is_flag=True, help="ROOT is on storage that all hosts mount: each reads there what others put."
)
@click.option(
    "--maps", is_flag=True, help="With --shared, for a new store: gets map files, which that storage must keep."
)
@click.option(
    "--transport",
    type=click.Choice(("auto", "rdma", "tcp", "monarch")),
    default="auto",
    show_default=True,
    help="How large values are sent between hosts with the same setting. rdma is experimental, and runs Monarch: "
    "whoever can connect to it may run code; monarch is rdma without its hardware, for tests; auto is tcp.",
)
@click.option(
    "--ready-fd",
    type=click.IntRange(min=0),
    callback=_open_fd,
    help="A file descriptor: a line is written to it when the host is a member, or is refused.",
)
@click.option(
    "--hang-after",
    type=Seconds(min=0.5),
    default=10.0,
    show_default=True,
    help="Seconds until an index process counts as hung.",
)
@click.option(
    "--promote-after",
    type=Seconds(min=1.0, max=86_400.0),
    help="Seconds for which a majority may not hear the seed: then a deputy takes over by itself. Without: never.",
)
@click.option(
    "--remove-after",
    type=Seconds(min=30.0, max=86_400.0),
    help="Seconds of a host's silence, after which the seed removes it. Hosts that hear no majority for so long refuse "
    "all calls. Without: never.",
)
@click.option(
    "--replicas",
    type=click.Choice(("1", "2", "async")),
    help="On how many hosts each value is to lie, from now on: with 2 a put waits for the second one. Without: as the "
    "store has it; memstore policy states it for a group.",
)
@on_missing
def serve(
    root: str,
    address: str,
    named: tuple[str, ...],
    new: bool,
    moved: bool,
    no_owner: bool,
    insecure: bool,
    shared: bool,
    maps: bool,
    transport: str,
    ready_fd: int | None,
    hang_after: float,
    promote_after: float | None,
    remove_after: float | None,
    replicas: str | None,
    on_missing: str,
) -> None:
    """Serve the store to other hosts, until SIGTERM, SIGINT or SIGHUP. MEMSTORE_SECRET_FILE names the secret of all.

    Whoever knows the secret may read and change the store. The network is trusted beyond that.
    """
    if maps and not shared:
        raise click.UsageError("--maps is for storage that hosts share: say --shared too, or leave --maps out")
    from memstore.distributed.serving import serve as serve_root

    serve_root(
        root,
        address,
        join=named,
        new=new,
        moved=moved,
        owner=not no_owner,
        insecure=insecure,
        shared=shared,
        maps=maps,
        transport=transport,
        ready_fd=ready_fd,
        hang_after=hang_after,
        promote_after=promote_after,
        remove_after=remove_after,
        replicas=replicas or "",
        on_missing=on_missing,
    )


@cli.command(short_help="State on how many hosts values are to lie.")
@root
@click.argument("group", default="")
@click.option(
    "--replicas",
    type=click.Choice(("1", "2", "async", "default")),
    required=True,
    help="2: a put waits for the second host; async: it doesn't; default: as the whole store.",
)
@on_missing
@as_json
def policy(root: str, group: str, replicas: str, on_missing: Literal["fail", "warn"], as_json: bool) -> None:
    """State on how many hosts the values of a GROUP are to lie, the text of keys before their first "/".

    Without GROUP: those of the whole store. ROOT is the store's folder on a host, or the address of one,
    tcp://IP:PORT.
    """
    from memstore.distributed.serving import cluster_of

    number: int | Literal["async"] | None = None
    if replicas != "default":
        number = "async" if replicas == "async" else int(replicas)
    cluster_of(root).set_policy(group, replicas=number, on_missing=on_missing)
    of = f"group {group!r}" if group else "the whole store"
    render.tell({"group": group, "replicas": replicas}, f"{of}: replicas {replicas}", as_json=as_json)


@cli.command(short_help="Show the hosts that serve the store, and how they are.")
@root
@as_json
def status(root: str, as_json: bool) -> None:
    """Show the hosts that serve the store, and how they are. Exit code 1 unless all of them answer.

    ROOT is the store's folder on one of them, or the address of one, tcp://IP:PORT, from anywhere.
    """
    from memstore.distributed.serving import cluster_of

    try:
        found = cluster_of(root).status()
    except NotServedError:
        found = None
    if as_json:
        render.print_json({"served": False} if found is None else {"served": True, **render.plain(found)})
    elif found is None:
        render.console.print(f"{render.printable(root)} is not served")
    else:
        _show_status(found)
    if found is None or not all(host.alive for host in found.hosts):
        sys.exit(SILENT)


def _show_status(found: ClusterStatus) -> None:
    render.write_rows(
        _HOST_TITLES, map(_host_cells, found.hosts), right=("epoch", "starts", "keys", "live", "sent", "received")
    )
    for host in found.hosts:
        if not host.alive:
            render.console.print(render.printable(f"{host.address} does not answer: {host.trouble}"), soft_wrap=True)
        if host.draining:
            render.console.print(render.printable(f"{host.address} is drained: {host.draining}"), soft_wrap=True)
        if host.lacking:
            keys = wording.shown(host.lacking, "key", "keys")
            render.console.print(render.printable(f"{host.address} owns {keys} that lack a replica"), soft_wrap=True)
        if host.spilled_bytes:
            moved = wording.size(host.spilled_bytes)
            render.console.print(render.printable(f"{host.address} has moved {moved} to its disk"), soft_wrap=True)
    for line in found.recovering:
        render.console.print(render.printable(line), soft_wrap=True)
    for who in dict.fromkeys(found.lost.values()):
        names = ", ".join(repr(name) for name, one in found.lost.items() if one == who)
        render.console.print(render.printable(f"{who} was removed, and what lay there alone is lost, of: {names}"))
    alive = [host for host in found.hosts if host.alive]
    deputies = f", deputies {' '.join(found.deputies)}" if found.deputies else ""
    answers = f"{len(alive)} of {len(found.hosts)} hosts answer"
    render.console.print(f"epoch {found.epoch}, seed {found.seed}{deputies}: {answers}", soft_wrap=True)
    versions: dict[str, list[str]] = {}
    for host in alive:
        text = f"memstore {host.memstore}, torch {host.torch or 'missing'}, monarch {host.monarch or 'missing'}"
        versions.setdefault(text, []).append(host.address)
    for text, addresses in versions.items():
        where = f" at {', '.join(addresses)}" if len(versions) > 1 else ""
        render.console.print(render.printable(f"{text}{where}"))


def _host_cells(host: HostStatus) -> tuple[str, ...]:
    if not host.alive:
        return (host.address, host.name, "no", *[""] * 7)
    return (
        host.address,
        host.name,
        "yes",
        str(host.epoch),
        str(host.incarnation),
        f"{host.keys:,}",
        wording.size(host.live_bytes),
        host.transport,
        wording.size(host.sent),
        wording.size(host.received),
    )


@cli.command(short_help="Remove a dead host from the cluster.")
@root
@click.argument("host")
@click.option("--force", is_flag=True, help="Also if it answers: what it has put is lost.")
@as_json
def remove(root: str, host: str, force: bool, as_json: bool) -> None:
    """Remove a HOST that is dead from the cluster: its address, name or id. What it has put is gone.

    ROOT is the store's folder on another host, or the address of one, tcp://IP:PORT, from anywhere.
    """
    from memstore.distributed.serving import cluster_of, remove_member

    removed = remove_member(cluster_of(root), host, force=force)
    render.tell({"removed": removed.address, "id": removed.id.hex()}, f"{removed.address} removed", as_json=as_json)


@cli.command(short_help="Move all that a host has to others, and let it leave.")
@root
@click.argument("host")
@click.option("--to", default="", help="The host that is to own its groups; without it, those that stay share them.")
@click.option("--timeout", default=600.0, show_default=True, type=Seconds(min=0.0), help="Seconds to wait for its end.")
@click.option("--cancel", is_flag=True, help="Let it stay: what has moved stays moved, and it goes on as before.")
@as_json
def drain(root: str, host: str, to: str, timeout: float, cancel: bool, as_json: bool) -> None:
    """Move all that HOST has to other hosts, and let it leave the cluster: its address, name or id.

    Its agent removes its folder then, and ends. ROOT is the store's folder on any host, or the address of one,
    tcp://IP:PORT, from anywhere. After a timeout, an error or Ctrl-C the drain goes on: the same command waits for it.
    """
    if cancel and to:
        raise click.UsageError("--to says who takes the groups, and with --cancel nobody does: leave one of them out")
    from memstore.distributed.serving import cluster_of

    if cancel:
        stays = cluster_of(root).cancel_drain(host, timeout=timeout)
        render.tell({"stays": stays}, f"{stays} stays", as_json=as_json)
        return
    said_at, said = 0.0, ""

    def progress(groups: int, nbytes: int) -> None:
        nonlocal said_at, said
        text = f"{host}: {wording.count_of(groups, 'group', 'groups')} and {wording.size(nbytes)} are left"
        if time.monotonic() - said_at >= _SAID_EVERY and text != said:
            said_at, said = time.monotonic(), text
            render.errors.print(render.printable(text), soft_wrap=True)

    try:
        left = cluster_of(root).drain(host, to=to, timeout=timeout, progress=progress)
    except KeyboardInterrupt:
        render.complain(f"{host} is drained all the same; the same command waits for it, and with --cancel ends it")
        raise
    render.tell({"drained": left}, f"{left} is drained, and has left", as_json=as_json)


@cli.command(short_help="Make another host the seed, since that one is lost.")
@root
@click.argument("host", required=False, default="")
@click.option(
    "--force",
    is_flag=True,
    help="Also without a majority of the hosts, or at one without a copy of the directory: see docs/hosts.md.",
)
@as_json
def promote(root: str, host: str, force: bool, as_json: bool) -> None:
    """Make HOST the seed: its address, name or id. Without it, the first deputy that answers.

    ROOT is the store's folder on one of the hosts, or the address of one, tcp://IP:PORT, from anywhere. With --force,
    what the old seed has said last is lost: it must not come back.
    """
    from memstore.distributed.serving import cluster_of

    seed = cluster_of(root).promote(host, force=force)
    render.tell({"seed": seed}, f"{seed} is the seed", as_json=as_json)
