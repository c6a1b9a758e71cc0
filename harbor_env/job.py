"""One Harbor job inside a sandbox: its file, its run, and its result tree brought back.

Owns Harbor's job configuration and where it lies in the sandbox. Does not judge the result: `harbor_env.results` does.
"""

from __future__ import annotations

import base64
import io
import json
import shlex
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from harbor_env.detached import Detached
from harbor_env.errors import JobFailed, SandboxNotStarted
from harbor_env.sandbox import Sandbox, run
from harbor_env.settings import AgentSettings, HarborSettings

AGENT_CLASSES = {"swe-agent": "swe_agent:SweAgent", "mini-swe-agent": "mini_swe_agent:MiniSweAgent",
                 "bash-agent": "bash_agent:BashAgent"}
RESULT_BYTES = 48_000_000
CHUNK = 1_000_000


class HarborJob:
    """`settings` of the task folder; `name` is the job's, and the folder of its tree."""

    def __init__(self, sandbox: Sandbox, settings: HarborSettings, name: str):
        self._sandbox, self._settings, self._name = sandbox, settings, name
        self._work = f"{settings.job.work_dir}/{name}"
        self._tree = f"{settings.job.jobs_dir}/{name}"
        self._command = Detached(sandbox, self._work)

    async def prepare(self) -> None:
        """The sandbox's own Docker engine with its images, the task, and the agents' code."""
        if self._settings.job.start_engine:
            await self._start_engine()
        await self._upload_folder(Path(self._settings.task.path), f"{self._work}/task")
        await self._upload_folder(Path(__file__).parent / "agents", f"{self._work}/agents")

    async def start(self, model_url: str) -> None:
        """Begin the job; the agent asks the model at `model_url`."""
        config = job_config(self._settings, self._name, self._work, model_url)
        await self._sandbox.write_text(f"{self._work}/job.yaml", json.dumps(config, indent=2))
        harbor = f"{shlex.quote(self._settings.job.harbor)} jobs start -c {self._work}/job.yaml"
        await self._command.start(harbor, cwd=self._work, env={
            "PYTHONPATH": f"{self._work}/agents", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONDONTWRITEBYTECODE": "1"})

    async def wait(self) -> None:
        """Until it has ended; JobFailed when it did not in time, or left no tree."""
        outcome = await self._command.wait(self._settings.job.timeout_sec)
        if outcome.exit_code == -1:
            raise JobFailed(f"Harbor's job did not end within {self._settings.job.timeout_sec:.0f} s")
        if outcome.exit_code != 0 and not await self._has_result():
            words = (outcome.stderr.strip() or outcome.stdout.strip())[-500:]
            raise JobFailed(f"Harbor ended with status {outcome.exit_code}: {words}")

    async def kill(self) -> None:
        await self._command.kill()

    async def collect(self, folder: Path) -> Path:
        """The job's tree as a folder here, less what is not text of a reasonable size."""
        archive = f"{self._work}/tree.tgz"
        shell = (f"cd {shlex.quote(self._settings.job.jobs_dir)} && find {self._name} -type f -size -2048k -print0 | "
                 f"tar --null -T - -czf {archive} && stat -c %s {archive}")
        size = int((await run(self._sandbox, ["bash", "-c", shell], JobFailed)).strip())
        if size > RESULT_BYTES:
            raise JobFailed(f"the result tree has {size} bytes, more than {RESULT_BYTES}")
        parts = []
        for at in range(0, size, CHUNK):
            part = f"tail -c +{at + 1} {archive} | head -c {CHUNK} | base64 -w0"
            parts.append(base64.b64decode(await run(self._sandbox, ["bash", "-c", part], JobFailed)))
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(b"".join(parts)), mode="r:gz") as tar:
            tar.extractall(folder, filter="data")
        return folder / self._name

    async def _has_result(self) -> bool:
        return (await self._sandbox.execute(["bash", "-c", f"ls {shlex.quote(self._tree)}/*/result.json"])).exit_code == 0

    async def _start_engine(self) -> None:
        """dockerd, unless one answers already, and the images that lie in the sandbox."""
        images = shlex.quote(self._settings.job.images_dir)
        script = ("docker info > /dev/null 2>&1 || { (setsid dockerd --mtu 1400 > /var/log/dockerd.log 2>&1 < /dev/null &); "
                  "for i in $(seq 60); do docker info > /dev/null 2>&1 && break; sleep 1; done; }\n"
                  "docker info > /dev/null 2>&1 || { tail -n 3 /var/log/dockerd.log >&2; exit 1; }\n"
                  f"for f in {images}/*.tar {images}/*.tgz; do\n"
                  "  [ ! -f \"$f\" ] || docker load -i \"$f\" || exit 1\ndone\n")
        command = Detached(self._sandbox, f"{self._work}/engine")
        await command.start(script)
        outcome = await command.wait(600)
        if outcome.exit_code != 0:
            words = (outcome.stderr.strip() or outcome.stdout.strip())[-500:]
            raise SandboxNotStarted(f"the Docker engine inside the sandbox did not come up: {words or 'no reason given'}")

    async def _upload_folder(self, local: Path, target: str) -> None:
        if not local.is_dir():
            raise JobFailed(f"{local} is not there; run prepare-sandbox")
        with tempfile.NamedTemporaryFile(suffix=".tgz") as archive:
            with tarfile.open(archive.name, "w:gz") as tar:
                tar.add(local.resolve(), ".", filter=lambda info: None if "__pycache__" in info.name else info)
            await self._sandbox.upload(archive.name, f"{target}.tgz")
        place = shlex.quote(target)
        shell = f"mkdir -p {place} && tar -xzf {place}.tgz -C {place} --no-same-owner"
        await run(self._sandbox, ["bash", "-c", shell], JobFailed)


def job_config(settings: HarborSettings, name: str, work: str, model_url: str) -> dict[str, Any]:
    """Harbor's own job file: one attempt at the task in the folder `work`, never repeated."""
    agent = settings.agent
    runtime = settings.job.agent_runtime
    mounts = [{"type": "bind", "source": runtime, "target": runtime, "read_only": True}]
    environment: dict[str, Any] = {"type": "docker", "delete": True,
                                   "extra_docker_compose": [f"{work}/agents/compose.yaml"]}
    if agent.name != "bash-agent":
        environment["mounts"] = mounts
    return {
        "job_name": name, "jobs_dir": settings.job.jobs_dir, "n_attempts": 1, "n_concurrent_trials": 1, "quiet": True,
        "retry": {"max_retries": 0}, "environment": environment,
        "agents": [{"import_path": AGENT_CLASSES[agent.name], "model_name": "openai/policy",
                    "kwargs": {**agent_arguments(agent), "api_base": model_url, "runtime": settings.job.agent_runtime}}],
        "tasks": [{"path": f"{work}/task"}],
    }


def agent_arguments(agent: AgentSettings) -> dict[str, Any]:
    """The budget as every agent of ours takes it."""
    return {"max_input_tokens": agent.max_input_tokens, "max_output_tokens": agent.max_output_tokens,
            "per_instance_call_limit": agent.per_instance_call_limit, "temperature": agent.temperature,
            "completion_kwargs": agent.completion_kwargs, "max_observation_length": agent.max_observation_length,
            "last_n_observations": agent.last_n_observations}
