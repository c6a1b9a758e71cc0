"""The pages say what there is: every route is on the endpoints' page, and the site builds without a broken link."""

import re
import subprocess
import sys
from pathlib import Path

from fake_engine import FakeEngine

from verl_tinker.api.app import create_app
from verl_tinker.core.service import Service

ROOT = Path(__file__).resolve().parents[2]


def documented() -> set[tuple[str, str]]:
    """(method, path) of the page, where a path without another beginning is below /api/v1."""
    _, _, table = (ROOT / "docs" / "endpoints.md").read_text().partition("## The server")
    ours, _, openai = table.partition("## OpenAI's")
    found = set()
    for part, places in ((ours, ("/api/v1/",)), (openai, ("/v1/", "/oai/api/v1/"))):
        cells = [line.split("|")[1] for line in part.splitlines() if line.startswith("| ") and "`" in line.split("|")[1]]
        for cell in cells:
            spans, methods = re.findall(r"`([^`]+)`", cell), []
            for span in spans:
                word, _, path = span.partition(" ")
                methods.append(word)
                found |= {(m, path if path.startswith("/") else place + path) for m in methods for place in places if path}
                methods = [] if path else methods
    return found


def test_every_route_is_documented_and_no_other(tmp_path):
    app = create_app(Service(FakeEngine(), tmp_path))
    routes = {(method, re.sub(r":path}", "}", route.path)) for route in app.routes for method in route.methods - {"HEAD"}}
    assert documented() == routes


def test_the_site_builds(tmp_path):
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)], cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "endpoints" / "index.html").read_text()
    assert "retrieve_futures" in page and "https://fonts" not in page
