"""A headless Chromium, servers that it looks at, and screenshots that are kept."""

import pytest
from browser import chromium as headless
from browser import pictures
from fake_engine import BASE
from raw import Raw
from server import servers_in
from talking import TalkingEngine

@pytest.fixture(scope="session")
def screenshots():
    return pictures()


# Not for the session: Playwright refuses to start a second time while it runs, and tests of recipes start it too.
@pytest.fixture(scope="module")
def chromium():
    with headless() as browser:
        yield browser


@pytest.fixture
def start(tmp_path):
    with servers_in(tmp_path, engine=TalkingEngine) as begin:
        yield begin


@pytest.fixture
def server(start):
    return start()


@pytest.fixture
def raw(server):
    with server.http() as http:
        raw = Raw(http, BASE)
        raw.create()
        yield raw


@pytest.fixture
def visit(chromium):
    """Open the dashboard of a URL; what the page logs as an error fails the test."""
    contexts, problems = [], []

    def make(url, wait="ready", **options):
        contexts.append(chromium.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(url)
        if wait:
            page.get_by_role("status").get_by_text(wait).wait_for()
        return page

    yield make
    for context in contexts:
        context.close()
    assert problems == []
