"""OpenAI's requests: their fields, what this server cannot do of them, and what they mean in the core's types.

Owns field names and defaults. Does not check ranges that the core checks for every sample.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from verl_tinker.core.types import SamplingParams

MAX_PROMPTS = 256
TOP_LOGPROBS = 20


class Refused(Exception):
    """A request that cannot be answered, in OpenAI's words: `param` names the field, `code` is for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def _unless_null(default: Any) -> BeforeValidator:
    """OpenAI's clients send null for a field that is to have its default."""
    return BeforeValidator(lambda value: default if value is None else value)


Number = Annotated[float, _unless_null(1.0)]
Switch = Annotated[bool, _unless_null(False)]


class Open(BaseModel):
    """A newer client's extra fields are ignored; those that would change the answer are refused by `check`."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(Open):
    include_usage: Switch = False


class Completing(Open):
    """What both kinds of request have. `top_k` and `return_token_ids` are not OpenAI's; vLLM has them by these names."""

    model: str
    max_tokens: int | None = None
    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Annotated[int, _unless_null(-1)] = -1
    n: Annotated[int, _unless_null(1), Field(ge=1, le=1024)] = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: Switch = False
    stream_options: StreamOptions | None = None
    return_token_ids: Switch = False
    presence_penalty: Annotated[float, _unless_null(0.0)] = 0.0
    frequency_penalty: Annotated[float, _unless_null(0.0)] = 0.0
    logit_bias: dict[str, float] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Refused for what would change the answer and cannot be done here."""
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                _refuse(name, "must be 0: this server samples from the model's own distribution")
        if self.logit_bias:
            _refuse("logit_bias", "must be left out: this server samples from the model's own distribution")
        if self.stream_options is not None and not self.stream:
            _refuse("stream_options", "goes with stream=true only")

    def params(self, max_tokens: int | None) -> SamplingParams:
        seed = None if self.seed is None else self.seed % 2**63
        return SamplingParams(max_tokens, seed, self.stops or None, self.temperature, self.top_k, self.top_p)


class Message(Open):
    """One message of a chat; what else it holds goes to the model's template as it came."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """As chat templates read it: content as text, the arguments of tool calls as objects."""
        message = {k: v for k, v in self.model_dump().items() if v is not None}
        message["role"] = "system" if self.role == "developer" else self.role
        message["content"] = self._text(where)
        if self.tool_calls:
            message["tool_calls"] = [_called(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls)]
        return message

    def _text(self, where: str) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        for i, part in enumerate(self.content):
            if part.get("type") not in ("text", "refusal") or not isinstance(part.get(part["type"]), str):
                _refuse(f"{where}.content[{i}]", "must be a part of the type 'text': this server reads text only")
        return "".join(part[part["type"]] for part in self.content)


class ChatCompletion(Completing):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: Switch = False
    top_logprobs: Annotated[int, _unless_null(0), Field(ge=0, le=TOP_LOGPROBS)] = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Annotated[bool, _unless_null(True)] = True
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Annotated[bool, _unless_null(True)] = True
    continue_final_message: Switch = False

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            _refuse("top_logprobs", "goes with logprobs=true only")
        if self.tool_choice not in (None, "auto", "none"):
            _refuse("tool_choice", "must be 'auto' or 'none': this server cannot force a tool to be called")
        for i, tool in enumerate(self.tools or []):
            function = tool.get("function")
            if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
                _refuse(f"tools[{i}]", "must be {'type': 'function', 'function': {'name': ..., 'parameters': ...}}")
        if (self.response_format or {}).get("type", "text") != "text":
            _refuse("response_format", "must be {'type': 'text'}: this server cannot hold the model to a form")

    def chat(self) -> list[dict[str, Any]]:
        return [message.plain(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def template_options(self) -> dict[str, Any]:
        own = {"add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
               "continue_final_message": self.continue_final_message}
        return {k: v for k, v in (self.chat_template_kwargs or {}).items() if k not in _NOT_OPTIONS} | own

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_top(self) -> int | None:
        """How many likeliest tokens are wanted at each place; None without log-probabilities."""
        return self.top_logprobs if self.logprobs else None


class Completion(Completing):
    prompt: str | list[int] | list[str] | list[list[int]]
    # OpenAI's own default.
    max_tokens: Annotated[int, _unless_null(16), Field(ge=0)] = 16
    logprobs: Annotated[int | None, Field(ge=0, le=TOP_LOGPROBS)] = None
    echo: Switch = False
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n):
            _refuse("best_of", "must be n or left out")
        if self.suffix:
            _refuse("suffix", "must be left out: this server completes at the end only")
        if self.max_tokens == 0 and not self.echo:
            _refuse("max_tokens", "must be at least 1 without echo")

    @property
    def prompts(self) -> list[str | list[int]]:
        single = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts = [self.prompt] if single else list(self.prompt)
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            _refuse("prompt", f"must be 1 to {MAX_PROMPTS} prompts")
        return prompts

    @property
    def wanted_tokens(self) -> int:
        # With none, one is sampled all the same and left out of the answer.
        return max(1, self.max_tokens)

    @property
    def wanted_top(self) -> int | None:
        return self.logprobs


# Arguments of transformers' own method, which are no business of a client.
_NOT_OPTIONS = frozenset({
    "conversation", "tools", "documents", "chat_template", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"})


def _called(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(where, "must have a function with a name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            # The model itself wrote it, and its template shows it as it was.
            pass
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse(param: str, reason: str) -> None:
    raise Refused(400, f"{param} {reason}", param)
