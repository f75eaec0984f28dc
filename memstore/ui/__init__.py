"""The live page of a store: what is in it, who holds what, its hosts, replay buffers and checkpoints.

    with memstore.ui.serve("/dev/shm/run") as page:       # `memstore ui /dev/shm/run` on the command line
        print(page.url)

server        looks at the store once a second, and makes rates of two looks; HTTP: who may ask, the page's files, the
              stream of events, and /metrics for Prometheus
static/       the page: HTML, CSS and a script, as they are sent

The page only reads. It is served to this host alone, unless it has a token. The guide is docs/live-page.md.
"""

from __future__ import annotations

from memstore.ui.server import LivePage, serve

__all__ = ["LivePage", "serve"]
