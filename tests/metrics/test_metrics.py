"""/metrics, read by Prometheus' own parser and compared with what was sent."""

import os
import threading
from dataclasses import replace

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from server import wait_until

from verl_tinker.core.access import Keys
from verl_tinker.core.errors import EngineError

pytestmark = pytest.mark.timeout(180)


class Scrape:
    """One scrape: values by name and labels, without Prometheus' prefix of ours."""

    def __init__(self, server, headers=(), parse=parse_text):
        answer = httpx.get(f"{server.url}/metrics", headers=dict(headers), verify=False)
        assert answer.status_code == 200, answer.text
        self.content_type = answer.headers["content-type"]
        self.families = list(parse(answer.text))
        self.values = {(s.name.removeprefix("verl_tinker_"), frozenset(s.labels.items())): s.value
                       for family in self.families for s in family.samples}

    def __call__(self, name, **labels):
        return self.values.get((name, frozenset(labels.items())), 0.0)


def test_the_numbers_are_those_of_what_was_sent(server, raw):
    before = Scrape(server)
    for seq in (1, 3):
        raw.result(raw.forward_backward(seq))
        raw.result(raw.optim_step(seq + 1))
    sampler = raw.base_sampler()
    for seq in range(3):
        raw.binary(raw.sample(sampler, seq))
    after = Scrape(server)

    def grew(name, **labels):
        return after(name, **labels) - before(name, **labels)

    for kind, times in (("forward_backward", 2), ("optim_step", 2), ("sample", 3)):
        assert grew("operation_run_seconds_count", kind=kind, outcome="ok") == times
        assert grew("operation_wait_seconds_count", kind=kind) == times
        assert grew("engine_call_seconds_count", call=kind, outcome="ok") == times
        assert grew("operation_run_seconds_sum", kind=kind, outcome="ok") > 0
    assert before("operation_run_seconds_count", kind="create_model", outcome="ok") == 1
    assert grew("trained_tokens_total", call="forward_backward") == 2 * 4
    assert grew("http_request_seconds_count", method="POST", route="/api/v1/asample", status="200") == 3
    assert after("operations_waiting", kind="sample") == after("operations_running", kind="sample") == 0
    assert after("futures", state="pending") == 0
    assert after("training_runs", place="memory") == 1 and after("sessions") == 1
    assert after("state", state="ok") == 1 and after("state", state="starting") == 0
    assert after("process_resident_memory_bytes") == pytest.approx(_resident(), rel=0.2)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_sampled_and_prompt_tokens_are_counted(server, raw):
    sampler = raw.base_sampler()
    before = Scrape(server)
    raw.binary(raw.sample(sampler, 1, prompt=(1, 2, 3, 4), num_samples=3, params={"max_tokens": 5}))
    after = Scrape(server)
    assert after("sampled_tokens_total") - before("sampled_tokens_total") == 15
    assert after("prompt_tokens_total", cached="no") - before("prompt_tokens_total", cached="no") == 4


def test_versions_and_transfers_are_seen(server, raw):
    raw.result(raw.forward_backward(1))
    raw.result(raw.optim_step(2))
    raw.result(raw.snapshot(3, 9))
    scrape = Scrape(server)
    assert scrape("weight_versions") == 1
    for call in ("export_sampler", "load_version"):
        assert scrape("engine_call_seconds_count", call=call, outcome="ok") == 1


def test_depth_shows_what_waits_and_what_runs(server, raw):
    server.engine.hold.add("forward_backward")
    raw.forward_backward(1)
    raw.optim_step(2)
    raw.optim_step(3)
    wait_until(lambda: Scrape(server)("operations_running", kind="forward_backward") == 1)
    held = Scrape(server)
    assert held("operations_waiting", kind="optim_step") == 2 and held("futures", state="pending") == 3
    server.engine.hold.clear()
    wait_until(lambda: Scrape(server)("futures", state="pending") == 0)
    ended = Scrape(server)
    assert ended("operations_waiting", kind="optim_step") == 0
    assert ended("operation_run_seconds_count", kind="optim_step", outcome="user_error") == 1
    assert ended("operation_wait_seconds_sum", kind="optim_step") > 0


def test_failures_are_counted_by_whose_they_are(server, raw):
    server.engine.fail["optim_step"] = EngineError("worker 0 died")
    raw.result(raw.forward_backward(1))
    raw.post("retrieve_future", request_id=raw.optim_step(2))
    scrape = Scrape(server)
    assert scrape("operation_run_seconds_count", kind="optim_step", outcome="server_error") == 1
    assert scrape("engine_call_seconds_count", call="optim_step", outcome="server_error") == 1
    assert scrape("weight_mismatches_total") == 0
    drawn = server.engine._sampled
    server.engine._sampled = lambda version, request: replace(drawn(version, request), version=77)
    raw.post("retrieve_future", request_id=raw.sample(raw.base_sampler()))
    assert Scrape(server)("weight_mismatches_total") == 1


def test_every_scrape_is_whole_while_traffic_runs(server, raw):
    stop, failures = threading.Event(), []

    def scrape():
        try:
            while not stop.is_set():
                names = {family.name for family in Scrape(server).families}
                assert "verl_tinker_operation_run_seconds" in names
        except BaseException as error:
            failures.append(error)

    scrapers = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in scrapers:
        thread.start()
    sampler = raw.base_sampler()
    for request_id in [raw.sample(sampler, seq) for seq in range(1, 60)]:
        raw.binary(request_id)
    stop.set()
    for thread in scrapers:
        thread.join(30)
    assert not failures
    assert Scrape(server)("operation_run_seconds_count", kind="sample", outcome="ok") == 59


def test_names_keep_prometheus_conventions_and_label_nobody(server, raw):
    raw.result(raw.forward_backward(1))
    scrape = Scrape(server)
    for family in scrape.families:
        assert family.documentation, family.name
        if family.type == "counter":
            assert all(s.name.endswith(("_total", "_created")) for s in family.samples), family.name
        for sample in family.samples:
            assert not {"model_id", "session", "owner", "path"} & set(sample.labels)
            assert raw.session not in str(sample.labels)
    openmetrics = Scrape(server, {"Accept": "application/openmetrics-text; version=1.0.0"}, parse_openmetrics)
    assert "openmetrics" in openmetrics.content_type
    assert openmetrics("operation_run_seconds_count", kind="forward_backward", outcome="ok") == 1


def test_two_servers_in_one_process_count_apart(start):
    from raw import Raw

    first, second = start(), start()
    with first.http() as http:
        Raw(http).create()
    assert Scrape(first)("operation_run_seconds_count", kind="create_model", outcome="ok") == 1
    assert Scrape(second)("operation_run_seconds_count", kind="create_model", outcome="ok") == 0


def test_metrics_answer_while_the_server_starts(start):
    scrape = Scrape(start(ready=False))
    assert scrape("state", state="starting") == 1 and scrape("state", state="ok") == 0


def test_a_server_with_keys_asks_for_one(start, tmp_path):
    keys = Keys(tmp_path / "keys.json")
    key = keys.add("prometheus")
    server = start(keys=keys)
    assert httpx.get(f"{server.url}/metrics", verify=False).status_code == 401
    # As Prometheus sends what stands under `authorization` in its configuration.
    assert Scrape(server, {"Authorization": f"Bearer {key}"})("state", state="ok") == 1


def test_processes_are_counted_by_title_and_show_no_arguments(tmp_path):
    import subprocess
    import sys

    from verl_tinker.api.machine import worker_memory

    sleep = "import time; print(1, flush=True); time.sleep(60)"
    ray = subprocess.Popen(["bash", "-c", f"exec -a 'ray::TinkerWorker.work' {sys.executable} -c '{sleep}'"],
                           stdout=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", sleep, "--secret=tml-1"], stdout=subprocess.PIPE)
    try:
        ray.stdout.readline(), other.stdout.readline()
        found = worker_memory()
        assert found["ray::TinkerWorker"] > 1 << 20 and found["other"] > 1 << 20
        assert "tml-1" not in str(found)
    finally:
        for process in (ray, other):
            process.kill()
            process.wait()
            process.stdout.close()
