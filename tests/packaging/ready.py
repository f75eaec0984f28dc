"""`python -m tests.packaging.ready VERSION`: may this checkout be released as that version?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from memstore._version import __version__

ROOT = Path(__file__).parents[2]
FORM = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
PLACEHOLDER = "https://github.com/OWNER/memstore"
ADDRESSED = ("pyproject.toml", "SECURITY.md", "docs/index.rst", "docs/quickstart.md")
VERSIONED = ("CITATION.cff", "conda/recipe.yaml")
HEADING = re.compile(r"^## \[(?P<name>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.packaging.ready VERSION")
    found = missing(sys.argv[1], ROOT)
    for line in found:
        print(f"not ready: {line}", file=sys.stderr)
    if found:
        sys.exit(1)
    print(f"{sys.argv[1]} may be tagged")


def missing(version: str, root: Path, *, current: str = __version__) -> list[str]:
    """What stands in the way of a release; nothing, if the list is empty."""
    return [
        *_in_version(version, current),
        *_in_changelog(version, root / "CHANGELOG.md"),
        *_of_place(version, root),
        *_in_git(version, root),
    ]


def _in_version(version: str, current: str) -> list[str]:
    if not FORM.fullmatch(version):
        return [f"{version!r} is no version such as 1.2.3 or 1.2.3rc1"]
    if version != current:
        return [f"memstore/_version.py says {current}, the release is {version}: write it there"]
    return []


def _in_changelog(version: str, path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    headings = list(HEADING.finditer(text))
    names = [heading["name"] for heading in headings]
    if names[:1] != ["Unreleased"] or names[1:2] != [version]:
        return [
            f"{path.name} begins with {names[:2]}, expected ['Unreleased', {version!r}]: give the changes their heading"
        ]
    found: list[str] = []
    between, after = text[headings[0].end() : headings[1].start()], text[headings[1].end() :]
    if between.strip():
        found.append(f"{path.name} has changes under 'Unreleased': are they part of {version}?")
    if not headings[1]["date"]:
        found.append(f"{path.name}: the heading of {version} has no date, as in '## [{version}] - 2026-01-31'")
    if not HEADING.split(after)[0].strip():
        found.append(f"{path.name} says nothing of {version}")
    return found


def _of_place(version: str, root: Path) -> list[str]:
    """The files that name the repository, or the version, as well."""
    found: list[str] = []
    for name in (*ADDRESSED, *VERSIONED):
        path = root / name
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        if PLACEHOLDER in text:
            found.append(f"{name} has the placeholder {PLACEHOLDER}: make address REPOSITORY=https://github.com/...")
        if name in VERSIONED and not re.search(rf"\b{re.escape(version)}\b", text):
            found.append(f"{name} doesn't say {version}: write it there")
    return found


def _in_git(version: str, root: Path) -> list[str]:
    found: list[str] = []
    changed = _git(root, "status", "--porcelain")
    if changed:
        found.append(f"the checkout has changes that are not committed, such as {changed.splitlines()[0].strip()!r}")
    tag = _git(root, "rev-list", "-1", f"refs/tags/v{version}") if _git(root, "tag", "--list", f"v{version}") else ""
    if tag and tag != _git(root, "rev-parse", "HEAD"):
        found.append(f"there is a tag v{version}, and it is another commit, {tag[:9]}: a version is released once")
    return found


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
