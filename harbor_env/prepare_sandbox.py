"""`prepare-sandbox`: one task kept whole in the $TASK folder, and the outer image that runs Harbor and the baked agent.

Owns the task's copy with its checksums, and the image's recipe. Does not start a sandbox.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harbor_env.errors import SettingError
from harbor_env.files import write_json
from harbor_env.settings import AGENTS, TaskFolder

HERE = Path(__file__).resolve().parent
HARBOR_VERSION, SWE_AGENT_VERSION, MINI_VERSION = "0.25.0", "v1.1.0", "2.4.6"
REQUIRED = ("instruction.md", "task.toml", "environment", "tests/test.sh")
# Where public SWE-bench Verified tasks are in Harbor's registry.
PUBLIC_NAME = "swe-bench/swebench-verified__{id}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", "--task-root", dest="task_root", help="the $TASK folder; by default the variable TASK")
    parser.add_argument("--task-id", required=True, help="as sympy__sympy-19637")
    parser.add_argument("--wheel", type=Path, help="the rl-rock wheel; by default the one in $TASK/dist")
    parser.add_argument("--rock-root", help="accepted and not used: the wheel holds all that is needed of ROCK")
    parser.add_argument("--task-source", type=Path, help="a folder with the task, instead of the public registry")
    parser.add_argument("--task-name", help=f"its name in Harbor's registry; by default {PUBLIC_NAME.format(id='ID')}")
    parser.add_argument("--outer-image", default="tinker-harbor:local")
    parser.add_argument("--base-image", default="debian:trixie-slim", help="what the outer image is made from")
    parser.add_argument("--agent", choices=AGENTS, default="swe-agent", help="the agent whose runtime is baked in")
    parser.add_argument("--agent-python", choices=("own", "system"), default="own",
                        help="own: the runtime brings a Python from the web; system: it uses /usr/bin/python3, which every "
                             "task's container must then have in the outer image's version")
    parser.add_argument("--images", type=Path, nargs="*", default=[],
                        help="`docker save` files that a sandbox loads before Harbor runs")
    parser.add_argument("--skip-image", action="store_true", help="the task only")


def main(options: argparse.Namespace) -> int:
    folder = TaskFolder.found(options.task_root)
    place = folder.root / "sandbox-preparation"
    manifest: dict[str, Any] = {"task_id": options.task_id, **keep_task(folder, options)}
    if not options.skip_image:
        wheel = options.wheel or _only_wheel(folder)
        context = place / "context"
        write_context(context, wheel, options)
        manifest["outer_image"] = build_image(context, options.outer_image)
        manifest |= {"wheel": {"file": wheel.name, "sha256": _digest(wheel)}, "agent": agent_version(options.agent),
                     "harbor": HARBOR_VERSION}
    manifest["prepared_at"] = datetime.now(timezone.utc).isoformat()
    write_json(place / "manifest.json", manifest)
    print(f"prepared {options.task_id}: {place / 'manifest.json'}")
    return 0


def keep_task(folder: TaskFolder, options: argparse.Namespace) -> dict[str, Any]:
    """The task below assets/harbor-tasks, byte for byte; where it is there already its checksums must still be right."""
    kept, manifest = folder.tasks / options.task_id, folder.root / "sandbox-preparation" / "manifest.json"
    if kept.is_dir():
        known = json.loads(manifest.read_text()) if manifest.is_file() else {}
        files = checksums(kept)
        if known.get("task_id") == options.task_id and known.get("files") != files:
            changed = sorted(k for k in {*known["files"], *files} if known["files"].get(k) != files.get(k))
            raise SettingError(
                f"{kept} was changed since it was prepared ({', '.join(changed[:5])}); remove it to fetch it again")
        return {"source": known.get("source", "was there already"), "files": files}
    with tempfile.TemporaryDirectory(dir=_made(folder.tasks)) as part:
        source, where = _fetched(Path(part), options)
        missing = [name for name in REQUIRED if not (source / name).exists()]
        if missing:
            raise SettingError(f"{where} is no Harbor task: it has no {', '.join(missing)}")
        shutil.copytree(source, Path(part) / "whole", symlinks=True)
        (Path(part) / "whole").rename(kept)
    return {"source": where, "files": checksums(kept)}


def checksums(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): _digest(file) for file in sorted(folder.rglob("*")) if file.is_file()}


def _fetched(part: Path, options: argparse.Namespace) -> tuple[Path, str]:
    if options.task_source:
        return options.task_source, str(options.task_source)
    name = options.task_name or PUBLIC_NAME.format(id=options.task_id)
    command = ["uvx", "--python", "3.12", "--from", f"harbor=={HARBOR_VERSION}", "harbor", "task", "download", name,
               "--output-dir", str(part / "download")]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise SettingError(
            "the task is fetched with uvx, which is not on the path; install uv, or give --task-source") from None
    found = [file.parent for file in (part / "download").rglob("task.toml")]
    if done.returncode or len(found) != 1:
        words = (done.stderr.strip() or done.stdout.strip())[-400:]
        words = words or f"{len(found)} tasks came"
        raise SettingError(f"{name} could not be fetched ({words}); check --task-id, or give --task-source")
    return found[0], f"harbor registry: {name}"


def write_context(context: Path, wheel: Path, options: argparse.Namespace) -> None:
    """The folder that `docker build` gets."""
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    shutil.copy(wheel, context / wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("rock/rocklet/local_files/")]
        if not names:
            raise SettingError(f"{wheel} holds no rock/rocklet/local_files; give the wheel of rl-rock")
        archive.extractall(context / "unpacked", names)
    (context / "unpacked/rock/rocklet/local_files").rename(context / "local_files")
    shutil.rmtree(context / "unpacked")
    lines = (HERE / "sandbox.in").read_text().splitlines()
    (context / "sandbox.txt").write_text("\n".join(line for line in lines if not line.startswith("rl-rock")) + "\n")
    (context / "images").mkdir()
    for image in options.images:
        shutil.copy(image, context / "images" / image.name)
    (context / "Dockerfile").write_text(dockerfile(options.base_image, wheel.name, options.agent, options.agent_python))


def dockerfile(base: str, wheel: str, agent: str, agent_python: str = "own") -> str:
    """Docker and Harbor, ROCK's rocklet where its worker looks for it, and the agent's runtime, apart from every task."""
    return f"""FROM {base}
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\
    docker.io docker-cli docker-compose docker-buildx iptables procps python3 python3-venv git curl ca-certificates \\
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/harbor && /opt/harbor/bin/pip install -q harbor=={HARBOR_VERSION} \\
    && ln -s /opt/harbor/bin/harbor /usr/local/bin/harbor
COPY {wheel} sandbox.txt /opt/rock/
RUN python3 -m venv /tmp/miniforge && /tmp/miniforge/bin/pip install -q /opt/rock/{wheel} -r /opt/rock/sandbox.txt \\
    && ln -s /tmp/miniforge/bin/rock /usr/local/bin/rock
COPY local_files /tmp/local_files
RUN mkdir -p /opt/agent-runtime/bin{_runtime(agent, agent_python)}
COPY images /opt/images
VOLUME /var/lib/docker
"""


def _runtime(agent: str, python: str) -> str:
    """The agent below /opt/agent-runtime, with a Python of its own unless every task's container has one that fits."""
    if agent == "bash-agent":
        return ""
    place = {"own": "/opt/uv/bin/uv python install --install-dir /opt/agent-runtime/python 3.12 && "
                    "/opt/uv/bin/uv venv --python /opt/agent-runtime/python/*/bin/python3 /opt/agent-runtime/venv",
             "system": "/opt/uv/bin/uv venv --python /usr/bin/python3 /opt/agent-runtime/venv"}[python]
    python = f"python3 -m venv /opt/uv && /opt/uv/bin/pip install -q uv && {place}"
    install = "/opt/uv/bin/uv pip install -q --python /opt/agent-runtime/venv/bin/python"
    if agent == "mini-swe-agent":
        link = "ln -s ../venv/bin/mini /opt/agent-runtime/bin/mini"
        return f" && {python} && {install} mini-swe-agent=={MINI_VERSION} && {link}"
    source = "https://github.com/SWE-agent/SWE-agent.git"
    clone = (f"git clone --depth 1 --branch {SWE_AGENT_VERSION} {source} /opt/agent-runtime/source && "
             f"{install} -e /opt/agent-runtime/source && ln -s ../venv/bin/sweagent /opt/agent-runtime/bin/sweagent")
    return f" && {python} && {clone}"


def agent_version(agent: str) -> dict[str, str]:
    versions = {"swe-agent": SWE_AGENT_VERSION, "mini-swe-agent": MINI_VERSION}
    return {"name": agent, "version": versions.get(agent, "this repository's")}


def build_image(context: Path, name: str) -> dict[str, str]:
    _docker(["info"], "the Docker engine does not answer; start it")
    _docker(["build", "-t", name, str(context)], f"the image {name} could not be built", show=True)
    return {"name": name, "id": _docker(["image", "inspect", "--format", "{{.Id}}", name], "the image is not there").strip(),
            "dockerfile_sha256": _digest(context / "Dockerfile")}


def _docker(arguments: list[str], wrong: str, show: bool = False) -> str:
    try:
        output = None if show else subprocess.PIPE
        done = subprocess.run(["docker", *arguments], stdout=output, stderr=output, text=True)
    except FileNotFoundError:
        raise SettingError("docker is not on the path; install Docker, or give --skip-image") from None
    if done.returncode:
        raise SettingError(f"{wrong} ({(done.stderr or '').strip()[-300:] or 'its output says why'})")
    return done.stdout or ""


def _only_wheel(folder: TaskFolder) -> Path:
    found = sorted((folder.root / "dist").glob("rl_rock-*.whl"))
    if len(found) != 1:
        raise SettingError(
            f"{folder.root / 'dist'} holds {len(found)} rl_rock wheels; run `harbor_env/setup.sh control`, or give --wheel")
    return found[0]


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    try:
        sys.exit(main(parser.parse_args()))
    except SettingError as error:
        sys.exit(f"error: {error}")
