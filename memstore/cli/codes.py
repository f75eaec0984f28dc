"""Exit codes, as docs/command-line.md has them; 0 is done, and 2, a wrong call, is click's too."""

from __future__ import annotations

DAMAGED = DIFFERENT = SILENT = 1  # damage was found, or something was lost; two values differ; hosts don't answer
WRONG = 2
REFUSED = 3
MISSING = 4
INTERRUPTED = 130
