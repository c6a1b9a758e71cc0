"""What waits: samples beyond the bound, polls without end, clients beside a greedy one."""

import asyncio
import os
import resource

import httpx
import psutil
import pytest
from raw import Raw
from server import TestServer, wait_until

from verl_tinker.core.access import Keys

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def start_server(tmp_path):
    servers = []

    def start(**options):
        servers.append(TestServer(tmp_path / f"checkpoints-{len(servers)}", **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def body(sampler, seq, prompt=(1, 2)):
    words = {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}
    return {"sampling_session_id": sampler, "seq_id": seq, "prompt": words, "sampling_params": {"max_tokens": 1}}


def test_beyond_the_bound_429_comes_before_anything_is_registered(start_server):
    server = start_server(max_waiting_samples=3)
    server.engine.hold.add("sample")
    with server.http() as http:
        raw = Raw(http)
        sampler = raw.base_sampler()
        taken = [raw.sample(sampler, seq=n) for n in range(3)]
        known = len(server.service.futures)
        for _ in range(2):
            refused = http.post("/asample", json=body(sampler, 3))
            assert refused.status_code == 429 and 0 < int(refused.headers["Retry-After"]) <= 60
            assert "max_waiting_samples" in refused.json()["detail"]
        # A repeat of one that was taken is no new sample.
        assert raw.sample(sampler, seq=1) == taken[1]
        assert len(server.service.futures) == known
        server.engine.hold.clear()
        assert [raw.binary(request).sequences[0].tokens for request in taken] == [[100]] * 3
        wait_until(lambda: not server.service.futures.pending)
        assert raw.binary(raw.sample(sampler, seq=3)).sequences[0].tokens == [100]


POLLS = 2000


async def poll(url: str, request_id: str, connected: list) -> bytes:
    """One connection of its own, as plain as can be, so that this side is not what is measured."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = b'{"request_id": "%s", "allow_metadata_only": false}' % request_id.encode()
    writer.write(b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                 b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
    await writer.drain()
    connected.append(request_id)
    answer = await reader.read()
    writer.close()
    return answer


def test_thousands_of_polls_wait_without_threads(start_server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    server = start_server(poll_seconds=100.0)
    server.engine.hold.add("sample")
    with server.http() as http:
        raw = Raw(http)
        sampler = raw.base_sampler()
        requests = [raw.sample(sampler, seq=n) for n in range(POLLS)]
    threads = psutil.Process(os.getpid()).num_threads

    async def all_of_them():
        connected = []
        before = threads()
        polls = []
        for first in range(0, POLLS, 100):
            polls += [asyncio.create_task(poll(server.url, r, connected)) for r in requests[first:first + 100]]
            while len(connected) < first + 100:
                await asyncio.sleep(0.01)
        while not all(server.service.futures.find(request)._event._waiters for request in requests):
            await asyncio.sleep(0.05)
        # One of another test may end meanwhile.
        assert threads() <= before
        server.engine.hold.clear()
        return await asyncio.gather(*polls)

    answers = asyncio.run(all_of_them())
    assert len(answers) == POLLS
    assert all(answer.startswith(b"HTTP/1.1 200") and b'"tokens":[100]' in answer for answer in answers)


@pytest.mark.parametrize("queue", [20, 400])
def test_a_greedy_client_does_not_hold_up_a_lazy_one(queue, start_server, tmp_path):
    """Counted in turns: however long the greedy queue, each key has every second turn, and its clients share it."""
    keys = Keys(tmp_path / "keys.json")
    greedy_key, lazy_key = keys.add("greedy"), keys.add("lazy")
    server = start_server(max_concurrent_samples=1, keys=keys)
    order = []
    answer = server.engine._sampled
    server.engine._sampled = lambda version, request: order.append(int(request.prompt[0])) or answer(version, request)

    def client(key):
        http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": key}, timeout=30)
        raw = Raw(http)
        return raw, raw.base_sampler()

    greedy, lazy = client(greedy_key), [client(lazy_key) for _ in range(2)]
    server.engine.hold.add("sample")
    requests = [(greedy[0], greedy[0].sample(greedy[1], seq=n, prompt=(9, 9))) for n in range(queue)]
    for number, (raw, sampler) in enumerate(lazy, start=1):
        requests += [(raw, raw.sample(sampler, seq=n, prompt=(number, 9))) for n in range(3)]
    server.engine.hold.clear()
    for raw, request in requests:
        assert raw.binary(request).sequences[0].tokens == [100]
    for raw in (greedy[0], *(raw for raw, _ in lazy)):
        raw.http.close()
    # The first was running already when the others came.
    assert order[:13] == [9, 9, 1, 9, 2, 9, 1, 9, 2, 9, 1, 9, 2]
    assert len(order) == queue + 6
