"""`python -m tests.documents.words` writes how many words the documents have now into docs/project/words.md.

A word is what stands between blanks and has a letter or a digit; code counts, comments of HTML don't. "Seen" leaves out
what stands behind "details". The columns of before stay as they are.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.documents.pages import ROOT

DOCS = ROOT / "docs"
TABLE = DOCS / "project/words.md"
SINGLE = {"README": ROOT / "README.md", "[performance]": DOCS / "performance.md"}
SINGLE |= {"[promises]": DOCS / "promises.md", "[many hosts]": DOCS / "hosts.md"}
FORMATS = [DOCS / "format.md", DOCS / "snapshot-format.md"]
BESIDE = [ROOT / "SECURITY.md", ROOT / "examples/README.md"]
DEVELOPERS = [
    ROOT / "CONTRIBUTING.md",
    *(DOCS / f"{one}.md" for one in ("dependencies", "internals", "releasing", "testing")),
]


def words(text: str, *, seen: bool = False) -> int:
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL)
    if seen:
        text = re.sub(r"<details>.*?</details>", " ", text, flags=re.DOTALL)
    return sum(re.search(r"[A-Za-z0-9]", word) is not None for word in text.split())


def groups() -> dict[str, list[Path]]:
    """The pages of each row of the table, but for those of sums."""
    apart = {*SINGLE.values(), *FORMATS, *DEVELOPERS}
    return {
        **{name: [path] for name, path in SINGLE.items()},
        "other guides": [*(path for path in DOCS.glob("*.md") if path not in apart), *BESIDE],
        "coming from": list((DOCS / "coming-from").glob("*.md")),
        "formats": FORMATS,
        "for developers": DEVELOPERS,
        "decisions": list((DOCS / "decisions").glob("*.md")),
        "project": list((DOCS / "project").glob("*.md")),
    }


USERS = (*SINGLE, "other guides", "coming from", "formats")


def for_users() -> list[Path]:
    found = groups()
    return sorted(page for name in USERS for page in found[name])


def counted(pages: list[Path]) -> tuple[int, int, int]:
    texts = [page.read_text() for page in pages]
    return len(pages), sum(map(words, texts)), sum(words(text, seen=True) for text in texts)


def table(text: str) -> str:
    """The page with the figures of now."""
    now = {name: counted(pages) for name, pages in groups().items()}
    users = [now[name] for name in USERS]
    now["**for users"] = tuple(map(sum, zip(*users, strict=True)))  # pyright: ignore[reportArgumentType]
    lines = text.splitlines(keepends=True)
    for name, (pages, told, seen) in now.items():
        (at,) = [number for number, line in enumerate(lines) if line.startswith(f"| {name}")]
        before = lines[at].split(" | ")[:3]
        lines[at] = f"{' | '.join(before)} | {pages} | {told:,} | {seen:,} |\n"
    pages, told, seen = now["other guides"]
    average = f"has {told / pages:.0f}, of which {seen / pages:.0f} are seen at once"
    return re.sub(r"has \d+, of which \d+ are seen at once", average, "".join(lines))


if __name__ == "__main__":
    TABLE.write_text(table(TABLE.read_text()))
