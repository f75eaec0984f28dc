"""All commands, and what becomes of their errors.

Exit codes: 0 done; 1 damage was found, something was lost, or two snapshots differ; 2 the call is wrong; 3 memstore
refused (the message says why); 4 there is no such key.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

import memstore.cli.convert  # pyright: ignore[reportUnusedImport] - it registers its command
import memstore.cli.entries  # pyright: ignore[reportUnusedImport] - it registers its commands
import memstore.cli.hosts  # pyright: ignore[reportUnusedImport]
import memstore.cli.snapshots  # pyright: ignore[reportUnusedImport]
import memstore.cli.upkeep  # noqa: F401  # pyright: ignore[reportUnusedImport]
from memstore.cli import render
from memstore.cli.group import MISSING, cli
from memstore.errors import KeyNotFoundError, MemstoreError

REFUSED = 3


def run() -> NoReturn:
    try:
        cli.main(prog_name="memstore", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except KeyNotFoundError as error:
        _fail(error, MISSING)
    except BrokenPipeError:  # `memstore ls ROOT | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (MemstoreError, OSError, ValueError, TypeError) as error:
        _fail(error, REFUSED)
    sys.exit(0)


def _fail(error: Exception, code: int) -> NoReturn:
    render.errors.print(f"[bold red]memstore:[/] {render.printable(str(error))}")
    sys.exit(code)
