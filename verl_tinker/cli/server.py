"""A running server, as commands see it: its address, a key, answers or one line that says why there is none.

Owns the options --base-url and --json and the words of failures. Does not know any route.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

DEFAULT_URL = "http://127.0.0.1:8000"
# Names of runs hold ":train:", which rich would turn into a tram, and errors may hold brackets.
out = Console(highlight=False, soft_wrap=True, emoji=False, markup=False)


class Server:
    """Calls to `url`; every failure is a ClickException, which ends the command with status 1."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        # The certificates of a TLS proxy are checked, which takes long to set up and is nothing for plain HTTP.
        self.http = httpx.Client(base_url=self.url, headers={"X-API-Key": key()}, timeout=60,
                                 trust_env=not _is_local(self.url), verify=self.url.startswith("https:"))

    def get(self, path: str, **params: Any) -> dict:
        return self._json("GET", path, params=params)

    def delete(self, path: str) -> dict:
        return self._json("DELETE", path)

    def pages(self, path: str, field: str) -> list[dict]:
        """All entries of a listing."""
        found: list[dict] = []
        while True:
            page = self.get(path, limit=1000, offset=len(found))
            found += page[field]
            if not page[field] or len(found) >= page["cursor"]["total_count"]:
                return found

    def _json(self, method: str, path: str, **options: Any) -> dict:
        with self.failures():
            answer = self.http.request(method, path, **options)
            return self.checked(answer).json()

    def checked(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_error:
            answer.read()
            raise click.ClickException(f"{self.url} answers {answer.status_code}: {words(answer)}")
        return answer

    @contextmanager
    def failures(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise click.ClickException(f"no server answers at {self.url} ({error}); start one with verl-tinker start, or "
                                       "name its address by --base-url or TINKER_BASE_URL") from None


def words(answer: httpx.Response) -> str:
    """What a refusal says, in this server's form or OpenAI's."""
    try:
        body = answer.json()
        return body["error"]["message"] if "error" in body else body["detail"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:200] or answer.reason_phrase


def key() -> str:
    return os.environ.get("TINKER_API_KEY", "")


def _is_local(url: str) -> bool:
    return httpx.URL(url).host in ("127.0.0.1", "localhost", "::1")


def server_option(command: Callable) -> Callable:
    """Gives the command the server that --base-url names."""
    return click.option(
        "--base-url", "server", envvar="TINKER_BASE_URL", default=DEFAULT_URL, show_default=True, metavar="URL",
        callback=lambda context, option, url: Server(url), help="The server; TINKER_BASE_URL is read too, TINKER_API_KEY "
        "for its key.")(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print what the server said, for programs.")


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def table(columns: dict[str, str], rows: list[list[str]]) -> None:
    """Columns by title, with "left" or "right"."""
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for title, side in columns.items():
        grid.add_column(title, justify=side, overflow="fold")
    for row in rows:
        grid.add_row(*(str(cell) for cell in row))
    out.print(grid)


def size(count: float | None) -> str:
    if count is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(moment: str | float) -> str:
    """How long ago a date of the wire, or a number of seconds since 1970, is."""
    then = datetime.fromisoformat(moment) if isinstance(moment, str) else datetime.fromtimestamp(moment, UTC)
    return span((datetime.now(UTC) - then).total_seconds())


def span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
