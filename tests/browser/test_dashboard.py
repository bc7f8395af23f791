"""The page in a real browser: live, under its strict CSP, unharmed by hostile text, usable without a mouse."""

import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE_JS = os.environ.get("TSCALE_AXE_JS", "")
EXAMPLE = json.loads((Path(__file__).parents[1] / "helpers" / "status_example.json").read_text(encoding="utf-8"))
WAIT_MS = 30_000

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)"),
]

expect = playwright_api.expect
expect.set_options(timeout=WAIT_MS)


class Swarm:
    """Status files that a test writes, and the dashboard process that shows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None
        self.port = 0

    def write(self, node: str = "ahab", age_s: float = 0.0, **changes: Any) -> None:
        """Write the example as `node`'s status, `age_s` old; `round__number` is a field of a field."""
        plain = copy.deepcopy(EXAMPLE)
        plain["updated_unix_s"] = time.time() - age_s
        plain["round"]["ends_unix_s"] = time.time() + 3000
        plain["round"]["length_s"] = 6000.0
        for peer in plain["peers"]:
            peer["this_node"] = peer["name"] == node
        for name, value in changes.items():
            *parents, last = name.split("__")
            target = plain
            for parent in parents:
                target = target[parent]
            target[last] = value
        self.write_bytes(json.dumps(plain).encode(), node)

    def write_bytes(self, data: bytes, node: str = "ahab") -> None:
        path = self.folder / node / "status.json"
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".part").write_bytes(data)
        path.with_suffix(".part").replace(path)

    def start(self) -> str:
        """Start the dashboard (on the same port as before) and give its address."""
        command = [sys.executable, "-m", "tscale.dashboard.cli", "--status", str(self.folder)]
        self.process = subprocess.Popen([*command, "--port", str(self.port)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", self.process.stdout.readline())
        assert found is not None
        self.port = int(found[1])
        return found[0]

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path)
    yield swarm
    swarm.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test on any console error, uncaught exception or dialog."""
    context = browser.new_context(viewport={"width": 1240, "height": 900})
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    yield page
    context.close()
    # a server that is away or busy is an error in the browser's console, not one of the page
    assert [text for text in problems if "Failed to load resource" not in text and "ERR_" not in text] == []


def is_live(page: Any) -> None:
    """The page hears from the server; what it says of a node depends on how old the status is by now."""
    expect(page.locator("#live")).to_have_attribute("data-connection", "live")


def shows_fresh(swarm: Swarm, page: Any) -> None:
    """A status is fresh for ten seconds only, which a busy machine may need to show it: write again until seen."""
    for _ in range(8):
        swarm.write()
        with contextlib.suppress(AssertionError):
            expect(page.locator("#activity")).to_have_text("training", timeout=5000)
            expect(page.locator("#problem")).to_be_hidden(timeout=1000)
            expect(page.locator("#live-text")).to_have_text("live", timeout=1000)
            expect(page.locator("#peers tr").first).to_contain_text("alive", timeout=1000)
            return
    pytest.fail("a fresh status was never shown")


def test_the_run_is_shown_and_follows_the_status_file(swarm: Swarm, page: Any) -> None:
    swarm.write()
    page.goto(swarm.start())
    is_live(page)
    expect(page.locator("h1")).to_have_text("whales")
    shows_fresh(swarm, page)
    expect(page.locator("#round-number")).to_have_text("4259")
    expect(page.locator("#tokens")).to_have_text("4.36M")
    expect(page.locator("#bits")).to_have_text("0.551")
    expect(page.locator("#peers tr")).to_have_count(6)
    expect(page.locator("#peers tr").first).to_contain_text("ahab")
    expect(page.locator("#peers tr").last).to_contain_text("gone")
    expect(page.locator("#chart-words")).to_contain_text("Held-out loss fell from 5.546 to")
    expect(page.locator("#chart canvas")).to_be_visible()
    swarm.write(round__number=4260, peers=EXAMPLE["peers"][:2], training__history=EXAMPLE["training"]["history"][:2])
    expect(page.locator("#round-number")).to_have_text("4260")
    expect(page.locator("#peers tr")).to_have_count(2)
    expect(page.locator("#history tr")).to_have_count(2)
    assert page.title() == "whales · tscale"


def test_the_curve_is_drawn_in_both_colours(swarm: Swarm, page: Any) -> None:
    swarm.write()
    page.goto(swarm.start())
    expect(page.locator("#read-heldout")).not_to_be_empty()
    expect(page.locator("#chart canvas")).to_be_visible()
    count_pixels = """canvas => {
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      let heldout = 0, train = 0;
      for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] < 200) continue;
        if (data[i] < 110 && data[i + 2] > 180) heldout++;
        if (data[i] > 160 && data[i + 2] < 90) train++;
      }
      return [heldout, train];
    }"""
    heldout, train = page.locator("#chart canvas").evaluate(count_pixels)
    assert heldout > 500
    assert train > 100


def test_hostile_text_stays_text(swarm: Swarm, page: Any) -> None:
    name = "<img src=x onerror=alert(1)>"
    peers = copy.deepcopy(EXAMPLE["peers"])
    peers[1]["name"] = name
    peers[2]["name"] = "W" * 32
    peers[3]["name"] = "\u05d0\u05d1\u05d2 abc"
    bad = "<script>alert(1)</script>\u202e reversed " + "x" * 400
    swarm.write(peers=peers, swarm_name=bad, reason=bad, warnings=[bad, "</li><b>bold"], activity="paused")
    page.goto(swarm.start())
    is_live(page)
    expect(page.locator("#peers tr").nth(1)).to_contain_text(name)
    expect(page.locator("h1")).to_contain_text("<script>alert(1)</script> reversed xxx")
    expect(page.locator("#warnings li").nth(1)).to_have_text("</li><b>bold")
    assert "\u202e" not in page.locator("body").inner_text()
    assert page.locator("main img, main b:not([id]), body script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1240


def test_no_address_of_anyone_is_on_the_page(swarm: Swarm, page: Any) -> None:
    swarm.write(warnings=["can't reach /ip4/192.0.2.99/tcp/4001"], reason="dialling 198.51.100.7", activity="joining")
    page.goto(swarm.start())
    expect(page.locator("#warnings li")).to_have_text("can't reach [address]")
    text = page.locator("body").inner_text()
    for secret in ("192.0.2.", "198.51.100.", "/home/ahab", "4242"):
        assert secret not in text


def test_a_missing_then_broken_then_old_then_good_status(swarm: Swarm, page: Any) -> None:
    page.goto(swarm.start())
    expect(page.locator("h1")).to_have_text("Waiting for a node")
    swarm.write_bytes(b'{"schema": 2, "upda')
    expect(page.locator("#problem")).to_contain_text("The status file can't be used: the status is not JSON")
    swarm.write(age_s=12.0)
    expect(page.locator("#problem")).to_have_text(
        re.compile(r"^No fresh status for \d+ s\. The node may be gone; these are its last figures\.$")
    )
    expect(page.locator("#activity")).to_have_text("not running")
    expect(page.locator("#live-text")).to_have_text("not live")
    expect(page.locator("#lead")).to_contain_text("This node does not report:")
    expect(page.locator("h1")).to_have_text("whales")
    shows_fresh(swarm, page)
    swarm.write(activity="stopped")
    expect(page.locator("#problem")).to_contain_text("This node stopped")
    expect(page.locator("#live-text")).to_have_text("not live")
    expect(page.locator("#peers tr").first).to_contain_text("stopped")
    expect(page.locator("#peers")).not_to_contain_text(re.compile(r"(?<!was )alive"))
    expect(page.locator("#peers-sub")).to_contain_text("at its last report")


def test_the_page_comes_back_after_a_restart_of_the_server(swarm: Swarm, page: Any) -> None:
    swarm.write()
    page.goto(swarm.start())
    is_live(page)
    swarm.stop()
    expect(page.locator("#live-text")).to_have_text("reconnecting")
    swarm.write(round__number=4300)
    swarm.start()
    is_live(page)
    expect(page.locator("#round-number")).to_have_text("4300")


def test_several_nodes_can_be_looked_at(swarm: Swarm, page: Any) -> None:
    swarm.write("ahab")
    swarm.write("ishmael", node__peer_id=EXAMPLE["peers"][1]["peer_id"], training__history=[], training__tokens_local=7)
    page.goto(swarm.start())
    expect(page.locator("#nodes a")).to_have_count(2)
    expect(page.locator("#nodes a[aria-current]")).to_have_text("ahab")
    page.get_by_role("link", name="ishmael").click()
    expect(page.locator("#nodes a[aria-current]")).to_have_text("ishmael")
    expect(page.locator("#tokens-sub")).to_have_text("7 by this node")
    expect(page.locator("#chart-words")).to_contain_text("there is no curve")
    page.get_by_role("link", name="ahab").click()
    expect(page.locator("#chart-words")).to_contain_text("Held-out loss fell")


def test_the_page_works_by_keyboard_and_has_nothing_to_press(swarm: Swarm, page: Any) -> None:
    swarm.write()
    page.goto(swarm.start())
    is_live(page)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the run")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.locator("summary")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Loss of the last rounds")).to_be_visible()
    assert page.locator("button, input, select, textarea, form").count() == 0
    expect(page.get_by_role("table", name="Peers").get_by_role("columnheader")).to_have_count(7)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1240, 390, 320])
def test_it_fits_every_screen_and_passes_axe(swarm: Swarm, browser: Any, scheme: str, width: int) -> None:
    swarm.write(warnings=["The disk is nearly full: 1.2 GB left."])
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=bool(AXE_JS)
    )
    try:
        page = context.new_page()
        page.goto(swarm.start())
        expect(page.locator("#peers tr")).to_have_count(6)
        expect(page.locator("#chart canvas")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # on a phone the cells are laid out as a card, and must still be a table to a screen reader
        expect(page.get_by_role("table", name="Peers").get_by_role("row")).to_have_count(7)
        if AXE_JS:
            page.evaluate(Path(AXE_JS).read_text(encoding="utf-8"))
            found = page.evaluate("axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes[0].html))")
            assert found == []
    finally:
        context.close()
