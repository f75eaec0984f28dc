"""A release that isn't ready is told what it lacks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.packaging.ready import missing

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
