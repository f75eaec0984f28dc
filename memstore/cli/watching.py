"""Commands that show a store's figures: `memstore metrics` for Prometheus, `memstore ui` for people."""

from __future__ import annotations

import secrets

import click

from memstore.cli import render
from memstore.cli.group import cli, root
from memstore.errors import NotAStoreError
from memstore.listing import open_keyspace

_checkpoints = click.option(
    "--checkpoints",
    multiple=True,
    metavar="PATH",
    help="The folder of a CheckpointManager, or a URL, whose steps are told too. May be given several times.",
)


@cli.command(short_help="Print figures for Prometheus.")
@root
@click.option("--keys", default=1000, show_default=True, type=click.IntRange(0), help="Keys with figures of their own.")
@_checkpoints
def metrics(root: str, keys: int, checkpoints: tuple[str, ...]) -> None:
    """Print the figures of the store as text for Prometheus: versions, bytes, ages, processes, hosts, buffers."""
    from memstore.metrics import prometheus

    with open_keyspace(root, "r") as store:
        text = prometheus(store, keys=keys, checkpoints=checkpoints)
    click.echo(text, nl=False)


@cli.command(short_help="Serve a live page of the store.")
@root
@click.option("--port", default=8600, show_default=True, type=click.IntRange(0, 65535), help="0: any free one.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address at which to listen: 0.0.0.0 for other hosts."
)
@click.option(
    "--token",
    envvar="MEMSTORE_UI_TOKEN",
    help="What everybody has to know who looks. Beyond this host one is made if it isn't given.",
)
@_checkpoints
def ui(root: str, port: int, host: str, token: str | None, checkpoints: tuple[str, ...]) -> None:
    """Serve a live page of the store, until Ctrl-C: keys, versions, bytes, who holds what, hosts, replay buffers.

    The page only reads. It also has /metrics for Prometheus.
    """
    from memstore.ui import server

    open_keyspace(root, "r").close()  # a wrong ROOT is told here
    if token is None and not server.is_loopback(host):
        token = secrets.token_urlsafe(16)
    try:
        page = server.serve(root, host=host, port=port, token=token, checkpoints=checkpoints)
    except OSError as error:
        if isinstance(error, NotAStoreError):
            raise
        raise click.UsageError(f"{host}:{port}: {error.strerror}: say another --port, or 0 for any") from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with page:
        render.console.print(render.printable(page.url), soft_wrap=True)
        page.wait()
