"""Errors that nobody caught: an answer in words, a connection that goes on, and nothing of the server's disk in it."""

from __future__ import annotations

import http.client
import logging

import pytest
from fastapi import BackgroundTasks
from fastapi.responses import StreamingResponse

pytestmark = pytest.mark.timeout(60)


def broken(app):
    """Routes with faults, beside the server's own."""

    @app.post("/crash")
    async def crash():
        raise ValueError("a bug at '/srv/all models/base/config.json' and /srv/base/tokenizer.json")

    @app.post("/late")
    async def late(tasks: BackgroundTasks):
        async def fail():
            raise ValueError("after the answer")

        tasks.add_task(fail)
        return {}

    @app.post("/half")
    async def half():
        async def parts():
            yield b"one"
            raise ValueError("in the middle")

        return StreamingResponse(parts())

    return app


@pytest.fixture
def kept(start_server):
    """One connection to a server with such routes, which is never opened again by itself."""
    connection = http.client.HTTPConnection(start_server(wrap=broken).url.removeprefix("http://"), timeout=20)
    connection.connect()
    connection.auto_open = False
    yield connection
    connection.close()


def is_alive(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/api/v1/healthz")
    answer = connection.getresponse()
    return answer.status == 200 and answer.read() == b'{"status":"ok","phase":"ready"}'


def test_a_crash_is_answered_and_the_connection_goes_on(kept, caplog):
    for _ in range(2):
        kept.request("POST", "/crash", body=b"x" * (1 << 20))
        answer = kept.getresponse()
        assert (answer.status, answer.headers["content-type"]) == (500, "application/json")
        assert answer.read() == (
            b'{"detail":"POST /crash failed inside the server, whose log has more: ValueError: a bug at '
            b"'config.json' and tokenizer.json\",\"category\":\"server\"}"
        )
        assert is_alive(kept)
    assert "/srv/base/tokenizer.json" in caplog.text and "Traceback" in caplog.text


def test_a_crash_after_the_answer_is_logged_and_the_connection_goes_on(kept, caplog):
    kept.request("POST", "/late")
    assert kept.getresponse().read() == b"{}"
    assert is_alive(kept) and is_alive(kept)
    assert "after the answer" in caplog.text


def test_a_body_that_breaks_off_ends_the_connection(kept, caplog):
    caplog.set_level(logging.CRITICAL, "uvicorn.error")
    kept.request("POST", "/half")
    with pytest.raises(http.client.IncompleteRead):
        kept.getresponse().read()
