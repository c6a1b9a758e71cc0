"""The pictures of the README, made by a demo that runs meanwhile: the dashboard in mid-training, and the curve at the end.

Owns docs/images. Draws nothing itself.

    python bench/pictures.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from workload import ROOT

from browser import chromium

IMAGES = ROOT / "docs" / "images"
SHOWN_AT = 8


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    demo = subprocess.Popen([sys.executable, ROOT / "client_examples" / "demo.py"], stdout=subprocess.PIPE, text=True)
    url, taken = "", False
    for line in demo.stdout:
        print(line, end="", flush=True)
        url = (re.findall(r"ready at (\S+)", line) or [url])[0]
        if not taken and f"step {SHOWN_AT} of" in line:
            dashboard(url)
            taken = True
    if demo.wait() or not taken:
        sys.exit("the demo did not come to its end")
    shutil.copy(ROOT / "runs" / "demo" / "shorter.png", IMAGES / "shorter.png")


def dashboard(url: str) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.goto(url)
        # Its curves come with the first events.
        page.wait_for_timeout(5000)
        page.screenshot(path=IMAGES / "dashboard.png")


if __name__ == "__main__":
    main()
