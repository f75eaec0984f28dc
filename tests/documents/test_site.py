"""The site: nothing is missing on it, it is built without a warning, and its links lead somewhere."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import runpy
import subprocess
import sys
import zlib
from collections.abc import Callable
from fnmatch import fnmatch
from html import unescape
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from textwrap import dedent

import pytest

import memstore
from tests.documents.pages import ROOT, snippets
from tests.source_tree import Module
from tests.ui import browser as browsers

DOCS, PACKAGE = ROOT / "docs", ROOT / "memstore"
ROOMS = ("aio", "convert", "deferred_init", "fake", "ui")  # public besides memstore itself, metrics and integrations/
# Shown too, though users don't import them from there: what public methods return, and what is experimental.
ELSEWHERE = {
    "memstore.integrations.torchstore.spmd.SPMDEnv",
    "memstore.listing.KeyTree",
    "memstore.snapshot.stored.ObjectEntry",
    "memstore.snapshot.stored.SnapshotMetadata",
    "memstore.snapshot.stored.TensorEntry",
    "memstore.snapshot.take.TierStatus",
}
CLASSES = ("Store", "Ref", "Snapshot", "PendingSnapshot", "Dataset", "ReplayBuffer", "aio.AsyncStore")
SPHINX = ("sphinx", "myst_nb", "ipykernel", "matplotlib", "furo", "sphinx_design", "sphinx_copybutton")

# --- the reference ----------------------------------------------------------------------------------------------------


def public_doors() -> dict[str, Module]:
    """The modules whose names users may use: their `__all__`, or, without one, all that they define."""
    paths = [PACKAGE / "__init__.py", PACKAGE / "metrics.py", *(PACKAGE / room / "__init__.py" for room in ROOMS)]
    paths += (PACKAGE / "integrations").glob("*/__init__.py")
    paths += (PACKAGE / "integrations").glob("[!_]*.py")
    names = (path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths)
    return {name.removesuffix(".__init__"): Module(name, path) for name, path in zip(names, paths, strict=True)}


def reference() -> str:
    return "\n".join(path.read_text() for path in (DOCS / "api").glob("*.rst"))


def test_every_public_name_stands_in_the_reference() -> None:
    shown = set(re.findall(r"^\.\. (?:auto\w+|py:data|py:module):: ([\w.]+)(?:\(\))?$", reference(), re.MULTILINE))
    doors = public_doors()
    wanted = {f"{door}.{name}" for door, module in doors.items() for name in module.offered}
    wanted |= {door for door, module in doors.items() if not module.offered}
    assert wanted - shown == set(), "docs/api/ lacks them"
    assert len(wanted) > 120 and len(doors) > 6, "this tests nothing"


def test_the_reference_names_what_there_is() -> None:
    """A name that is gone would be found when the site is built; this finds it sooner."""
    doors = public_doors()
    named = set(re.findall(r"^\.\. auto(?!module|method)\w+:: ([\w.]+)", reference(), re.MULTILINE))
    for name in named - ELSEWHERE:
        door, _, last = name.rpartition(".")
        assert last in doors[door].offered, name
    assert named >= ELSEWHERE and all(pkgutil.resolve_name(name) for name in ELSEWHERE)


def options_of(name: str) -> dict[str, str]:
    """What the reference says of how a class is shown."""
    shown = re.search(rf"^\.\. autoclass:: memstore\.{re.escape(name)}\n((?:   :.*\n)*)", reference(), re.MULTILINE)
    assert shown is not None, name
    return dict(re.findall(r"^   :([a-z-]+): ?(.*)$", shown[1], re.MULTILINE))


def wanted_methods(name: str) -> list[str]:
    """The public methods of a class, but for those that the reference leaves out on purpose."""
    cls, left_out = attrgetter(name)(memstore), options_of(name).get("exclude-members", "").split(", ")
    found = [one for one in dir(cls) if not one.startswith("_") and callable(getattr(cls, one))]
    return [one for one in found if one not in left_out]


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_of_what_people_use_most_is_shown(name: str) -> None:
    """As the directives tell it, in an instant; the test that builds the site looks at what is there."""
    cls, options, methods = attrgetter(name)(memstore), options_of(name), wanted_methods(name)
    assert options["members"] == "" and methods
    own = [one for one in methods if one in vars(cls)]
    assert own == methods or "inherited-members" in options, f"{set(methods) - set(own)} aren't shown"
    assert [one for one in methods if not inspect.getdoc(getattr(cls, one))] == [], "without a docstring none is shown"


def test_the_page_of_stores_begins_with_put_and_get_and_sums_up_all_methods() -> None:
    """Methods stand there in the order of the source."""
    own = [name for name, one in vars(memstore.Store).items() if callable(one) and not name.startswith("_")]
    assert own[:2] == ["put", "get"]
    text = (DOCS / "api/store.rst").read_text()
    above, _, shown = text.partition(".. autoclass:: memstore.Store\n")
    named = re.findall(r":meth:`~memstore\.Store\.(\w+)`", above)
    assert named[:2] == ["put", "get"] and len(named) == len(set(named))
    assert set(named) == set(wanted_methods("Store"))
    assert "__getitem__" in shown, "dunders come last"


def test_arguments_are_hidden_only_where_nobody_passes_any() -> None:
    """docs/site/signatures.py shows a class without arguments if its docstring says what makes it."""
    made = {name for name in CLASSES if "Made by `" in attrgetter(name)(memstore).__doc__}
    assert made == {"Store", "Ref", "PendingSnapshot", "Dataset", "aio.AsyncStore"}


# --- troubleshooting --------------------------------------------------------------------------------------------------


def errors() -> list[str]:
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def explained() -> dict[str, str]:
    """The sections of the page on errors, by their titles."""
    parts = re.split(r"^##+ (\w+)$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", errors())
def test_every_error_is_explained(name: str) -> None:
    section = explained().get(name)
    assert section, f"docs/troubleshooting.md has no section {name}"
    if name != "MemstoreError":
        assert all(f"- **{word}:** " in section for word in ("When", "What to do")), section


def test_explained_errors_exist() -> None:
    assert {name for name in explained() if name.endswith("Error")} == set(errors())


# --- its pages --------------------------------------------------------------------------------------------------------


def contents() -> list[str]:
    """What the tables of contents name, with patterns."""
    found: list[str] = []
    for path in DOCS.rglob("*.rst"):
        below = path.parent.relative_to(DOCS).as_posix()
        for block in re.findall(r"^\.\. toctree::\n((?:   .*\n|\n)*)", path.read_text(), re.MULTILINE):
            entries = [line.strip() for line in block.splitlines() if line.strip() and not line.strip().startswith(":")]
            entries = [re.sub(r"^.* <(.*)>$", r"\1", entry) for entry in entries]
            found += [entry if below == "." else f"{below}/{entry}" for entry in entries]
    return found


def test_every_page_stands_in_a_table_of_contents() -> None:
    """One of docs/*.rst names it, or it is beside a README.md that one names."""
    listed = contents()
    folders = [entry.removesuffix("README") + "*" for entry in listed if entry.endswith("/README")]
    files = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in files]
    missing = [page for page in pages if not any(fnmatch(page, one) for one in [*listed, *folders])]
    assert missing == [], "name them in docs/index.rst"
    assert all(any((DOCS / f"{one}{end}").exists() for end in (".md", ".rst", ".ipynb")) for one in listed), listed


def test_what_the_search_raises_and_lowers_is_there() -> None:
    places = re.findall(r'"([\w/-]+)": -?\d', (DOCS / "site/search.js").read_text())
    assert len(places) > 10, "this tests nothing"
    for place in places:
        assert list(DOCS.glob(f"{place}*" if place.endswith("/") else f"{place}.*")), place


def test_the_home_page_opens_as_the_readme_does() -> None:
    """With the same sentences and the same snippets; test_snippets.py runs them."""
    home, readme = (DOCS / "index.rst").read_text(), (ROOT / "README.md").read_text()
    blocks = re.findall(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", home, re.MULTILINE)
    codes = [snippet.code for snippet in snippets(ROOT / "README.md") if snippet.kind != "shell"]
    assert len(blocks) == home.count("code-block::") == 2
    assert [dedent(block).strip() for block in blocks] == [code.strip() for code in codes[: len(blocks)]]
    said = home.partition("========\n")[2].partition("..")[0].replace("``", "`")
    without_badges = re.sub(r"^!.*$", "", readme.partition("# memstore\n")[2], count=1, flags=re.MULTILINE)
    assert said.split() == without_badges.partition("![")[0].split()


def test_the_badges_say_what_the_package_says() -> None:
    """With the same words for who can't see them."""
    project, drawn = (ROOT / "pyproject.toml").read_text(), (DOCS / "images/badges.svg").read_text()
    shown = re.findall(r"<text [^>]*>([^<]+)</text>", drawn)
    first, last = re.findall(r"Python :: (3\.\d+)", project)[0], re.findall(r"Python :: (3\.\d+)", project)[-1]
    licence = re.search(r'^license = "(.*)"$', project, re.MULTILINE)
    assert licence is not None and shown == [f"Python {first}–{last}", "Linux x86-64", "strictly typed", licence[1]]
    said = ", ".join(shown).replace("–", " to ")
    assert drawn.count(said) == 2 and f"![{said}](docs/images/badges.svg)" in (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The site as `make docs` builds it, which takes half a minute, and what Sphinx said."""
    missing = [name for name in SPHINX if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; make docs installs them")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", DOCS / "site", DOCS, folder]
    return folder, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_site_is_built_without_a_warning(site: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, built = site
    assert built.returncode == 0, built.stderr
    assert broken(folder) == []
    assert methods_that_are_missing((folder / "objects.inv").read_bytes()) == []
    assert riddles(folder / "api") == []


LOOKED_AT = ("index", "quickstart", "hosts", "performance", "api/store")
CUT_OFF = """[...document.querySelectorAll("article, .toc-drawer, h1, h2, article > section > table, pre")]
  .map((one) => [one, one.getBoundingClientRect(), document.documentElement.clientWidth])
  .filter(([_, box, width]) => box.left < width && box.right > width + 1)
  .map(([one]) => one.outerHTML.slice(0, 80))"""


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(browsers.find() is None, reason="no browser on this machine: apt-get install chromium")
def test_pages_of_the_site_fit_the_window(site: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """Wide, narrow, light and dark: nothing is cut off at the right, and no page scrolls to the side."""
    folder, path, seen = site[0], browsers.find(), set[str]()
    assert path is not None
    with browsers.Browser(path, tmp_path) as browser:
        for name in LOOKED_AT:
            browser.open((folder / f"{name}.html").as_uri())
            browser.until(f"document.readyState === 'complete' && location.pathname.endsWith('/{name}.html')")
            for width in (390, 1366, 1920):
                for dark in (False, True):
                    browser.look(width, 900, dark=dark)
                    where = f"{name} at {width} px"
                    assert (
                        browser.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                        <= 0
                    ), where
                    assert browser.value(CUT_OFF) == [], where
                    seen.add(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2, "light and dark"


def riddles(pages: Path) -> list[str]:
    """What only those understand who read the source, or what nobody wrote, on pages of the reference."""
    marks = (
        r"_ErrnoError|HasView|OWNER_ONLY|NO_DEFAULT|DEFAULT_LEASE|_TIMEOUT",  # private names
        r"alias of|Alias for field|class\s+\w+\(\*args, \*\*kwargs\)|~\w*P\b",  # where Sphinx knows nothing else
        r"Return type|docs/\w+\.md|href=.tcp:",
        r"\w+ \(\w+,\) –",  # `key, version: ...` read as a name and a type
        r"– ?$",  # an error without a text
    )
    found: list[str] = []
    for page in sorted(pages.glob("*.html")):
        text = unescape(re.sub(r"<(?!a [^>]*href=.tcp:)[^>]+>", "", page.read_text()))
        found += [f"{page.name}: {one}" for one in re.findall("|".join(marks), text, re.MULTILINE)]
    return found


def test_riddles_are_found(tmp_path: Path) -> None:
    shown = (
        "<dt><em>class</em> <span>Storage</span>(<em>*args</em>, <em>**kwargs</em>)</dt><dt>get(<em>default</em>"
        "=<span>NO_DEFAULT</span>)</dt><li><p><strong>version</strong> (<em>key,</em>) – what it is</p></li>\n"
        '<p>see docs/views.md, <a class="x" href="tcp://IP:PORT">tcp://IP:PORT</a></p><p>As <code>put</code>. –</p>\n'
    )
    (tmp_path / "store.html").write_text(shown)
    found = [line.removeprefix("store.html: ") for line in riddles(tmp_path)]
    assert found == [
        "class Storage(*args, **kwargs)",
        "NO_DEFAULT",
        "version (key,) –",
        "docs/views.md",
        'href="tcp:',
        "–",
    ]


def methods_that_are_missing(inventory: bytes) -> list[str]:
    """Public methods of what people use most that the reference doesn't show, and doesn't leave out on purpose."""
    shown = zlib.decompress(inventory.split(b"\n", 4)[4]).decode()
    wanted = [f"memstore.{one}.{name}" for one in CLASSES for name in wanted_methods(one)]
    assert len(wanted) > 80, "this tests nothing"
    return [name for name in wanted if f"{name} " not in shown]


broken: Callable[[Path], list[str]] = runpy.run_path(str(DOCS / "site/links.py"))["broken"]


def test_links_of_a_site_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "picture.svg").touch()
    (tmp_path / "folder/page.html").write_text('<h1 id="top"></h1><img src="../picture.svg"><a href="#gone"></a>')
    (tmp_path / "index.html").write_text(
        '<a href="folder/page.html#top"></a><a href="folder/page.html#bottom"></a><a href="https://elsewhere/x"></a>'
        '<a href="folder/other.html"></a><script src="script.js?v=1"></script>'
    )
    assert [line.partition(":")[0] for line in broken(tmp_path)] == [
        "folder/page.html links to #gone",
        "index.html links to folder/page.html#bottom",
        "index.html links to folder/other.html",
        "index.html links to script.js?v=1",
    ]
