"""The live page in a browser: what it shows is what the store has, with mouse and keyboard, wide and narrow."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memstore
import memstore.ui
from memstore.distributed.serving import cluster_of
from tests.distributed.serving.agents import two_hosts
from tests.ui import browser as browsers
from tests.ui.browser import Browser

PATH = browsers.find()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(PATH is None, reason="no browser on this machine: apt-get install chromium"),
]
NAUGHTY = "<img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PATH is not None
    with Browser(PATH, tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture(autouse=True)
def no_complaints(browser: Browser) -> Iterator[None]:
    browser.events.clear()
    browser.look(1366, 768)
    yield
    assert browser.complaints() == []


def row(key: str) -> str:
    return f"document.querySelector('#key-rows tr[data-key=' + {json.dumps(json.dumps(key))} + ']')"


def cells(browser: Browser, key: str) -> list[str]:
    return browser.value(f"[...{row(key)}.cells].map((cell) => cell.innerText)")


def tile(name: str) -> str:
    return f"document.querySelector('[data-tile=\"{name}\"]').firstChild.textContent"


def test_the_page_shows_the_stores_values_and_follows_them(scratch: str, browser: Browser) -> None:
    with memstore.open(scratch, capacity="1GiB") as store, memstore.ui.serve(scratch) as page:
        store.put("policy", {"w": torch.zeros(32, 32)})
        store.put("lr", 0.1)
        browser.open(page.url)
        browser.until(f"!!{row('policy')}")
        assert browser.value("document.getElementById('root').textContent") == scratch
        assert browser.value(tile("keys")) == "2"
        key, kind, size, version, _, rate = cells(browser, "policy")
        assert (key, kind, size, version, rate) == ("policy", "dict", "4.0 KiB", "1", "–")
        assert cells(browser, "lr")[1] == "float, inline"
        new = store.put("policy", torch.zeros(3000))
        browser.until(f"{row('policy')}.cells[3].innerText === '{new}'")
        assert browser.value(f"{row('policy')}.classList.contains('changed')")
        assert not browser.value(f"{row('lr')}.classList.contains('changed')")
        assert cells(browser, "policy")[1:3] == ["Tensor", "11.7 KiB"]
        store.delete("lr")
        browser.until(f"!{row('lr')}")
        browser.until(f"{tile('keys')} === '1'")


def test_names_of_keys_are_text(scratch: str, browser: Browser) -> None:
    with memstore.open(scratch) as store, memstore.ui.serve(scratch) as page:
        store.put_many({NAUGHTY: 1, "line\nend": 2, "right\u202eleft": 3, "ünï/😀": 4})
        store.set_quota(NAUGHTY, "1MiB")
        browser.open(page.url)
        browser.until("document.querySelectorAll('#key-rows tr').length === 4")
        assert cells(browser, NAUGHTY)[0] == NAUGHTY
        assert browser.value("document.querySelectorAll('img').length") == 0
        shown = browser.value("document.getElementById('key-rows').innerText")
        assert "line\\u000aend" in shown and "right\\u202eleft" in shown and "ünï/😀" in shown
        browser.value(f"openEntry({json.dumps(NAUGHTY)})")
        browser.until("document.getElementById('entry-body').innerText.includes('version')")
        assert browser.value("document.getElementById('entry-title').textContent") == NAUGHTY
        assert browser.value("document.querySelectorAll('img').length") == 0
        assert "memstore" in browser.value("document.title")


def test_a_hundred_thousand_keys(scratch: str, browser: Browser) -> None:
    with memstore.open(scratch) as store:
        for start in range(0, 100_000, 10_000):
            store.put_many({f"run/{number:06}": number for number in range(start, start + 10_000)})
        store.put("zz/last", 1)
        with memstore.ui.serve(scratch) as page:
            browser.open(page.url)
            browser.until("document.querySelectorAll('#key-rows tr').length === 100")
            assert browser.value(tile("keys")) == "100,001"
            assert browser.value("document.getElementById('place').textContent") == "1 to 100 of 100,001"
            browser.value("document.getElementById('next').click()")
            browser.until(f"!!{row('run/000199')}")
            assert browser.value("document.getElementById('place').textContent") == "101 to 200 of 100,001"
            browser.value("document.getElementById('back').click()")
            browser.until(f"!!{row('run/000000')}")
            browser.value("document.getElementById('prefix').focus()")
            browser.type("zz/")
            browser.until("document.querySelectorAll('#key-rows tr').length === 1")
            store.put("zz/another", 1)
            browser.until("document.querySelectorAll('#key-rows tr').length === 2")


def test_a_store_that_is_removed_meanwhile(scratch: str, browser: Browser) -> None:
    with memstore.open(scratch) as store:
        store.put("a", 1)
    with memstore.ui.serve(scratch) as page:
        browser.open(page.url)
        browser.until(f"!!{row('a')}")
        memstore.destroy(scratch)
        browser.until("!document.getElementById('gone').hidden")
        assert scratch in browser.value("document.getElementById('gone').textContent")
        assert browser.value("document.getElementById('status').textContent") == "no store"
        with memstore.open(scratch) as store:
            store.put("b", 1)
            browser.until(f"!!{row('b')} && document.getElementById('gone').hidden")
            assert not browser.value(f"!!{row('a')}")


def test_shards_are_drawn_where_they_lie(scratch: str, browser: Browser) -> None:
    with memstore.open(scratch) as store, memstore.ui.serve(scratch) as page:
        for rank in range(4):
            part = {"w": memstore.TensorShard(torch.ones(4, 6), (8, 12), (4 * (rank // 2), 6 * (rank % 2)))}
            store.put_sharded("model", part, attempt="one", rank=rank, world_size=4, wait=rank == 3)
        browser.open(page.url)
        browser.until(f"!!{row('model')}")
        browser.value(f"{row('model')}.querySelector('button').click()")
        browser.until("!!document.querySelector('.map')")
        places = "['x', 'y', 'width', 'height'].map((name) => Number(one.getAttribute(name)))"
        found = browser.value(f"[...document.querySelectorAll('.map rect')].map((one) => {places})")
        assert found == [[0, 0, 320, 120], [320, 0, 320, 120], [0, 120, 320, 120], [320, 120, 320, 120]]
        assert "rank 3: 4 to 8, 6 to 12" in browser.value("document.querySelector('.map').getAttribute('aria-label')")


def test_an_entry_names_who_holds_it(scratch: str, browser: Browser) -> None:
    with memstore.open(scratch) as store, memstore.ui.serve(scratch) as page:
        browser.open(page.url)
        browser.until("document.getElementById('status')?.innerText === 'live'")
        store.put("model", torch.zeros(20_000))
        old = store.get("model")
        browser.until(f"!!{row('model')} && holders.some((one) => one.keys.includes('model'))")
        browser.value(f"{row('model')}.querySelector('button').click()")
        browser.until("!!document.querySelector('#entry-body .holders')")
        held = "document.querySelector('#entry-body .holders').innerText"
        assert browser.value(held) == f"held by pid {os.getpid()}"
        store.put("model", torch.ones(20_000))
        browser.until("holders.some((one) => one.replaced.includes('model') && !one.keys.includes('model'))")
        browser.value("openEntry('model')")
        browser.until(f"{held} === 'replaced versions held by pid {os.getpid()}'")
        assert old.sum() == 0


@pytest.mark.parametrize("width", [390, 1366])
def test_keys_that_are_lost_with_a_removed_host_are_named(
    scratch: str, browser: Browser, tmp_path: Path, width: int
) -> None:
    groups = [f"{number:03}-{'long' * 20}" for number in range(101)]
    with two_hosts(Path(scratch).parent, tmp_path) as (first, second, store, other):
        store.put("mine/policy", 1)
        other.put("theirs/policy", 1)
        browser.look(width, 800)
        with memstore.ui.serve(first.root) as page:
            browser.open(page.url)
            browser.until("document.querySelectorAll('#hosts tbody tr').length === 2")
            assert browser.value("document.getElementById('lost').hidden")
            other.put_many({f"{group}/k": 1 for group in groups[: 101 if width == 390 else 1]})
            second.process.kill()
            second.process.wait()
            cluster_of(first.root).remove(second.address)
            names = "[...document.querySelectorAll('#lost td.key')].map((one) => one.innerText)"
            browser.until("!document.getElementById('lost').hidden")
            found = browser.until(f"{names}.length === {100 if width == 390 else 2} && {names}")
            assert set(found) <= {"theirs", *groups}
            hosts = browser.value("[...document.querySelectorAll('#lost .mono')].map((one) => one.innerText)")
            assert all(host.endswith(second.address) for host in hosts)
            assert browser.value("document.getElementById('lost-limit').hidden") == (width == 1366)
            assert browser.value("document.documentElement.scrollWidth <= innerWidth")
            assert browser.value("(one => one.scrollWidth <= one.clientWidth)(document.getElementById('lost'))")


def test_the_keyboard_is_enough(scratch: str, browser: Browser) -> None:
    with memstore.open(scratch) as store, memstore.ui.serve(scratch) as page:
        store.put_many({f"key/{number}": number for number in range(5)})
        browser.open(page.url)
        browser.until("document.querySelectorAll('#key-rows tr').length === 5")
        browser.press("/", text="/")
        assert browser.value("document.activeElement.id") == "prefix"
        browser.type("key/3")
        browser.until("document.querySelectorAll('#key-rows tr').length === 1")
        browser.press("Tab")
        assert browser.value("document.activeElement.dataset.key") == "key/3"
        store.put("key/30", 1)  # a row that comes moves no focus
        browser.until("document.querySelectorAll('#key-rows tr').length === 2")
        assert browser.value("document.activeElement.dataset.key") == "key/3"
        browser.press("Enter")
        browser.until("document.getElementById('entry').open")
        browser.press("Escape")
        browser.until("!document.getElementById('entry').open")
        assert browser.value("document.activeElement.dataset.key") == "key/3"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1366, 1920])
def test_it_fits_the_window_and_can_be_read(scratch: str, browser: Browser, width: int, dark: bool) -> None:
    with memstore.open(scratch) as store, memstore.ui.serve(scratch) as page:
        store.put_many({"a/" + "very-long-name-without-a-break" * 9: 1, "b": torch.zeros(1000)})
        limiter = memstore.RateLimiter(1.0, 1, 1e6)
        spec = {"x": ((), torch.int64)}
        buffer = memstore.ReplayBuffer(store, "replay/buffer", spec, capacity=50_000, rate_limiter=limiter)
        buffer.extend({"x": torch.arange(50_000)})
        buffer.sample(10)
        browser.look(width, 800, dark=dark)
        browser.open(page.url)
        browser.until("document.querySelectorAll('#key-rows tr').length === 3")
        browser.until("document.querySelectorAll('#rows tbody tr').length === 1")
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        fits = (
            "[...document.querySelectorAll('section:not([hidden])')].filter((one) => one.scrollWidth > one.clientWidth)"
        )
        assert browser.value(f"{fits}.map((one) => one.id)") == []
        for place in ("body", "#key-rows button", "#tiles dt", ".n"):
            assert browser.value(CONTRAST.replace("PLACE", place)) >= 4.5, place


CONTRAST = """(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const element = document.querySelector("PLACE");
  let behind = element;
  while (numbers(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const colours = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
  const [one, two] = colours.map(numbers).map(light);
  return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
})()"""


def test_a_token_is_taken_out_of_the_address(scratch: str, browser: Browser, tmp_path: Path) -> None:
    with memstore.open(scratch) as store, memstore.ui.serve(scratch, token="a token of some length") as page:
        store.put("a", 1)
        browser.open(page.url)
        browser.until(f"!!{row('a')}")
        assert browser.value("location.search") == ""
        browser.picture(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 5000
