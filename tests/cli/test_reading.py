"""`status`, `runs` and `checkpoints` against a running server."""

import pytest
from fake_engine import BASE
from server import wait_until

from verl_tinker.core.access import Keys
from verl_tinker.core.errors import EngineError

pytestmark = pytest.mark.timeout(180)


def test_status_says_what_runs_what_waits_and_what_failed(server, command, raw):
    server.engine.fail["optim_step"] = EngineError("worker 0 died [red]")
    raw.result(raw.forward_backward(5))
    raw.result(raw.optim_step(6))
    server.engine.hold.add("forward_backward")
    raw.forward_backward(7)
    raw.forward_backward(9, loss_fn="cross_entropy")
    raw.optim_step(8)
    wait_until(lambda: command.json("status")["load"]["running"])
    seen = command.json("status")
    assert seen["server"]["status"] == "ok" and [m["name"] for m in seen["server"]["models"]] == [
        BASE, "fake/teacher", "fake/mute"]
    (run,) = seen["runs"]
    assert (run["run_id"], run["running"], run["steps"], run["weights_version"]) == (raw.model, "forward_backward", 1, 2)
    assert run["waiting"] == 2 and run["last"]["grad_norm"] == pytest.approx(4.0)
    # Four tokens of the target 10, whose log-probability is -1 - 10 / 1000.
    assert run["last"]["loss"] == pytest.approx(1.01)
    assert "worker 0 died" in seen["errors"][0]["text"]
    assert [v["of"] for v in seen["versions"]] == [raw.weights] and seen["versions"][0]["named"]
    text = command("status").stdout
    assert "ready" in text and raw.model in text and "1 forward_backward" in text and "worker 0 died [red]" in text
    server.engine.hold.clear()


def test_status_tells_by_its_exit_what_the_server_is(start, command_for):
    starting = start(ready=False)
    command = command_for(starting.url)
    assert "starting: loading fake weights" in command("status", status=3).stdout
    assert command.json("status", status=3)["server"]["phase"] == "loading fake weights"
    failed = start()
    failed.loop.call_soon_threadsafe(failed.service.failed, "no memory")
    assert "failed: no memory" in command_for(failed.url)("status", status=4).stdout


def test_nobody_answers_is_one_line_that_says_what_to_do(command_for):
    result = command_for("http://127.0.0.1:9")("status", status=1)
    assert "verl-tinker start" in result.stderr and "--base-url" in result.stderr and "Traceback" not in result.output


def test_runs_and_checkpoints_are_listed(command, raw):
    (run,) = command.json("runs")
    assert run["training_run_id"] == raw.model and run["last_checkpoint"]["tinker_path"] == raw.state
    assert raw.model in command("runs").stdout
    assert [c["tinker_path"] for c in command.json("checkpoints", "ls")] == [raw.weights, raw.state]
    assert [c["tinker_path"] for c in command.json("checkpoints", "ls", raw.model)] == [raw.weights, raw.state]
    text = command("checkpoints", "ls").stdout
    assert raw.weights in text and "ago" in text
    assert "not known" in command("checkpoints", "ls", "none:train:0", status=1).stderr


def test_listings_are_whole_beyond_a_page(command, raw, monkeypatch):
    for seq in range(5, 9):
        raw.result(raw.post("save_weights", model_id=raw.model, seq_id=seq, path=f"s{seq}")["request_id"])
    from verl_tinker.cli.server import Server

    asked, two = Server.get, {"limit": 2}
    monkeypatch.setattr(Server, "get", lambda self, path, **p: asked(self, path, **(p | two if "limit" in p else p)))
    assert len({c["tinker_path"] for c in command.json("checkpoints", "ls")}) == 6


def test_checkpoints_are_deleted_after_a_yes(command, raw):
    assert "Aborted" in command("checkpoints", "rm", raw.state, input="n\n", status=1).output
    assert len(command.json("checkpoints", "ls")) == 2
    command("checkpoints", "rm", "--yes", raw.state, raw.weights)
    assert command.json("checkpoints", "ls") == []
    assert "there is no checkpoint" in command("checkpoints", "rm", "-y", raw.state, status=1).stderr
    assert "tinker://RUN/KIND/NAME" in command("checkpoints", "rm", "-y", "a", status=1).stderr


def test_a_checkpoint_is_fetched_whole_into_a_new_folder(command, raw, tmp_path):
    folder = tmp_path / "here" / "adapter"
    command("checkpoints", "export", raw.weights, folder)
    assert (folder / "sampler.json").read_text() and not (folder / "checkpoint_complete").exists()
    assert [p.name for p in folder.parent.iterdir()] == ["adapter"]
    assert "there already" in command("checkpoints", "export", raw.weights, folder, status=1).stderr
    missing = tmp_path / "missing"
    assert "no checkpoint" in command("checkpoints", "export", raw.weights + "x", missing, status=1).stderr
    assert not missing.exists()


def test_keys_decide_what_is_seen(start, command_for, tmp_path):
    from raw import Raw

    keys = Keys(tmp_path / "keys.json")
    alice, bob = keys.add("alice"), keys.add("bob")
    server = start(keys=keys)
    with server.http() as http:
        http.headers["X-API-Key"] = alice
        raw = Raw(http)
        raw.create()
        raw.result(raw.forward_backward(1))
        raw.result(raw.optim_step(2))
        raw.result(raw.snapshot(3, 50))
        raw.post("retrieve_future", request_id=raw.optim_step(4))
    mine, theirs = (command_for(server.url, key).json("status") for key in (alice, bob))
    for part in ("runs", "versions", "errors"):
        assert len(mine[part]) == 1 and theirs[part] == [], part
    assert mine["versions"][0]["samplers"] == [f"{raw.session}:sample:50"]
    assert theirs["load"]["versions"] == 1
    assert "TINKER_API_KEY" in command_for(server.url, "tml-wrong")("status", status=1).stderr
