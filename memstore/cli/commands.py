"""All commands, and what becomes of their errors.

Exit codes: 0 done; 1 damage was found, something was lost, there is a difference, or a host doesn't answer; 2 the
call is wrong; 3 memstore refused, or failed (the message says why); 4 there is no such key or leaf; 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from typing import NoReturn

import click
from click.exceptions import Exit
from click.shell_completion import shell_complete

import memstore.cli.checkpoints  # pyright: ignore[reportUnusedImport] - it registers its command
import memstore.cli.cluster  # pyright: ignore[reportUnusedImport]
import memstore.cli.files  # pyright: ignore[reportUnusedImport] - it registers its commands
import memstore.cli.keys  # pyright: ignore[reportUnusedImport]
import memstore.cli.stores  # pyright: ignore[reportUnusedImport]
import memstore.cli.values  # noqa: F401  # pyright: ignore[reportUnusedImport]
from memstore.cli import messages, render
from memstore.cli.group import INTERRUPTED, MISSING, REFUSED, WRONG, cli
from memstore.errors import (
    InvalidAddressError,
    InvalidKeyError,
    KeyNotFoundError,
    MemstoreError,
    NotAStoreError,
    PartialCommitError,
)

_NAME, _COMPLETE = "memstore", "_MEMSTORE_COMPLETE"


def run() -> NoReturn:
    """Runs the command that `sys.argv` names. Click's own `main` would end a broken pipe with code 1: damage."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: `memstore ls ROOT >&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until this process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding hasn't is shown as an escape
            stream.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")  # torch's, of any look at such a tensor
    command: str | None = None
    try:
        asked = os.environ.get(_COMPLETE)
        if asked:
            sys.exit(shell_complete(cli, {}, _NAME, _COMPLETE, asked))
        with cli.make_context(_NAME, sys.argv[1:]) as context:
            try:
                cli.invoke(context)
            finally:
                command = context.invoked_subcommand
        sys.stdout.flush()
    except Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        _show(error)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except (KeyNotFoundError, PartialCommitError) as error:
        _fail(error, MISSING)
    except (InvalidKeyError, InvalidAddressError) as error:
        _fail(error, WRONG)
    except BrokenPipeError:  # `memstore ls ROOT | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except NotAStoreError as error:
        _fail(error, REFUSED, messages.message_without_store(str(error), command, sys.argv[2:]))
    except (MemstoreError, OSError, ValueError, TypeError, MemoryError) as error:
        _fail(error, REFUSED)
    except Exception as error:
        traceback.print_exc()
        _fail(error, REFUSED)
    sys.exit(0)


def _show(error: click.ClickException) -> None:
    """Shows an error as click does; a terminal gets lines that end with words."""
    text = io.StringIO()
    error.show(file=text)
    for line in text.getvalue().splitlines():
        render.errors.print(line, markup=False, soft_wrap=not render.errors.is_terminal)


def _fail(error: Exception, code: int, text: str | None = None) -> NoReturn:
    render.complain(text or messages.message_of(error) or type(error).__name__)
    sys.exit(code)
