"""One Docker engine, one $TASK folder and one server of the CPU preset for all tests here."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def engine():
    """A Docker engine, installed and started where none answers. One that cannot be started is a failure."""
    if os.environ.get("HARBOR_LAYER3") == "off":
        pytest.skip("HARBOR_LAYER3=off")
    from chain import HARBOR, call, containers

    place = Path(tempfile.mkdtemp(prefix="verl-tinker-docker-"))
    try:
        call(HARBOR / "docker_engine.sh", "start", place)
        before = containers()
        yield
        assert containers() == before, "containers were left behind"
    finally:
        call(HARBOR / "docker_engine.sh", "stop", place)
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="session")
def chain(engine):
    from chain import Chain

    chain = Chain(Path(tempfile.mkdtemp(prefix="verl-tinker-task-")))
    try:
        chain.prepare()
        chain.serve()
        yield chain
    finally:
        chain.stop()


@pytest.fixture(scope="session")
def server(chain, tmp_path_factory):
    """The address of a server of the folder's own preset, which several runs share."""
    from real_server import start_server, stop_server

    process, url = start_server(tmp_path_factory.mktemp("server"), preset=chain.root / "config" / "engine.yaml")
    try:
        yield url
    finally:
        stop_server(process)


@pytest.fixture(autouse=True)
def nothing_left(chain):
    """After each test no container lives, and no note of an open sandbox."""
    from chain import containers

    before = containers()
    yield
    assert containers() == before and not list(chain.root.glob("state/sandboxes/*"))
