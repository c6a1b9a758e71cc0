"""ROCK's admin for tests: its routes and its envelope, with a real rocklet process in place of each container.

Owns those processes, which end with it. Runs in the sandbox environment, whose rl-rock gives the envelope's own classes.

    python small_admin.py PORT FOLDER
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from rock.actions import ResponseStatus, RockResponse, SandboxResponse, SandboxStatusResponse

PREFIX = "/apis/envs/sandbox/v1"
app = FastAPI()
folder = Path(sys.argv[2])
sandboxes: dict[str, dict] = {}
# What a test may turn on: number of calls that answer 503, and the headers that were seen last.
faults = {"http_503": 0}
seen_headers: dict[str, str] = {}


def good(result) -> dict:
    return RockResponse(result=result).model_dump(mode="json")


def bad(message: str, error: str) -> dict:
    return RockResponse(status=ResponseStatus.FAILED, message=message, error=error, result=None).model_dump(mode="json")


@app.middleware("http")
async def away(request: Request, call_next):
    if request.url.path.startswith(PREFIX):
        seen_headers.clear()
        seen_headers.update(request.headers)
        if faults["http_503"]:
            faults["http_503"] -= 1
            return JSONResponse({"detail": "no upstream"}, 503)
    return await call_next(request)


@app.get("/")
async def hello():
    return {"message": "hello, ROCK!"}


@app.post("/test/faults")
async def set_faults(body: dict):
    faults.update(body)
    return {}


@app.get("/test/state")
async def state():
    return {"headers": dict(seen_headers),
            "sandboxes": {name: {"alive": alive(s), "pid": s["process"].pid if s["process"] else None, "asked": s["asked"]}
                          for name, s in sandboxes.items()}}


def alive(sandbox: dict) -> bool:
    return sandbox["process"] is not None and sandbox["process"].poll() is None


@app.post(f"{PREFIX}/start_async")
async def start(body: dict):
    name = uuid.uuid4().hex
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sandbox = {"port": port, "asked": body, "process": None, "failed": None, "up": False, "stopped": False}
    if body["image"].startswith("missing"):
        message = f"docker pull failed: no such image {body['image']}"
        sandbox["failed"] = {"image_pull": {"status": "failed", "message": message}}
    elif body["image"].startswith("engine-down"):
        sandbox["failed"] = {"docker_run": {"status": "failed", "message": "Cannot connect to the Docker daemon"}}
    elif body["image"].startswith("refused"):
        return bad("async start sandbox failed", "memory exceeds max_allowed_spec")
    else:
        home = folder / name
        home.mkdir(parents=True)
        sandbox["process"] = subprocess.Popen(
            [Path(sys.executable).parent / "rocklet", "--host", "127.0.0.1", "--port", str(port)], cwd=home,
            start_new_session=True, stdout=open(home / "rocklet.log", "w"), stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    sandboxes[name] = sandbox
    return good({**SandboxResponse().model_dump(mode="json"), "sandbox_id": name, "host_name": "here",
                 "host_ip": "127.0.0.1", "cpus": body["cpus"], "memory": body["memory"]})


@app.get(f"{PREFIX}/get_status")
async def status(sandbox_id: str, include_all_states: bool = False):
    sandbox = sandboxes.get(sandbox_id)
    if sandbox is None:
        return bad("get sandbox status failed", f"sandbox {sandbox_id} not found")
    phases = sandbox["failed"] or {"image_pull": {"status": "success", "message": ""},
                                   "docker_run": {"status": "running", "message": ""}}
    # As the admin does: once it was up it counts as alive until somebody stops it, whatever has become of it.
    sandbox["up"] = (sandbox["up"] or (alive(sandbox) and await answers(sandbox))) and not sandbox["stopped"]
    return good(SandboxStatusResponse(sandbox_id=sandbox_id, status=phases, is_alive=sandbox["up"], image=sandbox["asked"]["image"],
                                      host_name="here"))


async def answers(sandbox: dict) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            return (await http.get(f"http://127.0.0.1:{sandbox['port']}/is_alive")).status_code == 200
    except httpx.TransportError:
        return False


async def forward(sandbox_id: str, path: str, message: str, **request):
    """As the admin does: a rocklet's own errors become exit code -1, an unreachable one becomes Failed."""
    sandbox = sandboxes.get(sandbox_id)
    if sandbox is None or sandbox["process"] is None:
        return bad(message, f"sandbox {sandbox_id} not found")
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=180) as http:
            response = await http.post(f"http://127.0.0.1:{sandbox['port']}/{path}", **request)
    except httpx.RequestError:
        return bad(message, "Service unavailable: Upstream server is not reachable.")
    if response.status_code == 511:
        return good({"exit_code": -1, "failure_reason": response.json()["rockletexception"]["message"]})
    if response.status_code == 504:
        return good({"exit_code": -1, "failure_reason": response.json()["detail"]})
    return good(response.json())


@app.post(PREFIX + "/{call}")
async def other(call: str, request: Request):
    if call == "upload":
        form = await request.form()
        file = form["file"]
        return await forward(form["sandbox_id"], "upload", "upload file failed", data={"target_path": form["target_path"]},
                             files={"file": (file.filename, await file.read())})
    body = json.loads(await request.body())
    if call == "stop":
        end(sandboxes.get(body["sandbox_id"]))
        return good(f"{body['sandbox_id']} stopped")
    return await forward(body["sandbox_id"], call, f"{call} failed", json=body)


def end(sandbox: dict | None) -> None:
    if sandbox:
        sandbox["stopped"] = True
    if sandbox and sandbox["process"] and sandbox["process"].poll() is None:
        os.killpg(sandbox["process"].pid, signal.SIGKILL)
        sandbox["process"].wait()


async def main() -> None:
    config = uvicorn.Config(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", timeout_keep_alive=60)
    server = uvicorn.Server(config)
    try:
        await server.serve()
    finally:
        for sandbox in sandboxes.values():
            end(sandbox)


if __name__ == "__main__":
    asyncio.run(main())
