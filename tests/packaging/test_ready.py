"""A release that isn't ready is told what it lacks; what contributors are told to run exists, and does what it says."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

import memstore
from tests.documents.test_site import SPHINX
from tests.packaging.archives import ROOT
from tests.packaging.ready import ADDRESSED, PLACEHOLDER, VERSIONED, missing

READY = """# Changelog

## [Unreleased]

## [1.2.3] - 2026-01-31

### Added

- Something.

## [1.2.2] - 2026-01-01
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "CHANGELOG.md").write_text(READY)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")


def test_what_is_ready_may_be_tagged_and_checked_again_at_its_tag(checkout: Path) -> None:
    assert missing("1.2.3", checkout, current="1.2.3") == []
    git(checkout, "tag", "v1.2.3")
    assert missing("1.2.3", checkout, current="1.2.3") == []


@pytest.mark.parametrize(
    ("replaced", "by", "says"),
    [
        ("## [1.2.3] - 2026-01-31", "## [1.2.3]", "no date"),
        ("## [Unreleased]\n", "## [Unreleased]\n\n- Something else.\n", "under 'Unreleased'"),
        ("## [Unreleased]\n\n", "", "expected ['Unreleased', '1.2.3']"),
        ("1.2.3", "1.2.4", "expected ['Unreleased', '1.2.3']"),
        ("\n### Added\n\n- Something.\n", "", "says nothing of 1.2.3"),
    ],
)
def test_a_changelog_that_does_not_tell_of_it(checkout: Path, replaced: str, by: str, says: str) -> None:
    assert replaced in READY
    (checkout / "CHANGELOG.md").write_text(READY.replace(replaced, by))
    commit(checkout)
    (line,) = missing("1.2.3", checkout, current="1.2.3")
    assert says in line


def test_another_version_in_the_code(checkout: Path) -> None:
    (line,) = missing("1.2.3", checkout, current="1.2.2")
    assert "memstore/_version.py says 1.2.2" in line


@pytest.mark.parametrize("version", ["v1.2.3", "1.2", "1.2.3.dev0"])
def test_what_is_no_version(version: str, checkout: Path) -> None:
    assert "is no version" in missing(version, checkout, current=version)[0]


def test_what_is_not_committed(checkout: Path) -> None:
    (checkout / "new").touch()
    (line,) = missing("1.2.3", checkout, current="1.2.3")
    assert "not committed" in line and "new" in line


def test_a_version_that_was_released(checkout: Path) -> None:
    git(checkout, "tag", "v1.2.3")
    (checkout / "new").touch()
    commit(checkout)
    (line,) = missing("1.2.3", checkout, current="1.2.3")
    assert "released once" in line


# --- what contributors and reporters are told to run ------------------------------------------------------------------


FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[0-9]*.yml"))
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "docs/releasing.md"]
MAKE = re.compile(r"(?:^|`|&& )make ([a-z][a-z-]*)", re.MULTILINE)


def would_run(*targets: str) -> list[str]:
    """The commands of make, with those that it shows for environments that are not set up yet."""
    if shutil.which("make") is None:
        pytest.skip("make isn't installed")
    command = ["make", "--dry-run", "--no-print-directory", *targets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if re.search(r"python -m (?!pip)", line)]


def test_the_hooks_run_what_make_check_runs() -> None:
    hooks = re.findall(r"^ +entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    targets = [word for hook in hooks for word in shlex.split(hook)[1:] if not word.startswith("-")]
    checked = would_run("check")
    assert len(checked) >= 3 and any("basedpyright" in line for line in checked)
    assert sorted(would_run(*targets)) == sorted(checked)


def test_make_knows_the_targets_that_pages_name() -> None:
    named = {target for page in PAGES for target in MAKE.findall(page.read_text())}
    assert {"check", "format", "test", "test-full", "dist"} <= named, "this tests nothing"
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= rules, f"no target {sorted(named - rules)}"


# What tests are skipped without, and no extra names. joblib comes with scikit-learn, and torchrl has an environment of
# its own; who works on what the others are for installs them by hand.
IN_NO_EXTRA = {"joblib", "tensorboard", "torchao", "torchdata", "torchrl", "transformers", "vllm", "yaml"}


def test_make_test_full_installs_what_tests_are_skipped_without() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    needed = set(re.findall(r"importorskip\(\"(\w+)", sources)) | set(SPHINX)
    assert {"twine", "matplotlib", "sphinx", "furo"} <= needed, "this tests nothing"
    rule = re.search(r"^test-full: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule is not None
    installed = {name for extra in re.findall(r"\.has-(\w+)", rule[1]) for name in packages_of(extra)}
    named = {name: {name.replace("_", "-"), f"{name}-sdk"} for name in needed - IN_NO_EXTRA}  # opentelemetry-sdk
    missing = {name for name, packages in named.items() if not packages & installed}
    assert missing == set(), "name an extra that has them in the rule, or the packages above"
    assert needed >= IN_NO_EXTRA, "no test is skipped without these any more"


def packages_of(extra: str) -> set[str]:
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(rf"^{extra} = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
    assert listed is not None, extra
    return {re.split(r"[^\w-]", requirement)[0] for requirement in re.findall(r'"([^"]+)"', listed[1])}


COMMAND = re.compile(r"(?:`|label: )memstore ((?:[a-z]+ )*[a-z]+(?: [/A-Z]\S*| --[a-z-]+)+)")
NAMED = sorted({line.rstrip("`.,:)") for path in [*FORMS, *PAGES] for line in COMMAND.findall(path.read_text())})


@pytest.mark.parametrize("line", NAMED)
def test_named_commands_exist_and_take_the_named_options(line: str) -> None:
    from memstore.cli.commands import cli

    command: click.Command = cli
    words = line.split()
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    assert command is not cli, f"there is no `memstore {line}`"
    options = {option for parameter in command.params for option in parameter.opts}
    named = {word.rstrip("`.,:)") for word in words if word.startswith("--")}
    assert named <= options, f"`memstore {line}`"


def test_each_form_of_a_running_store_asks_for_its_state_and_for_the_machine() -> None:
    assert len(FORMS) >= 5
    for form in FORMS:
        text = form.read_text()
        if "install" not in form.name and "documents" not in form.name:
            assert "memstore stats ROOT --json" in text and "memstore bench --json" in text, form.name


PLACES = [
    ("pyproject.toml", '[project.urls]\nRepository = "https://github.com/OWNER/memstore"\n', "make address"),
    ("CITATION.cff", "version: 1.2.2\n", "doesn't say 1.2.3"),
    ("conda/recipe.yaml", "version: 1.2.2\n", "doesn't say 1.2.3"),
    ("CITATION.cff", "version: 1.2.3\nrepository-code: https://github.com/OWNER/memstore\n", "make address"),
    ("conda/recipe.yaml", "version: 1.2.3\nhomepage: https://github.com/OWNER/memstore\n", "make address"),
]


@pytest.mark.parametrize(("name", "text", "says"), PLACES)
def test_a_file_that_has_another_version_or_no_address(checkout: Path, name: str, text: str, says: str) -> None:
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_text(text)
    commit(checkout)
    (line,) = missing("1.2.3", checkout, current="1.2.3")
    assert name in line and says in line
    (checkout / name).write_text(text.replace("1.2.2", "1.2.3").replace("OWNER", "somebody"))
    commit(checkout)
    assert missing("1.2.3", checkout, current="1.2.3") == []


def test_files_that_name_the_version_name_this_one() -> None:
    for name in VERSIONED:
        assert re.search(rf"^ *version: {re.escape(memstore.__version__)}$", (ROOT / name).read_text(), re.MULTILINE)


CONDA_NAMES = {"torch": "pytorch", "lmdb": "python-lmdb", "xxhash": "python-xxhash"}


def test_the_conda_recipe_takes_what_the_package_takes() -> None:
    """It also takes the extra `cli`, since it installs the command."""
    text, recipe = (ROOT / "pyproject.toml").read_text(), (ROOT / "conda/recipe.yaml").read_text()

    def of_project(name: str) -> set[str]:
        listed = re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
        assert listed is not None, name
        lines = [line.partition("#")[0] for line in listed[1].splitlines()]
        pairs = re.findall(r'"([\w-]+)([^"]*)"', "\n".join(lines))
        return {f"{CONDA_NAMES.get(package, package)} {versions}" for package, versions in pairs}

    def of_recipe(name: str) -> set[str]:
        listed = re.search(rf"^  {name}:.*\n((?:    - .*\n)+)", recipe, re.MULTILINE)
        assert listed is not None, name
        return set(re.findall(r"^    - (.*)$", listed[1], re.MULTILINE))

    python = re.search(r'^requires-python = "(.*)"$', text, re.MULTILINE)
    assert python is not None
    needed = {f"python {python[1]}"}
    assert of_recipe("run") == needed | {"__linux"} | of_project("dependencies") | of_project("cli")
    assert of_recipe("host") == needed | {"pip"} | of_project("requires")
    assert 'memstore = "memstore.cli:main"' in text and "- memstore = memstore.cli:main" in recipe


def test_one_command_puts_the_address_everywhere(tmp_path: Path) -> None:
    """In a checkout of its own, with the files as they are here."""
    for name in (*ADDRESSED, *VERSIONED, "Makefile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    before = [name for name in ADDRESSED if PLACEHOLDER in (tmp_path / name).read_text()]
    assert before == list(ADDRESSED)
    refused = subprocess.run(["make", "address"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode != 0 and "REPOSITORY" in refused.stderr
    command = ["make", "address", "REPOSITORY=https://github.com/somebody/memstore"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    for name in (*ADDRESSED, *VERSIONED):
        text = (tmp_path / name).read_text()
        assert PLACEHOLDER not in text and "https://github.com/somebody/memstore" in text, name
