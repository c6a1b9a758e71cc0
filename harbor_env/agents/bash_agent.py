"""A small agent for small models: one tool, one shell command a turn, no runtime of its own in the task's container.

Owns its loop. Runs in Harbor's process inside the sandbox. It ends with the second answer in a row that calls nothing, and
leaves the last one as /logs/agent/answer.txt for the verifier.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

from harbor.agents.base import BaseAgent
from limits import Limits

SYSTEM = "You fix a repository with shell commands. Call bash to run one. When you are done, answer without a call."
BASH = {"type": "function", "function": {
    "name": "bash", "description": "Run a shell command in the repository.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
COMMAND_SECONDS, PLAIN_ANSWERS = 120, 2
AGAIN = "You called nothing. Call bash to go on, or answer once more to end."


class BashAgent(BaseAgent):
    def __init__(self, logs_dir, model_name=None, **arguments):
        self.limits = Limits.taken_from(arguments)
        super().__init__(logs_dir, model_name, **arguments)

    @staticmethod
    def name() -> str:
        return "bash-agent"

    def version(self) -> str:
        return "1"

    async def setup(self, environment) -> None:
        pass

    async def run(self, instruction, environment, context) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM},
                                          {"role": "user", "content": instruction.strip()}]
        context.n_input_tokens = context.n_output_tokens = plain = 0
        for _ in range(self.limits.per_instance_call_limit):
            body = await asyncio.to_thread(self._ask, messages)
            message = body["choices"][0]["message"]
            context.n_input_tokens += body["usage"]["prompt_tokens"]
            context.n_output_tokens += body["usage"]["completion_tokens"]
            messages.append(message)
            (self.logs_dir / "messages.json").write_text(json.dumps(messages, indent=2))
            plain = 0 if message.get("tool_calls") else plain + 1
            if plain:
                (self.logs_dir / "answer.txt").write_text(message["content"] or "")
                messages.append({"role": "user", "content": AGAIN})
            if plain == PLAIN_ANSWERS:
                return
            for call in message.get("tool_calls", []):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": await self._run(call, environment)})

    async def _run(self, call: dict[str, Any], environment) -> str:
        command = json.loads(call["function"]["arguments"]).get("command")
        if call["function"]["name"] != "bash" or not isinstance(command, str):
            return "There is one tool, bash, and it takes a command."
        try:
            result = await environment.exec(command, timeout_sec=COMMAND_SECONDS)
        except Exception as error:  # Environments raise types of their own; the model may try something else.
            return f"The command could not be run: {error}"
        return self.limits.cut(f"{result.stdout or ''}{result.stderr or ''}\n(exit status {result.return_code})".strip())

    def _ask(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Harbor's process has the model service beside it, so the time of an answer is not bounded here."""
        body = {"model": "policy", "messages": messages, "tools": [BASH], "temperature": self.limits.temperature,
                **self.limits.completion_kwargs}
        request = urllib.request.Request(f"{self.limits.api_base}/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request) as answer:
            return json.load(answer)
