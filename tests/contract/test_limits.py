"""What a connection may cost before its request is complete."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import pytest

from verl_tinker.api import body, limits

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def connection(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        yield connection


def answer(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.mark.parametrize("line", [b"X-Big: " + b"a" * (1 << 20), b"X: a\r\n" * 200_000], ids=["one", "many"])
def test_a_head_without_end_is_refused_before_it_fills_the_memory(connection, line):
    connection.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n")
    sent = 0
    try:
        for _ in range(64):
            sent += connection.send(line)
    except OSError:
        pass
    assert sent < 16 << 20
    said = answer(connection)
    assert not said or said.startswith(b"HTTP/1.1 431")


def test_a_head_that_is_a_little_too_long_is_told_so(connection):
    connection.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\nX-Big: " + b"a" * (limits.HEAD_BYTES + 1))
    said = answer(connection)
    assert said.startswith(b"HTTP/1.1 431") and b'{"detail": "the head of the request' in said


def test_what_is_not_http_is_told_so(connection):
    connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    head, _, said = answer(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"content-type: application/json" in head
    assert "send HTTP/1.1" in json.loads(said)["detail"]


def test_a_head_that_never_ends_is_given_up_and_a_late_second_one_too(server, monkeypatch):
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.3)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as silent:
        assert answer(silent) == b""
    with socket.create_connection((host, int(port)), timeout=20) as slow:
        slow.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        said = b""
        while not said.endswith(b'"ready"}'):
            said += slow.recv(65536)
        slow.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nHo")
        late = answer(slow)
        assert said.startswith(b"HTTP/1.1 200") and late.startswith(b"HTTP/1.1 408")
        assert "send it again" in json.loads(late.partition(b"\r\n\r\n")[2])["detail"]


def test_a_long_poll_outlives_the_time_of_a_head(server, raw, monkeypatch):
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.2)
    server.engine.hold.add("sample")
    request = raw.sample(raw.base_sampler())
    threading.Timer(1.0, server.engine.hold.clear).start()
    assert len(raw.binary(request).sequences) == 1


def test_a_body_that_does_not_come_is_given_up(server, connection, monkeypatch):
    monkeypatch.setattr(body, "BODY_SECONDS", 0.3)
    head = b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-API-Key: tml-x\r\n"
    connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
    assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    assert httpx.get(f"{server.url}/api/v1/healthz").status_code == 200
