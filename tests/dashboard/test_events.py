"""The stream behind the dashboard, without a browser."""

import asyncio
import json

import httpx
import pytest
from server import wait_until

pytestmark = pytest.mark.timeout(120)


def events(answer):
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def stream(server):
    return httpx.stream("GET", f"{server.url}/api/v1/overview/events", verify=False, timeout=30)


def test_each_step_is_told_once_and_all_to_a_newcomer(server, raw):
    def step(seq):
        raw.result(raw.forward_backward(seq))
        raw.result(raw.optim_step(seq + 1))

    def told(found):
        return [point["step"] for point in next(found)["points"].get(raw.model, [])]

    step(1)
    step(3)
    with stream(server) as answer:
        found = events(answer)
        assert told(found) == [1, 2]
        step(5)
        steps = []
        while not steps:
            steps = told(found)
        assert steps == [3] and told(found) == []
    with stream(server) as answer:
        assert told(events(answer)) == [1, 2, 3]
    points = raw.http.get("/overview/points", params={"run_id": raw.model, "after": 1}).json()["points"]
    assert [point["step"] for point in points] == [2, 3] and points[0]["values"]["grad_norm"] == 4.0
    assert raw.http.get("/overview/points", params={"run_id": "none:train:0"}).status_code == 404


def test_a_viewer_that_leaves_costs_nothing_more(server):
    httpx.get(f"{server.url}/api/v1/healthz", verify=False)
    before = len(asyncio.all_tasks(server.loop))
    with stream(server) as answer:
        next(events(answer))
        wait_until(lambda: len(asyncio.all_tasks(server.loop)) > before)
    wait_until(lambda: len(asyncio.all_tasks(server.loop)) <= before)


def test_a_stopping_server_ends_the_stream(server):
    with stream(server) as answer:
        found = events(answer)
        next(found)
        server.stop()
        assert [view["server"]["status"] for view in found][-1:] in (["failed"], [])


def test_numbers_that_are_none_are_null(server, raw):
    server.engine.says = lambda prompt, weight: "x"
    raw.result(raw.forward_backward(1))
    raw.result(raw.optim_step(2, learning_rate=1e30))
    raw.result(raw.forward_backward(3))
    raw.result(raw.optim_step(4))
    text = raw.http.get("/overview").text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
