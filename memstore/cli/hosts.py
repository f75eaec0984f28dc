"""Commands about a store on several hosts."""

from __future__ import annotations

import os
import sys

import click

from memstore import _wording as wording
from memstore._info import ClusterStatus, HostStatus
from memstore.cli import render
from memstore.cli.codes import SILENT
from memstore.cli.group import Seconds, as_json, cli, root

_TITLES = ("address", "name", "alive", "epoch", "starts", "keys", "live", "by", "sent", "received")


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


@cli.command(short_help="Serve the store to other hosts.")
@root
@click.option(
    "--address", required=True, help="Where other hosts reach this one: tcp://IP:PORT. It can't change later."
)
@click.option(
    "--join", "seeds", multiple=True, help="The address of the cluster's seed. Without it, this host is the seed."
)
@click.option("--no-homes", is_flag=True, help="No key has its home here: for hosts that come and go, or will leave.")
@click.option(
    "--insecure", is_flag=True, help="Serve without a secret: whoever can connect may read and change the store."
)
@click.option("--monarch", is_flag=True, help="Answer actors of Monarch too. Whoever can connect may then run code.")
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
    help="How large values are sent between hosts with the same setting. rdma is experimental, and runs Monarch; "
    "monarch is rdma without its hardware, for tests; auto is rdma with --monarch and ibverbs, otherwise tcp.",
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
def serve(
    root: str,
    address: str,
    seeds: tuple[str, ...],
    no_homes: bool,
    insecure: bool,
    monarch: bool,
    shared: bool,
    maps: bool,
    transport: str,
    ready_fd: int | None,
    hang_after: float,
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
        join=seeds,
        insecure=insecure,
        is_home=not no_homes,
        monarch=monarch,
        shared=shared,
        maps=maps,
        transport=transport,
        ready_fd=ready_fd,
        hang_after=hang_after,
    )


@cli.command(short_help="Show the hosts that serve the store, and how they are.")
@root
@as_json
def status(root: str, as_json: bool) -> None:
    """Show the hosts that serve the store, and how they are. Exit code 1 unless all of them answer."""
    from memstore.distributed.serving import status_at

    found = status_at(root)
    if as_json:
        render.print_json({"served": False} if found is None else {"served": True, **render.plain(found)})
    elif found is None:
        render.console.print(f"{render.printable(root)} is not served")
    else:
        _show(found)
    if found is None or not all(host.alive for host in found.hosts):
        sys.exit(SILENT)


def _show(found: ClusterStatus) -> None:
    render.write_rows(_TITLES, map(_row, found.hosts), right=("epoch", "starts", "keys", "live", "sent", "received"))
    for host in found.hosts:
        if not host.alive:
            render.console.print(render.printable(f"{host.address} does not answer: {host.trouble}"), soft_wrap=True)
    alive = [host for host in found.hosts if host.alive]
    render.console.print(f"epoch {found.epoch}, seed {found.seed}: {len(alive)} of {len(found.hosts)} hosts answer")
    versions: dict[str, list[str]] = {}
    for host in alive:
        text = f"memstore {host.memstore}, torch {host.torch or 'missing'}, monarch {host.monarch or 'missing'}"
        versions.setdefault(text, []).append(host.address)
    for text, addresses in versions.items():
        where = f" at {', '.join(addresses)}" if len(versions) > 1 else ""
        render.console.print(render.printable(f"{text}{where}"))


def _row(host: HostStatus) -> tuple[str, ...]:
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
@click.option("--force", is_flag=True, help="Also if it answers and has keys: they are lost.")
@as_json
def remove(root: str, host: str, force: bool, as_json: bool) -> None:
    """Remove a HOST that is dead from the cluster: its address, name or id. Its keys and bytes are gone."""
    from memstore.distributed.serving import remove_host

    removed = remove_host(root, host, force=force)
    render.tell({"removed": removed.address, "id": removed.id.hex()}, f"{removed.address} removed", as_json=as_json)
