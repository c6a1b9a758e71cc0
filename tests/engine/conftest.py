"""A real engine on the tiny model, shared by the tests of this folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from live_engine import Live

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))


@pytest.fixture(scope="session")
def live(tmp_path_factory):
    server = Live([], tmp_path_factory.mktemp("live"))
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def run_name(request, live):
    """The name of a run that is dropped after the test."""
    name = request.node.name
    yield name
    live.do(live.engine.drop_model(name))


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.engine)


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
