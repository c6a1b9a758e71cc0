"""`chat`: talk to a base model or a saved sampler in the terminal.

Owns the conversation. Does not know templates: the server renders them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import click
import httpx

from verl_tinker.cli.server import Server, out, server_option


@click.command()
@server_option
@click.argument("model", required=False)
@click.option("--message", "-m", help="Say this, print the answer and end.")
@click.option("--system", help="The system message.")
@click.option("--max-tokens", type=click.IntRange(1), help="The longest answer; by default what fits.")
@click.option("--temperature", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int)
def chat(server: Server, model: str | None, message: str | None, system: str | None, **settings) -> None:
    """Talk to MODEL: a path (tinker://.../sampler_weights/...) or a name; by default the first that the server has.

    Without a terminal the whole input is one message. An empty line or Ctrl-D ends a conversation.
    """
    model = model or _first(server)
    history = [{"role": "system", "content": system}] if system else []
    if message is None and not _is_terminal():
        message = sys.stdin.read()
    if message is not None:
        _turn(server, model, history, message, settings)
        return
    out.print(f"{model}; an empty line ends", style="dim")
    while said := _asked():
        _turn(server, model, history, said, settings)


def _first(server: Server) -> str:
    models = server.get("/v1/models")["data"]
    if not models:
        raise click.ClickException(f"{server.url} serves no model that can be sampled")
    return models[0]["id"]


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _asked() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _turn(server: Server, model: str, history: list[dict], said: str, settings: dict) -> None:
    history.append({"role": "user", "content": said})
    answer = []
    for part in _stream(server, {"model": model, "messages": history, **settings}):
        answer.append(part)
        click.echo(part, nl=False)
    click.echo()
    history.append({"role": "assistant", "content": "".join(answer)})


def _stream(server: Server, body: dict) -> Iterator[str]:
    """The parts of the answer as they come."""
    no_limit = httpx.Timeout(60, read=None)
    with server.failures(), server.http.stream(
        "POST", "/v1/chat/completions", json=body | {"stream": True}, timeout=no_limit) as answer:
        server.checked(answer)
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise click.ClickException(event["error"]["message"])
            yield event["choices"][0]["delta"].get("content") or ""
