"""The pull runner against ROCK's own model service, as a process on loopback, and an agent that asks it by HTTP."""

import asyncio
import json
import os
import signal
import socket
from contextlib import asynccontextmanager

import httpx
import pytest
from local_sandbox import LocalSandbox

from harbor_env.errors import AgentSilent, ModelServiceFailed, RequestRefused, RockUnreachable
from harbor_env.model_service import ModelService
from harbor_env.pull import Patience, PullRunner

pytestmark = pytest.mark.timeout(120)
QUICK = Patience(look=1.0, silence=60.0, outage=10.0, resend=0.3)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def service_in(folder, sandbox_programs):
    folder.mkdir(exist_ok=True)
    sandbox = LocalSandbox(folder, sandbox_programs)
    service = ModelService(sandbox, port=free_port(), host="127.0.0.1", folder=str(folder / "ms"))
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def ask(service, text, **more):
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        answer = await http.post(f"http://127.0.0.1:{service.port}/v1/chat/completions",
                                 json={"messages": [{"role": "user", "content": text}], **more})
        return answer.json() if answer.status_code == 200 else answer.status_code


def said(body):
    return body["messages"][-1]["content"]


async def echo(index, body):
    return {"index": index, "said": said(body)}


async def answering(runner, agent):
    """The runner beside an agent, until the agent has ended; what both return."""
    ended = asyncio.Event()

    async def work():
        try:
            return await agent
        finally:
            ended.set()

    working = asyncio.create_task(work())
    try:
        count = await runner.run(ended)
        return count, await working
    finally:
        working.cancel()


def log_lines(service):
    with open(service._log) as file:
        return file.read().splitlines()


async def test_turns_pass_through_the_real_service(tmp_path, sandbox_programs):
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        async def agent():
            return [await ask(service, f"turn {i} — ünïcode\n\"quoted\"") for i in range(5)]

        before = len(service.sandbox.commands)
        count, answers = await answering(PullRunner(service, echo, QUICK), agent())
        assert count == 5
        assert answers == [{"index": i + 1, "said": f"turn {i} — ünïcode\n\"quoted\""} for i in range(5)]
        assert len(service.sandbox.commands) - before <= 2 * 5 + 2, "a turn costs two commands"


async def test_requests_at_the_same_time_get_their_own_answers(tmp_path, sandbox_programs):
    gate = asyncio.Event()
    arrived = []

    async def in_any_order(index, body):
        arrived.append(index)
        if len(arrived) == 3:
            gate.set()
        await gate.wait()
        await asyncio.sleep(0.05 * (4 - index))
        return await echo(index, body)

    async with service_in(tmp_path / "s", sandbox_programs) as service:
        async def agents():
            return await asyncio.gather(*(ask(service, f"agent {i}") for i in range(3)))

        count, answers = await answering(PullRunner(service, in_any_order, QUICK), agents())
    assert count == 3 and sorted(answer["said"] for answer in answers) == ["agent 0", "agent 1", "agent 2"]


async def test_several_sandboxes_do_not_mix(tmp_path, sandbox_programs):
    async def episode(name):
        async with service_in(tmp_path / name, sandbox_programs) as service:
            async def agent():
                return [await ask(service, f"{name} {i}") for i in range(3)]

            async def answer(index, body):
                return {"for": name, "said": said(body)}

            return await answering(PullRunner(service, answer, QUICK), agent())

    results = await asyncio.gather(*(episode(name) for name in ("a", "b", "c")))
    for name, (count, answers) in zip("abc", results):
        assert count == 3 and answers == [{"for": name, "said": f"{name} {i}"} for i in range(3)]


async def test_a_large_answer_and_a_large_request_pass(tmp_path, sandbox_programs):
    large = "".join(chr(33 + (i * i) % 90) for i in range(400_000))
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        count, answer = await answering(PullRunner(service, echo, QUICK), ask(service, large))
    assert answer["said"] == large and count == 1


async def test_the_services_own_words_in_an_answer_do_no_harm(tmp_path, sandbox_programs):
    words = "LLM_RESPONSE_END LLM_RESPONSE_START LLM_REQUEST_START LLM_REQUEST_END SESSION_END"

    async def answer(index, body):
        return {"text": words}

    async with service_in(tmp_path / "s", sandbox_programs) as service:
        async def agent():
            return [await ask(service, "LLM_REQUEST_END{} LLM_RESPONSE_START"), await ask(service, "and more")]

        assert (await answering(PullRunner(service, answer, QUICK), agent()))[1] == [{"text": words}] * 2


async def test_the_word_that_ends_a_request_in_the_service_is_named(tmp_path, sandbox_programs):
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        with pytest.raises(ModelServiceFailed, match="request 1 has the word SESSION_END"):
            async def agent():
                assert await ask(service, "grep SESSION_END") == 500
                await asyncio.sleep(30)

            await answering(PullRunner(service, echo, QUICK), agent())


async def test_an_answer_whose_receipt_was_lost_is_given_once(tmp_path, sandbox_programs):
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        sandbox, runner = service.sandbox, PullRunner(service, echo, QUICK)
        start = len(sandbox.commands)
        sandbox.lose = [start + 1, start + 2]  # The first two deliveries; fetch is the command before them.
        _, answer = await answering(runner, ask(service, "hello"))
        assert answer == {"index": 1, "said": "hello"}
        assert sum(line.startswith("LLM_RESPONSE_START") for line in log_lines(service)) == 1


async def test_an_answer_that_the_service_read_over_is_sent_again(tmp_path, sandbox_programs):
    """The service loses a line that it reads while it is being written; here the first answer is made unreadable for it."""
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        real = service.deliver

        async def half_written_at_first(index, body, again=False):
            if again:
                return await real(index, body, again)
            with open(service._log, "a") as file:
                file.write('LLM_RESPONSE_START{"index"\n')
            return "appended"

        service.deliver = half_written_at_first
        count, answer = await answering(PullRunner(service, echo, QUICK), ask(service, "hello"))
    assert answer == {"index": 1, "said": "hello"} and count == 1


async def test_a_new_runner_goes_on_where_another_stopped(tmp_path, sandbox_programs):
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        asked, taken = [], asyncio.Event()

        async def never(index, body):
            if index == 1:
                return await echo(index, body)
            taken.set()
            await asyncio.Event().wait()

        async def count(index, body):
            asked.append(index)
            return await echo(index, body)

        async def agent():
            return [await ask(service, f"turn {i}") for i in range(3)]

        working = asyncio.create_task(agent())
        first = asyncio.create_task(PullRunner(service, never, QUICK).run(asyncio.Event()))
        await taken.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        _, answers = await answering(PullRunner(service, count, QUICK), working)
    assert [a["said"] for a in answers] == ["turn 0", "turn 1", "turn 2"]
    assert asked == [2, 3], "what was answered is not asked again"


async def test_an_agent_that_asks_again_while_it_waits_gets_one_answer(tmp_path, sandbox_programs):
    release, asked = asyncio.Event(), []

    async def slow(index, body):
        asked.append(index)
        await release.wait()
        return {"said": said(body)}

    async with service_in(tmp_path / "s", sandbox_programs) as service:
        async def agent():
            first = asyncio.create_task(ask(service, "same"))
            while len(log_lines(service)) < 1:
                await asyncio.sleep(0.05)
            second = asyncio.create_task(ask(service, "same"))
            while len(log_lines(service)) < 2:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)
            release.set()
            return await asyncio.gather(first, second)

        _, answers = await answering(PullRunner(service, slow, QUICK), agent())
    assert answers == [{"said": "same"}] * 2 and asked == [1]


async def test_the_end_of_the_agents_process_ends_the_runner(tmp_path, sandbox_programs):
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        process = await asyncio.create_subprocess_exec("sleep", "0.1")
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.post(f"http://127.0.0.1:{service.port}/v1/agent/watch", json={"pid": process.pid})
        await process.wait()
        assert await PullRunner(service, echo, QUICK).run(asyncio.Event()) == 0


async def test_the_policys_refusal_ends_the_run_by_name(tmp_path, sandbox_programs):
    async def refuse(index, body):
        raise RequestRefused("stream is true")

    async with service_in(tmp_path / "s", sandbox_programs) as service:
        with pytest.raises(RequestRefused, match="stream is true"):
            await answering(PullRunner(service, refuse, QUICK), ask(service, "hello"))


async def test_an_agent_that_is_silent_ends_the_run_by_name(tmp_path, sandbox_programs):
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        with pytest.raises(AgentSilent, match="after 0 answers"):
            await PullRunner(service, echo, Patience(look=0.2, silence=0.5)).run(asyncio.Event())


async def test_a_service_that_died_is_noticed(tmp_path, sandbox_programs):
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        with open(tmp_path / "s" / "ms" / "data" / "cli" / "model" / "pid.txt") as file:
            os.kill(int(file.read()), signal.SIGKILL)
        with pytest.raises(ModelServiceFailed, match=f"port {service.port} does not answer"):
            await PullRunner(service, echo, Patience(look=0.2)).run(asyncio.Event())


async def test_a_service_that_was_started_anew_is_noticed(tmp_path, sandbox_programs):
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        running = asyncio.create_task(PullRunner(service, echo, Patience(look=30.0)).run(asyncio.Event()))
        await ask(service, "hello")
        await service.stop()
        await service.start()
        second = asyncio.create_task(ask(service, "another first request"))
        with pytest.raises(ModelServiceFailed, match="started anew"):
            await running
        second.cancel()


async def test_a_port_that_is_taken_is_named(tmp_path, sandbox_programs):
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        other = LocalSandbox(tmp_path / "t", sandbox_programs)
        other.folder.mkdir()
        taken = ModelService(other, port=service.port, host="127.0.0.1", folder=str(tmp_path / "t" / "ms"))
        with pytest.raises(ModelServiceFailed, match=f"port {service.port} .* Address already in use"):
            await taken.start()


async def test_rock_that_stays_away_ends_the_run(tmp_path, sandbox_programs):
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        service.sandbox.lose = list(range(1000))
        with pytest.raises(RockUnreachable):
            await PullRunner(service, echo, Patience(look=0.1, outage=0.6)).run(asyncio.Event())
        service.sandbox.lose = []


async def test_what_rocks_own_client_reads_is_what_ours_wrote(tmp_path, sandbox_programs):
    """`rock model-service anti-call-llm` takes our answers for its own, so either may go on after the other."""
    async with service_in(tmp_path / "s", sandbox_programs) as service:
        async def agent():
            return await ask(service, "first")

        await answering(PullRunner(service, echo, QUICK), agent())
        second = asyncio.create_task(ask(service, "second"))
        shell = (f"ROCK_MODEL_SERVICE_DATA_DIR={tmp_path / 's' / 'ms'} rock model-service anti-call-llm --index 1 "
                 "--response '{\"late\": 1}' 2>/dev/null")
        outcome = await service.sandbox.execute(["bash", "-c", shell], timeout=40)
        assert said(json.loads(outcome.stdout.strip().splitlines()[-1])) == "second"
        second.cancel()
