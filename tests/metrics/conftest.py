"""Servers with the fake engine, and a raw client with a live run."""

import pytest
from raw import Raw
from server import servers_in


@pytest.fixture
def start(tmp_path):
    with servers_in(tmp_path) as begin:
        yield begin


@pytest.fixture
def server(start):
    return start()


@pytest.fixture
def raw(server):
    with server.http() as http:
        raw = Raw(http)
        raw.create()
        yield raw
