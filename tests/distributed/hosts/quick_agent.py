"""The program of an agent whose lease may be a few seconds, in place of the 30 that people must give."""

from __future__ import annotations

from memstore.distributed.serving import __main__, supervision

supervision.SHORTEST_LEASE = 1.0

if __name__ == "__main__":
    __main__.main()
