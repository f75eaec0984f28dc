"""A snapshot that is being written."""

from __future__ import annotations


class PendingSnapshot:
    path: str
