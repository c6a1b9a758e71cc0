"""Tool calls in the text of a model: which form a chat template asks for, and what was called.

Owns the choice of the form. Does not parse by itself: vLLM's parsers do, which need no engine.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is JSON text, as clients get it."""

    id: str
    name: str
    arguments: str


# What only the templates of one form hold, and vLLM's name of that form; the first that fits counts.
_MARKS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name and its value', "llama3_json"),
    ("<tool_call>", "hermes"),
)


def tool_format(template: str) -> ToolFormat | None:
    """The form in which a chat template has tools called; None when it is not known."""
    return next((ToolFormat(name) for mark, name in _MARKS if mark in template), None)


@dataclass(frozen=True)
class ToolFormat:
    """One of vLLM's parsers, by name."""

    name: str

    def parse(self, tokenizer: Any, text: str, tools: list[dict]) -> tuple[str | None, list[ToolCall]]:
        """What the text says beside its tool calls, and these; the whole text and none when it holds none that is whole.

        Imports vLLM, which takes seconds at first.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        request = ChatCompletionRequest.model_validate({"messages": [], "model": "", "tools": tools, "tool_choice": "auto"})
        parser = ToolParserManager.get_tool_parser(self.name)(tokenizer, request.tools)
        found = parser.extract_tool_calls(text, request)
        if not found.tools_called:
            return text, []
        calls = [ToolCall(_new_id(), call.function.name, _json(call.function.arguments)) for call in found.tool_calls]
        return found.content or None, calls


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
