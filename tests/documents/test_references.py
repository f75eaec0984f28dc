"""Documents lead somewhere: links to files that are there, tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.documents.pages import FENCE, PAGES, ROOT, relative


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)", prose):
        if "://" not in target:
            there = page.parent / target if target else page
            assert there.exists(), f"{relative(page)} links to {target}"
            assert not anchor or anchor in anchors(there), f"{relative(page)} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_named_tests_exist(page: Path) -> None:
    """A promise that names a test which is gone is worse than none."""
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`", page.read_text()):
        path = ROOT / file
        assert path.exists(), f"{relative(page)} names {file}"
        if name:
            nodes = ast.walk(ast.parse(path.read_text()))
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            defined = {node.name for node in nodes if isinstance(node, kinds)}
            missing = [word for word in name.split("::") if word not in defined]
            assert not missing, f"{relative(page)} names {file}::{name}"
