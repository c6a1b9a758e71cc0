"""What a second process reads of the first one's journal."""

import time

import pytest

from verl_tinker.core.errors import StateInUse, StorageError
from verl_tinker.core.journal import Journal, Outcome, SamplerRecord, SessionRecord


def test_all_of_it_is_there_again(tmp_path):
    first = Journal(tmp_path)
    session = SessionRecord("s", "alice", 12.5, {"tags": ["a"]}, "key")
    first.add_session(session)
    first.add_session(SessionRecord("t", "", 13.0, {}, None))
    first.end_session("t", "success", "all done")
    first.end_session("t", "errored", "too late")
    first.add_session(SessionRecord("u", "", 14.0, {}, None))
    first.end_session("u", "success", None)
    first.end_session("u", "success", "too late")
    first.add_run("s:train:0", "alice", "s")
    first.accept("r1", "s:train:0", 1, "optim_step", "alice")
    first.settle("r1", Outcome(result={"metrics": {"x": 1.0}}))
    first.accept("r2", "s:train:0", 2, "forward_backward", "alice")
    first.settle("r2", Outcome(error="bad", category="user"))
    first.accept("r3", "s:train:0", 3, "forward_backward", "alice")
    first.accept("r4", "s:train:0", 4, "forward_backward", "alice")
    first.settle("r4", Outcome())
    sampler = SamplerRecord("s:sample:0", "alice", "s", "base", "tinker://x", "uid", False)
    first.add_sampler(sampler)
    first.close()

    second = Journal(tmp_path)
    assert second.sessions() == [session, SessionRecord("t", "", 13.0, {}, None, "success", "all done"),
                                 SessionRecord("u", "", 14.0, {}, None, "success")]
    assert second.run_owner("s:train:0") == "alice" and second.run_owner("other") is None
    reason, category = second.run_end("s:train:0")
    assert "started again" in reason and category == "server"
    assert second.command("s:train:0", 1).outcome.result == {"metrics": {"x": 1.0}}
    assert second.command_of_request("r2").outcome == Outcome(None, "bad", "user")
    assert second.command("s:train:0", 3).outcome is None
    assert second.command_of_request("r4").outcome == Outcome()
    assert second.command("s:train:0", 5) is None and second.command_of_request("r5") is None
    assert second.sampler("s:sample:0") == sampler and second.sampler("s:sample:1") is None
    second.close()


def test_one_server_at_a_time(tmp_path):
    first = Journal(tmp_path)
    with pytest.raises(StateInUse, match="another live server keeps its state in"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()


def test_an_accepted_number_is_taken_for_good(tmp_path):
    journal = Journal(tmp_path)
    journal.accept("r1", "run", 1, "optim_step", "")
    with pytest.raises(Exception, match="UNIQUE"):
        journal.accept("r2", "run", 1, "optim_step", "")
    journal.accept("r3", "run", None, "save_weights", "")
    journal.accept("r4", "run", None, "save_weights", "")
    journal.close()


def test_a_journal_that_cannot_be_written_accepts_nothing():
    journal = Journal(None)
    journal._db.execute("PRAGMA query_only = ON")
    with pytest.raises(StorageError, match="server.checkpoint_dir cannot be written .* nothing was accepted"):
        journal.accept("r1", "run", 1, "optim_step", "")
    journal.settle("r1", Outcome())


def test_old_commands_are_forgotten_with_the_next_start(tmp_path, monkeypatch):
    first = Journal(tmp_path)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 31 * 86400)
    first.accept("old", "run", 1, "optim_step", "")
    first.settle("old", Outcome(result={}))
    monkeypatch.setattr(time, "time", lambda: now)
    first.accept("new", "run", 2, "optim_step", "")
    first.close()
    second = Journal(tmp_path)
    assert second.command_of_request("old") is None and second.command("run", 2).request_id == "new"
    assert second._db.execute("SELECT count(*) FROM outcome").fetchone() == (0,)
    second.close()


def test_a_damaged_journal_is_named_with_the_remedy(tmp_path):
    Journal(tmp_path).close()
    for file in tmp_path.glob("journal*"):
        file.write_bytes(b"x" * 4096)
    with pytest.raises(StorageError, match="journal.sqlite3 cannot be read .* move it"):
        Journal(tmp_path)
