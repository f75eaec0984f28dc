"""Pages and files outside of docs/ on the site: an extension of Sphinx.

A page of `SHOWN` stands in docs/project/ with a link to a file elsewhere in the repository. The site shows that file in
its place. Links to the file, from whatever page, lead there; links to other files out of docs/ offer these for
download. A README.md has the other pages of its folder below it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN = {
    "project/benchmarks": "tests/benchmarks/README.md",
    "project/changes": "CHANGELOG.md",
    "project/examples": "examples/README.md",
}
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]+)?\)")
FOLDER = """

```{toctree}
:hidden:
:glob:

*
```
"""


def show(app: Sphinx, docname: str, source: list[str]) -> None:
    """What Sphinx reads of a page: the file that it stands for, with links that are right in docs/."""
    page = DOCS / f"{docname}.md"
    if not page.exists():
        return
    shown = ROOT / SHOWN[docname] if docname in SHOWN else page
    parts = FENCE.split(shown.read_text() if docname in SHOWN else source[0])
    parts[::2] = [LINK.sub(lambda link: f"]({moved(link[1], shown, page)}{link[2] or ''})", one) for one in parts[::2]]
    source[0] = "".join(parts) + (FOLDER if docname.endswith("/README") else "")


def moved(target: str, shown: Path, page: Path) -> str:
    """A link of the file `shown`, as it is from the place of `page`."""
    there = Path(os.path.normpath(shown.parent / target))
    for docname, file in SHOWN.items():
        if there == ROOT / file:
            there = DOCS / f"{docname}.md"
    if there == ROOT / "README.md":
        there = DOCS / "index.rst"
    return os.path.relpath(there, page.parent)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", show)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
