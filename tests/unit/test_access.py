import stat

import pytest

from verl_tinker import keys
from verl_tinker.core.access import Keys, may_see
from verl_tinker.core.errors import UserError


def test_a_key_is_shown_once_and_kept_as_a_digest(tmp_path, capsys):
    file = tmp_path / "keys.json"
    keys.main(["add", "alice", "--file", str(file)])
    key = capsys.readouterr().out.strip()
    assert key.startswith("tml-") and key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    known = Keys(file)
    assert known.caller(key) == "alice" and known.caller(key + "x") is None and known.caller("") is None
    keys.main(["list", "--file", str(file)])
    assert capsys.readouterr().out == "alice\n"


def test_a_running_server_sees_new_and_removed_keys(tmp_path):
    file = tmp_path / "keys.json"
    running = Keys(file)
    key = Keys(file).add("bob")
    assert running.caller(key) == "bob"
    Keys(file).remove("bob")
    assert running.caller(key) is None


def test_bad_names_and_files(tmp_path):
    known = Keys(tmp_path / "keys.json")
    known.add("alice")
    for name in ("alice", "", "a b", "x" * 65):
        with pytest.raises(UserError, match="name"):
            known.add(name)
    with pytest.raises(UserError, match="has no key; there are alice"):
        known.remove("bob")
    (tmp_path / "bad.json").write_text("{]")
    with pytest.raises(UserError, match="server.api_keys_file: .*bad.json is not a key file"):
        Keys(tmp_path / "bad.json")


def test_who_may_see_what():
    assert may_see("a", "a") and not may_see("a", "b") and not may_see("a", "")
    assert may_see(None, "a") and may_see(None, "")


def test_a_file_that_is_being_written_leaves_the_good_keys_good(tmp_path):
    file = tmp_path / "keys.json"
    key = Keys(file).add("alice")
    running, whole = Keys(file), file.read_text()
    for half in (whole[:-5], "", '{"alice": 5}'):
        file.write_text(half)
        assert running.caller(key) == "alice"
    file.write_text("{}")
    assert running.caller(key) is None
