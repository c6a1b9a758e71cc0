"""`prepare-sandbox` keeps a task byte for byte, and writes an image's recipe that has the pinned agent beside the task."""

import hashlib
import json
import os
import zipfile

import pytest

from harbor_env.__main__ import main
from harbor_env.prepare_sandbox import agent_version, dockerfile


@pytest.fixture
def source(tmp_path):
    task = tmp_path / "source"
    for name, text in {"instruction.md": "fix\n", "task.toml": "[task]\n", "environment/Dockerfile": "FROM x\n",
                       "environment/patch.bin": "\x00\x01", "tests/test.sh": "#!/bin/sh\n",
                       "solution/solve.sh": "#!/bin/sh\n"}.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    (task / "tests" / "test.sh").chmod(0o755)
    return task


@pytest.fixture
def wheel(tmp_path):
    folder = tmp_path / "task" / "dist"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "rl_rock-1.11.0-py3-none-any.whl", "w") as archive:
        archive.writestr("rock/rocklet/local_files/docker_run.sh", "#!/bin/sh\n")
        archive.writestr("rock/other.py", "")
    return folder / "rl_rock-1.11.0-py3-none-any.whl"


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A program in Docker's place that says what it was asked; the real one builds the recipe with the containers."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "docker").write_text(
        f"#!/bin/sh\necho \"$@\" >> {tmp_path}/asked\n[ -f {tmp_path}/down ] && "
        "{ echo 'Cannot connect to the Docker daemon' >&2; exit 1; }\n[ \"$1\" = image ] && echo sha256:abc\nexit 0\n")
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def prepare(root, source, *more):
    return main(["prepare-sandbox", "--task", str(root), "--task-id", "t1", "--task-source", str(source), *more])


def manifest(root):
    return json.loads((root / "sandbox-preparation" / "manifest.json").read_text())


def test_the_task_is_kept_whole_with_its_checksums(tmp_path, source):
    assert prepare(tmp_path / "task", source, "--skip-image", "--rock-root", "/nowhere") == 0
    kept = tmp_path / "task" / "assets" / "harbor-tasks" / "t1"
    files = {str(f.relative_to(source)): f.read_bytes() for f in source.rglob("*") if f.is_file()}
    assert {str(f.relative_to(kept)): f.read_bytes() for f in kept.rglob("*") if f.is_file()} == files
    assert (kept / "tests" / "test.sh").stat().st_mode & 0o111
    assert manifest(tmp_path / "task")["files"] == {name: hashlib.sha256(text).hexdigest() for name, text in files.items()}
    assert manifest(tmp_path / "task")["source"] == str(source)
    assert [f.name for f in kept.parent.iterdir()] == ["t1"], "nothing half made stays beside it"


def test_a_prepared_task_is_used_again_and_a_changed_one_is_not(tmp_path, source, capsys):
    root = tmp_path / "task"
    prepare(root, source, "--skip-image")
    assert prepare(root, source, "--skip-image") == 0 and manifest(root)["source"] == str(source)
    (root / "assets/harbor-tasks/t1/tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    assert prepare(root, source, "--skip-image") == 2
    assert "was changed since it was prepared (tests/test.sh)" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["instruction.md", "task.toml", "tests/test.sh"])
def test_what_is_no_task_is_refused_and_leaves_nothing(tmp_path, source, capsys, missing):
    (source / missing).unlink()
    assert prepare(tmp_path / "task", source, "--skip-image") == 2
    assert f"is no Harbor task: it has no {missing}" in capsys.readouterr().err
    assert list((tmp_path / "task" / "assets" / "harbor-tasks").iterdir()) == []


def test_the_image_has_the_wheel_and_the_rocklets_files(tmp_path, source, wheel, docker):
    (tmp_path / "base.tgz").write_bytes(b"image")
    assert prepare(tmp_path / "task", source, "--outer-image", "team/outer:1", "--images", str(tmp_path / "base.tgz"),
                   "--agent", "mini-swe-agent") == 0
    context = tmp_path / "task" / "sandbox-preparation" / "context"
    assert {f.name for f in context.iterdir()} == {"Dockerfile", wheel.name, "sandbox.txt", "local_files", "images"}
    assert (context / "local_files" / "docker_run.sh").is_file()
    assert (context / "images" / "base.tgz").read_bytes() == b"image"
    asked = (tmp_path / "asked").read_text()
    assert f"build -t team/outer:1 {context}" in asked
    said = manifest(tmp_path / "task")
    assert said["outer_image"]["name"] == "team/outer:1" and said["outer_image"]["id"] == "sha256:abc"
    assert said["wheel"] == {"file": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    assert said["agent"] == {"name": "mini-swe-agent", "version": "2.4.6"} and said["harbor"] == "0.25.0"


@pytest.mark.parametrize("agent", ["swe-agent", "mini-swe-agent", "bash-agent"])
def test_the_agents_runtime_is_pinned_and_apart_from_the_task(agent):
    recipe = dockerfile("debian:trixie-slim", "rl_rock-1.11.0-py3-none-any.whl", agent)
    assert recipe.startswith("FROM debian:trixie-slim\n")
    assert "harbor==0.25.0" in recipe and "VOLUME /var/lib/docker" in recipe
    version = agent_version(agent)["version"]
    program = {"swe-agent": "bin/sweagent", "mini-swe-agent": "bin/mini"}.get(agent)
    assert program is None or (version in recipe and f"/opt/agent-runtime/{program}" in recipe)


def test_no_engine_no_wheel_and_no_docker_are_each_one_error(tmp_path, source, wheel, docker, capsys, monkeypatch):
    (tmp_path / "down").touch()
    assert prepare(tmp_path / "task", source) == 2
    assert "the Docker engine does not answer; start it (Cannot connect" in capsys.readouterr().err
    wheel.unlink()
    assert prepare(tmp_path / "task", source) == 2 and "holds 0 rl_rock wheels" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("rock/rocklet/local_files/a", "")
    assert prepare(tmp_path / "task", source, "--wheel", str(other)) == 2
    assert "docker is not on the path" in capsys.readouterr().err
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("something", "")
    assert prepare(tmp_path / "task", source, "--wheel", str(other)) == 2
    assert "give the wheel of rl-rock" in capsys.readouterr().err


def test_a_task_that_cannot_be_fetched_says_why(tmp_path, capsys, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "uvx").write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho 'Task not found' >&2\nexit 1\n")
    (programs / "uvx").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    arguments = ["prepare-sandbox", "--task", str(tmp_path / "task"), "--task-id", "sympy__sympy-19637", "--skip-image"]
    assert main(arguments) == 2 and "could not be fetched (Task not found)" in capsys.readouterr().err
    assert "harbor task download swe-bench/swebench-verified__sympy__sympy-19637" in (tmp_path / "asked").read_text()
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(arguments) == 2 and "uvx, which is not on the path" in capsys.readouterr().err
