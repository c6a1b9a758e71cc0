import os
import stat
import subprocess
import sys

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
    for bad in ("{]", "[]", '{"alice": 5}', '{"alice": "ab"}'):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(UserError, match="server.api_keys_file: .*bad.json is not a key file"):
            Keys(tmp_path / "bad.json")


def test_names_that_are_added_at_once_are_all_there(tmp_path):
    script = "import sys\nfrom pathlib import Path\nfrom verl_tinker.core.access import Keys\n" \
             "keys = Keys(Path(sys.argv[1]))\nsys.stdin.readline()\n" \
             "for n in range(20): keys.add(f'{sys.argv[2]}-{n}')"
    file = tmp_path / "keys.json"
    adders = [subprocess.Popen([sys.executable, "-c", script, str(file), name], stdin=subprocess.PIPE) for name in "abc"]
    for adder in adders:
        adder.stdin.write(b"\n")
        adder.stdin.flush()
    assert [adder.wait(60) for adder in adders] == [0, 0, 0]
    assert Keys(file).names() == sorted(f"{name}-{n}" for name in "abc" for n in range(20))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".keys.json.lock", "keys.json"]


def test_changes_within_one_tick_of_the_clock_are_seen(tmp_path):
    file = tmp_path / "keys.json"
    first = Keys(file).add("alice")
    running, clock = Keys(file), file.stat().st_mtime_ns
    second = Keys(file).add("bob")
    os.utime(file, ns=(clock, clock))
    assert (running.caller(first), running.caller(second)) == ("alice", "bob")


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
