"""`memstore ls`: as it looks in windows, pipes and files, with any keys, and with many."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from rich.cells import cell_len

import memstore
from memstore.cli import render
from tests.cli.terminals import in_terminal
from tests.cli.test_commands import COMMAND, call, call_json

ODD = ["a b", "line\nbreak", "[bold]x[/bold]", "日本語", "🐍/é", "back\\[slash", "x" * 500]


@pytest.fixture
def odd(root: str) -> Iterator[str]:
    with memstore.open(root) as store:
        store.put_many({key: torch.ones(3) for key in ODD})
    yield root


def test_types_and_contents_are_told(root: str) -> None:
    with memstore.open(root) as store:
        store.put("a", torch.ones(2, 3, dtype=torch.bfloat16))
        store.put("b", [torch.ones(2), torch.ones(3)])
        store.put("c", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
        store.put("d", torch.ones(4).numpy())
        store.put("e", {"n": 3})
        store.put("f", torch.ones(3, 3).to_sparse())
        store.put("g", "text")
    found = {line.split("  ")[0]: line for line in call("ls", root).splitlines()}
    assert "Tensor         bfloat16 [2, 3]" in found["a"] and "list           2 leaves" in found["b"]
    assert "nested tensor" in found["c"] and "numpy array    float32 [4]" in found["d"]
    assert "dict  " in found["e"] and "leaves" not in found["e"]
    assert "sparse tensor  2 leaves" in found["f"] and found["g"].split()[1] == "str"


def test_long_has_where_how_many_and_when(odd: str) -> None:
    title, row, *_ = call("ls", odd, "a b", "--long").splitlines()
    assert title.split() == ["key", "type", "content", "kind", "bytes", "version", "created"]
    assert "inline     12" in row and ":" in row.split()[-1]


def test_keys_are_sorted_as_asked(root: str) -> None:
    with memstore.open(root) as store:
        for key, size in (("b", 5), ("a", 900), ("c", 40)):
            store.put(key, torch.ones(size))

    def keys(*options: str) -> str:
        return "".join(one["key"] for one in call_json("ls", root, *options))

    assert keys() == keys("--sort", "key") == "abc" and keys("--reverse") == "cba"
    assert keys("--sort", "size") == "acb" and keys("--sort", "size", "-r") == "bca"
    assert keys("--sort", "age") == keys("--sort", "version") == "cab"
    assert "Invalid value for '--sort'" in call("ls", root, "--sort", "colour", code=2)


def test_a_store_without_keys_says_so(root: str) -> None:
    memstore.open(root).close()
    assert call("ls", root) == "no keys\n" and call_json("ls", root) == []
    assert call("ls", root, "run/") == "no keys that start with 'run/'\n"
    assert call("ls", root, "--pending") == "no sharded puts that wait\n"


def test_a_pattern_gets_a_hint(odd: str) -> None:
    seen = in_terminal("ls", odd, "a*")
    assert seen.code == 0 and seen.screen[0] == "no keys that start with 'a*'"
    assert "not a pattern: 'a' means all" in " ".join(seen.screen)
    assert "pattern" not in " ".join(in_terminal("ls", odd, "[bold]").screen)  # a key that starts so


def test_columns_are_aligned_whatever_the_keys(odd: str) -> None:
    lines = call("ls", odd).splitlines()
    assert len(lines) == len(ODD) + 2
    at = [cell_len(line[: line.index("Tensor")]) for line in lines[1:-1] if "xxx" not in line]
    assert len(set(at)) == 1, lines
    assert (
        r"line\nbreak" in "\n".join(lines)
        and "[bold]x[/bold]" in "\n".join(lines)
        and r"back\[slash" in "\n".join(lines)
    )


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_no_row_is_wider_than_the_window_and_every_key_is_whole(odd: str, size: tuple[int, int]) -> None:
    seen = in_terminal("ls", odd, size=size)
    lines = seen.text.replace("\r", "").splitlines()
    assert all(cell_len(line) <= size[0] for line in lines if not line.startswith("xxx")), lines
    assert "x" * 500 in lines and any(line.startswith(" " * 12) and "Tensor" in line for line in lines)


def test_in_a_narrow_window_each_key_has_a_line_for_itself(odd: str) -> None:
    lines = in_terminal("ls", odd, "a b", size=(44, 24)).screen
    assert lines[0] == "key" and lines[1].split() == ["type", "content", "size", "version", "age"]
    assert lines[2] == "a b" and lines[3].startswith("    Tensor  float32 [3]  12 B")
    lines = in_terminal("ls", odd, "a b", "--long", size=(44, 24)).screen
    assert lines[0] == "key"


def test_messages_are_broken_between_words(odd: str) -> None:
    assert in_terminal("ls", odd, "a*", size=(30, 24)).screen[1:4] == [
        "memstore: a prefix is plain",
        "text, and not a pattern: 'a'",
        "means all keys that start so",
    ]


def test_long_rows_fit_into_a_terminal(odd: str) -> None:
    with memstore.open(odd) as store:
        store.put("quantized", torch.quantize_per_tensor(torch.ones(128, 256), 0.1, 0, torch.qint8))
        store.put("float8", torch.ones(512, 1024).to(torch.float8_e4m3fn))
    lines = in_terminal("ls", odd, "--long", size=(80, 60)).screen
    assert all(len(line) <= 80 for line in lines if "x" * 80 not in line), lines
    assert lines[2].strip() == "created" and any("float8_e4m3fn" in line for line in lines)


def test_a_key_between_colons_is_no_emoji(root: str) -> None:
    with memstore.open(root) as store:
        store.put("run/:dog:", {":cat:": torch.ones(3)})
    for command in (("info", root, "run/:dog:"), ("tree", root), ("get", root, "run/:dog:")):
        assert ":dog:" in call(*command) and ":dog:" in "".join(in_terminal(*command).screen)
    assert ":cat:" in call("info", root, "run/:dog:") and "':dog:'" in in_terminal("info", root, ":dog:").text


def test_titles_are_broken_between_words(odd: str) -> None:
    first, second, *_ = in_terminal("info", odd, "a b", size=(20, 24)).screen
    assert re.fullmatch(r"a b  version \d+, 12", first) and re.fullmatch(r"B, \d+ \w+ old", second)


def test_a_long_key_in_a_pipe_has_one_line(odd: str) -> None:
    (row,) = [line for line in call("ls", odd).splitlines() if line.startswith("xxx")]
    assert row.startswith("x" * 500 + "  Tensor")


def test_without_colours_and_in_a_terminal_that_has_none(odd: str) -> None:
    assert "\x1b[3" not in in_terminal("ls", odd, environment={"NO_COLOR": "1"}).text
    assert "\x1b" not in in_terminal("ls", odd, environment={"TERM": "dumb"}).text
    assert "\x1b" not in call("ls", odd)


def test_where_the_terminal_has_no_utf_8(odd: str) -> None:
    seen = in_terminal("ls", odd, environment={"PYTHONIOENCODING": "ascii"})
    assert seen.code == 0 and r"\u65e5" in seen.text and seen.text.isascii()
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*COMMAND, "ls", odd, "--json"], env=environment, capture_output=True, check=True)
    assert sorted(one["key"] for one in json.loads(done.stdout)) == sorted(ODD)


def test_rows_come_page_by_page() -> None:
    def rows() -> Iterator[tuple[str, str]]:
        for number in range(10_000):
            taken.append(number)
            yield f"key {number}", "text"

    taken: list[int] = []
    found = render.pages(rows(), 256)
    assert len(next(found)) == 256 and len(taken) == 256


_LIMITED = """
import resource, sys
from memstore.cli import main
sys.argv = ["memstore", *sys.argv[1:]]
try:
    main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    sys.stderr.write(f"{used.ru_utime + used.ru_stime} {used.ru_maxrss}")
"""


def _listed(root: str, *options: str) -> tuple[float, int, int]:
    """Seconds of the processor, KiB of memory, lines."""
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, "ls", root, *options], capture_output=True, text=True, check=True
    )
    seconds, memory = done.stderr.split()
    return float(seconds), int(memory), len(done.stdout.splitlines())


def test_5_000_keys_take_less_than_a_second(root: str) -> None:
    with memstore.open(root) as store:
        store.put_many({f"run/{i:04}": torch.ones(3) for i in range(5000)})
    seconds, _, lines = _listed(root)
    assert lines == 5002 and seconds < 1.0, seconds  # 0.35 on a quiet machine, where rich's table took 6


@pytest.mark.full
def test_100_000_keys_take_no_more_memory_than_5_000(root: str) -> None:
    with memstore.open(root) as store:
        for start in range(0, 100_000, 5000):
            store.put_many({f"run/{start + i:06}": torch.ones(3) for i in range(5000)})
            if not start:
                few = _listed(root)[1]
    seconds, many, lines = _listed(root)
    assert lines == 100_002 and many - few < 30 << 10, (few, many)  # the catalog's pages count
    assert seconds < 8
    head = subprocess.run(f"{' '.join(COMMAND)} ls {root} | head -3", shell=True, capture_output=True, check=True)
    assert head.stderr == b"" and len(head.stdout.splitlines()) == 3
