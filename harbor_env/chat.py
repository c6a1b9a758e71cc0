"""Chat-completions bodies: what an agent asks, checked and reduced to what a renderer needs, and the body that answers it.

Owns the JSON of both. Does not sample, and knows nothing of tokens but their number.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

from harbor_env.errors import RequestRefused

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Ask:
    """A checked request. `messages` are dicts of role, content (text), and tool_calls or tool_call_id where there are any;
    `tools` are OpenAI's function descriptions; `max_tokens` is what the agent allows itself, or None.
    """

    messages: list[dict]
    tools: list[dict] = field(default_factory=list)
    max_tokens: int | None = None
    model: str = "policy"


@dataclass(frozen=True)
class Answer:
    """What a model said: text, reasoning, and calls as (name, JSON text of the arguments)."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""

    @property
    def key(self) -> tuple:
        """What of it comes back when the agent repeats the conversation; agents strip blanks from the ends of a text."""
        return self.text.strip(), self.calls


def read_request(body: dict) -> Ask:
    """The request of an agent; RequestRefused names the field that cannot be served."""
    if not isinstance(body, dict):
        raise RequestRefused(f"the request is a {type(body).__name__}; it must be a JSON object")
    if body.get("stream"):
        raise RequestRefused(
            "stream is true; the model service gives whole answers only, so turn streaming off in the agent")
    if body.get("n") not in (None, 1):
        raise RequestRefused(f"n is {body['n']!r}; each request gets one answer")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages is missing or empty; it must be a list of at least one message")
    limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise RequestRefused(f"max_tokens is {limits[0]!r}; it must be a whole number of at least 1")
    return Ask([_message(m, f"messages[{i}]") for i, m in enumerate(messages)], _tools(body.get("tools") or []),
               min(limits, default=None), str(body.get("model") or "policy"))


def write_response(ask: Ask, answer: Answer, stop_reason: str, *, call_id: str,
                   prompt_tokens: int, sampled_tokens: int) -> dict:
    """The chat completion. `call_id` begins the ids of the answer and of its calls, and must be new in each turn."""
    message: dict = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": f"{call_id}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(answer.calls)]
    reason = "length" if stop_reason == "length" else "tool_calls" if answer.calls else "stop"
    return {
        "id": f"chatcmpl-{call_id}", "object": "chat.completion", "created": int(time.time()), "model": ask.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": sampled_tokens,
                  "total_tokens": prompt_tokens + sampled_tokens},
    }


def key_of(message: dict) -> tuple:
    """As `Answer.key`, of an assistant message that came back from the agent."""
    return message["content"].strip(), tuple(
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", []))


def _message(message: dict, where: str) -> dict:
    if not isinstance(message, dict):
        raise RequestRefused(f"{where} is a {type(message).__name__}; it must be an object with role and content")
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role not in ROLES:
        raise RequestRefused(f"{where}.role is {message.get('role')!r}; it must be one of {', '.join(ROLES)}")
    result = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    if message.get("tool_calls"):
        result["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(message["tool_calls"])]
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    return result


def _text(content, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(f"{where} is a {type(content).__name__}; it must be text or a list of text parts")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestRefused(f"{where}[{i}] is {kind!r}; only text parts can be answered")
    return "".join(part["text"] for part in content)


def _call(call: dict, where: str) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestRefused(f"{where} has no function with a name")
    try:
        parsed = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestRefused(f"{where}.function.arguments is not the JSON text of an object")
    return {"id": str(call.get("id") or ""), "type": "function",
            "function": {"name": function["name"], "arguments": function.get("arguments") or "{}"}}


def _tools(tools) -> list[dict]:
    if not isinstance(tools, list):
        raise RequestRefused(f"tools is a {type(tools).__name__}; it must be a list")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused(f"tools[{i}] is no function with a name; other tools cannot be offered to the model")
    return tools
