"""A headless Chromium, and the folder where pictures of pages are kept.

Owns the browser. Does not judge pages: tests do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

# A machine that runs many tests at once draws slowly.
expect.set_options(timeout=60_000)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def pictures() -> Path:
    """A folder of the checkout that git ignores, unless SCREENSHOTS names another."""
    folder = Path(os.environ.get("SCREENSHOTS") or Path(__file__).parents[2] / "runs" / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def chromium() -> Iterator[Browser]:
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program, "no Chromium is installed; run tools/install_browser.sh"
    with sync_playwright() as playwright:
        # Root, as which CI runs, has no sandbox.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
