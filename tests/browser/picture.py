"""Takes the picture of the README: `python tests/browser/picture.py <address of a dashboard> docs/dashboard.png`."""

import shutil
import sys

from playwright.sync_api import expect, sync_playwright


def take_picture(url: str, path: str) -> None:
    """Write the page at `url` from its top to the end of the table of peers, in the light scheme, 1200 pixels wide."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 1600}, color_scheme="light")
        page.goto(url)
        expect(page.locator("#live-text")).to_have_text("live")
        expect(page.locator("#chart canvas")).to_be_visible()
        card = page.locator("section.card", has=page.locator("#peers")).bounding_box()
        page.screenshot(path=path, clip={"x": 0, "y": 0, "width": 1200, "height": card["y"] + card["height"] + 24})
        browser.close()


if __name__ == "__main__":
    take_picture(*sys.argv[1:])
