"""A program: `python -m ...probe` ends with 0 where Monarch finds ibverbs. An agent must not import Monarch."""

from __future__ import annotations

import sys

from memstore.distributed.rdma.memory import has_ibverbs

if __name__ == "__main__":
    sys.exit(0 if has_ibverbs() else 1)
