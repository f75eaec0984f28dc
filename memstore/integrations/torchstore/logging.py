"""TorchStore's `init_logging`."""

from __future__ import annotations

import logging
import os


def init_logging() -> None:
    """Prints the library's log, at the level in TORCHSTORE_LOG_LEVEL (default: INFO)."""
    logger = logging.getLogger("memstore")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    logger.setLevel(os.environ.get("TORCHSTORE_LOG_LEVEL", "INFO").upper())
