"""Chats as token ids, and token ids as text: the tokenizers of the served models, with their chat templates.

Owns the loaded tokenizers. Does not sample, and does not speak HTTP: `verl_tinker.api.openai` does.
"""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_tinker.core.errors import UserError
from verl_tinker.tool_calls import ToolCall, ToolFormat, tool_format

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizers:
    """The tokenizer of each base model, loaded in a thread when it is first asked for; `folders` by public name."""

    def __init__(self, folders: Mapping[str, Path]):
        self._folders = folders
        self._loading: dict[str, asyncio.Task[Chat]] = {}

    async def of(self, model: str) -> Chat:
        """UserError when the model's folder holds no tokenizer that transformers can read."""
        task = self._loading.get(model)
        if task is None or (task.done() and task.exception()):
            task = asyncio.create_task(asyncio.to_thread(self._load, model))
            self._loading[model] = task
        # One caller that goes away must not end the loading that others wait for.
        return await asyncio.shield(task)

    def _load(self, model: str) -> Chat:
        from transformers import AutoTokenizer

        try:
            return Chat(model, AutoTokenizer.from_pretrained(self._folders[model]))
        except Exception as error:  # Each tokenizer class has its own errors for a file that it cannot read.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"model: the tokenizer of {model} cannot be loaded ({reason}); use the Tinker API, which takes "
                            "token ids, or put the tokenizer's files into the model's folder") from error


class Chat:
    """One tokenizer. Methods may be called from any thread; they take the time of the text that they are given."""

    def __init__(self, model: str, tokenizer: Any):
        self.model = model
        self._tokenizer = tokenizer
        # A tokenizer of the Rust library refuses calls that overlap with a change of its own settings.
        self._one_at_a_time = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, with what the tokenizer puts before a document."""
        with self._one_at_a_time:
            return list(self._tokenizer(text).input_ids)

    def render(self, messages: list[dict], tools: list[dict] | None, options: dict[str, Any]) -> list[int]:
        """The ids of a chat in the model's own template; `options` go to the template. UserError when it refuses them."""
        self._template(tools)
        try:
            with self._one_at_a_time:
                text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
                return list(self._tokenizer(text, add_special_tokens=False).input_ids)
        except Exception as error:  # Templates are programs of the model's authors, and raise what they like.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"messages: the chat template of {self.model} refuses them: {reason}") from error

    def tool_format(self, tools: list[dict]) -> ToolFormat:
        """How this model writes tool calls; UserError when its template offers none, or in a form that is not known."""
        template = self._template(tools)
        if "tools" not in template:
            raise UserError(f"tools: the chat template of {self.model} has no place for tools; leave them out")
        found = tool_format(template)
        if found is None:
            raise UserError(f"tools: the form in which the chat template of {self.model} has tools called is not known; "
                            "leave tools out and describe them in a message")
        return found

    def tool_calls(self, text: str, tools: list[dict], form: ToolFormat) -> tuple[str | None, list[ToolCall]]:
        """What the text says beside its tool calls, and these."""
        return form.parse(self._tokenizer, text, tools)

    def text(self, tokens: Sequence[int], with_special: bool = False) -> str:
        with self._one_at_a_time:
            return self._tokenizer.decode(list(tokens), skip_special_tokens=not with_special)

    def pieces(self, tokens: Sequence[int], text: str) -> list[str]:
        """`text`, of all these tokens or of the first of them, cut so that each token has its part; together they are it."""
        parts = self._parts(tokens)
        pieces, rest = [], text
        for part in parts:
            piece = part if rest.startswith(part) else rest
            pieces.append(piece)
            rest = rest[len(piece):]
        if rest and pieces:
            pieces[-1] += rest
        return pieces

    def decoder(self) -> Callable[[int], str] | None:
        """A function that gives the text which each next token adds; None where this cannot be said before the end."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)

        def step(token: int) -> str:
            with self._one_at_a_time:
                return stream.step(backend, int(token)) or ""

        return step

    def _parts(self, tokens: Sequence[int]) -> list[str]:
        step = self.decoder()
        if step is None:
            return [self.text(tokens), *[""] * (len(tokens) - 1)] if tokens else []
        return [step(token) for token in tokens]

    def token(self, token: int) -> tuple[str, bytes]:
        """One token as text, with a mark for bytes that are no whole character, and its bytes."""
        with self._one_at_a_time:
            name = self._tokenizer.convert_ids_to_tokens(int(token)) or ""
            if int(token) in self._tokenizer.added_tokens_decoder:
                return name, name.encode()
        data = self._bytes(name)
        return data.decode("utf-8", errors="replace"), data

    def _bytes(self, name: str) -> bytes:
        if self._is_bytewise and all(char in _byte_of() for char in name):
            return bytes(_byte_of()[char] for char in name)
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()

    @functools.cached_property
    def _is_bytewise(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is not None and backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__()

    def _template(self, tools: list[dict] | None) -> str:
        try:
            return self._tokenizer.get_chat_template(tools=tools)
        except ValueError:
            raise UserError(f"messages: {self.model} has no chat template; send a prompt to /v1/completions") from None


@functools.cache
def _byte_of() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
