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
TIMINGS = ".. timings of the README"  # the home page has them in its place
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
    if docname == "index":
        source[0] = source[0].replace(TIMINGS, timings())
    page = DOCS / f"{docname}.md"
    if not page.exists():
        return
    shown = ROOT / SHOWN[docname] if docname in SHOWN else page
    parts = FENCE.split(shown.read_text() if docname in SHOWN else source[0])
    parts[::2] = [LINK.sub(lambda link: f"]({moved(link[1], shown, page)}{link[2] or ''})", one) for one in parts[::2]]
    source[0] = "".join(parts) + (FOLDER if docname.endswith("/README") else "")


def timings() -> str:
    """The README's table of timings and the sentence below it, as reStructuredText."""
    part = (ROOT / "README.md").read_text().partition("## How fast\n")[2].partition("\n![")[0]
    lines = [line for line in part.splitlines() if line.startswith("|") and "---" not in line]
    rows = [[cell.strip().replace("`", "``") for cell in line.strip("|").split("|")] for line in lines]
    table = "\n".join("   * - " + "\n     - ".join(row) for row in rows)
    said = part[part.rindex("|") + 1 :].partition(";")[0].strip()
    said = f"{said}: :doc:`performance` has more, and all that is slower."
    return f".. list-table::\n   :header-rows: 1\n\n{table}\n\n{said}"


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
