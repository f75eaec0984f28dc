"""Whether the links of a built site lead somewhere: `python docs/site/links.py build/site`. If not, it exits with 1.

Sphinx warns of links that it has made itself. This looks at what is there in the end: pages, anchors, pictures and
scripts.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken(site: Path) -> list[str]:
    """The links between files of the site that lead nowhere, a line each."""
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found: list[str] = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not there.is_file():
                found.append(f"{path.relative_to(site.resolve())} links to {link}: there is no such file")
            elif anchor and there in pages and anchor not in pages[there].anchors:
                found.append(f"{path.relative_to(site.resolve())} links to {link}: that page has no such anchor")
    return found


if __name__ == "__main__":
    lines = broken(Path(sys.argv[1]))
    print("\n".join(lines) or "all links lead somewhere", file=sys.stderr if lines else sys.stdout)
    sys.exit(bool(lines))
