"""The command `verl-tinker`: starts and checks servers, and talks to running ones over HTTP.

Owns the list of commands. Each has its implementation elsewhere, imported when it is called, so that the command works
where the engines are not installed.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from verl_tinker import __version__

# Name: module and attribute of the command.
COMMANDS = {
    "start": ("verl_tinker.cli.local", "start"),
    "check": ("verl_tinker.cli.local", "check"),
    "plan": ("verl_tinker.cli.local", "plan"),
    "keys": ("verl_tinker.cli.local", "keys"),
    "doctor": ("verl_tinker.cli.local", "doctor"),
    "status": ("verl_tinker.cli.reading", "status"),
    "runs": ("verl_tinker.cli.reading", "runs"),
    "checkpoints": ("verl_tinker.cli.checkpoints", "checkpoints"),
    "chat": ("verl_tinker.cli.chat", "chat"),
    "bench": ("verl_tinker.cli.bench", "bench"),
}


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name]
        return getattr(importlib.import_module(module), attribute)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="verl-tinker")
def cli() -> None:
    """A Tinker server on your own machines: start it, look into it, talk to what it trains."""


def main(arguments: list[str] | None = None) -> Any:
    return cli.main(arguments, prog_name="verl-tinker")
