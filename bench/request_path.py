"""What the server itself costs: time in its hands, samples a second, open polls; written as a section of docs/performance.md.

Owns the clients and the section. The engine does nothing, so that nothing else is measured. Clients and server share the machine.

    python bench/request_path.py [--seconds 15] [--polls 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from workload import ROOT, write_section

from data import forward_backward_body, sft
from fake_engine import BASE
from raw import Raw
from real_server import free_port

HEADING = "## The server's own part of a request"
PROTOBUF = "application/x-protobuf"
CLIENTS, TOKENS = 64, 256
# What a sample takes in the engine while its way is timed; without it the clients would only queue for the processor.
SAMPLE_SECONDS = 0.25


class Connection:
    """One connection that is kept; as little work on this side as there can be."""

    def __init__(self, port: int):
        self._port = port

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def post(self, path: str, content: bytes, kind: str = "application/json", accept: str = "application/json") -> bytes:
        self._writer.write(b"POST /api/v1/%s HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-x\r\nContent-Type: %s\r\nAccept: %s\r\n"
                           b"Content-Length: %d\r\n\r\n%s" % (path.encode(), kind.encode(), accept.encode(), len(content), content))
        head = await self._reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = await self._reader.readexactly(size)
        assert head.startswith(b"HTTP/1.1 200"), head + body
        return body

    async def result(self, accepted: bytes) -> bytes:
        request_id = json.loads(accepted)["request_id"]
        result = await self.post("retrieve_future", b'{"request_id": "%s"}' % request_id.encode(), accept=PROTOBUF)
        assert not result.startswith(b'{"error"'), result
        return result

    def close(self) -> None:
        self._writer.close()


@contextmanager
def timed_server():
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "bench" / "timed_server.py"), "--port", str(port), "--folder", folder]
        process = subprocess.Popen(command)
        url = f"http://127.0.0.1:{port}"
        try:
            limit = time.monotonic() + 60
            while time.monotonic() < limit and process.poll() is None:
                try:
                    if httpx.get(f"{url}/api/v1/healthz", trust_env=False).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            yield port, httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": "tml-x"}, trust_env=False, timeout=600)
        finally:
            process.terminate()
            process.wait(30)


def report(http: httpx.Client, what: str = "") -> dict:
    return http.get(str(http.base_url).replace("/api/v1/", f"/bench{what}")).json()


def sample_body(sampler: str, seq: int) -> bytes:
    return json.dumps({"sampling_session_id": sampler, "seq_id": seq, "sampling_params": {"max_tokens": 1},
                       "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}).encode()


async def samples(port: int, sampler: str, seconds: float) -> int:
    """How many trivial samples 64 connections get, one after the other on each."""
    done, end, number = 0, time.monotonic() + seconds, iter(range(10**9))

    async def client() -> None:
        nonlocal done
        connection = await Connection(port).open()
        while time.monotonic() < end:
            await connection.result(await connection.post("asample", sample_body(sampler, next(number))))
            done += 1
        connection.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return done


async def trained(port: int, runs: list[str], seconds: float) -> None:
    """Forward_backward of 256 tokens and optim_step, one after the other on each of 64 runs."""
    end = time.monotonic() + seconds

    async def client(run: str) -> None:
        connection, seq = await Connection(port).open(), 1
        while time.monotonic() < end:
            body = forward_backward_body(run, seq, [sft(length=TOKENS)])
            await connection.result(await connection.post("forward_backward", body, PROTOBUF))
            step = json.dumps({"model_id": run, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-4}}).encode()
            await connection.result(await connection.post("optim_step", step))
            seq += 2
        connection.close()

    await asyncio.gather(*(client(run) for run in runs))


def sdk_rate(port: int, seconds: float) -> float:
    """Samples a second through the SDK, 64 at once from one process."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-x")
    sampler = service.create_sampling_client(base_model=BASE).result()
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
    end, done = time.monotonic() + seconds, 0

    async def client() -> None:
        nonlocal done
        while time.monotonic() < end:
            await sampler.sample(prompt, 1, params)
            done += 1

    async def all_of_them() -> None:
        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    asyncio.run(all_of_them())
    service.close("success").result(60)
    return done / seconds


async def open_polls(port: int, http: httpx.Client, count: int) -> tuple[int, int]:
    """Resident bytes before and while so many polls wait."""
    raw = Raw(http)
    sampler = raw.base_sampler()
    before = report(http)["resident"]
    report(http, "/hold")
    first = await Connection(port).open()
    waiting = [json.loads(await first.post("asample", sample_body(sampler, n)))["request_id"] for n in range(count)]
    connections = [await Connection(port).open() for _ in range(count)]
    polls = [asyncio.create_task(c.post("retrieve_future", b'{"request_id": "%s"}' % r.encode()))
             for c, r in zip(connections, waiting, strict=True)]
    await asyncio.sleep(10)
    during = report(http)["resident"]
    report(http, "/release")
    answers = await asyncio.gather(*polls)
    assert all(b'"tokens":[100]' in answer for answer in answers)
    return before, during


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--polls", type=int, default=10_000)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with timed_server() as (port, http):
        raw = Raw(http)
        sampler = raw.base_sampler()
        asyncio.run(samples(port, sampler, 2))
        before = report(http)
        count = asyncio.run(samples(port, sampler, options.seconds))
        after = report(http)
        report(http, f"/takes/{SAMPLE_SECONDS}")
        asyncio.run(samples(port, sampler, options.seconds))
        rows = report(http, "/takes/0")["rows"]
        for number in range(CLIENTS):
            raw.create(number)
        runs = [f"{raw.session}:train:{number}" for number in range(CLIENTS)]
        report(http)
        asyncio.run(trained(port, runs, options.seconds))
        commands = report(http)["rows"]
        by_sdk = sdk_rate(port, options.seconds)
    with timed_server() as (port, http):
        idle, polled = asyncio.run(open_polls(port, http, options.polls))
    rate = count / options.seconds
    cpu = 1000 * (after["cpu"] - before["cpu"]) / count
    write_section(section(rows + commands, rate, cpu, by_sdk, (options.polls, idle, polled)))


def section(rows: list, rate: float, cpu: float, by_sdk: float, polls: tuple[int, int, int]) -> str:
    lines = [
        HEADING, "",
        f"Made by `python bench/request_path.py` on {os.cpu_count()} cores, which clients and server share,",
        f"{time.strftime('%Y-%m-%d')}. The engine does nothing; a sample takes {1000 * SAMPLE_SECONDS:.0f} ms in it for the table. {CLIENTS} connections at once,",
        "each of which waits for one command before it sends the next. Milliseconds from the last byte of a request to the engine's call and from its return to the",
        "first byte of the reply, without the queue (target: both together p50 below 5, p99 below 20).", "",
        "| command | p50 before | p50 after | p50 | p99 |", "|---|---|---|---|---|"]
    for kind in ("sample", "forward_backward", "optim_step"):
        times = np.array([row[1:] for row in rows if row[0] == kind])
        both = times.sum(1)
        lines.append(f"| {kind} | {np.median(times[:, 0]):.1f} | {np.median(times[:, 1]):.1f} | {np.median(both):.1f} | "
                     f"{np.percentile(both, 99):.1f} |")
    count, idle, polled = polls
    return "\n".join([
        *lines, "",
        f"Trivial samples: {rate:.0f} a second by plain HTTP (target: 500), {cpu:.2f} ms of the server's processor each; "
        f"{by_sdk:.0f} a second through one process of the SDK.",
        f"{count:,} open polls: {polled / 2**20:.0f} MiB resident, {idle / 2**20:.0f} MiB without them (target: below 1,024).", ""])


if __name__ == "__main__":
    main()
