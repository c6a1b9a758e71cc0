"""`start`, `check`, `plan`, `keys` and `doctor`: what runs on this machine.

Owns the names. Each is another module's own `main`, whose options are handed on as they are.
"""

from __future__ import annotations

import importlib
import importlib.util

import click

PASSED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
# What the engines' own packages bring; without them these commands cannot work.
_ENGINES = ("verl", "torch", "ray", "omegaconf")


def _passing(name: str, module: str, text: str, *first: str) -> click.Command:
    @click.command(name, context_settings=PASSED, help=text)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        called(module, name, (*first, *arguments))

    return command


def called(module: str, name: str, arguments: tuple[str, ...]) -> None:
    """Call another module's `main` under the name that the user typed."""
    missing = [package for package in _ENGINES if importlib.util.find_spec(package) is None]
    if missing and module not in ("verl_tinker.keys", "verl_tinker.doctor"):
        raise click.ClickException(f"{name} needs packages that are not installed ({', '.join(missing)}); run "
                                   "./install_verl.sh of the repository, and use its .venv/bin/verl-tinker")
    importlib.import_module(module).main(list(arguments))


start = _passing("start", "verl_tinker.start", "Start a server; the same as python -m verl_tinker.start.")
check = _passing("check", "verl_tinker.start", "Check a preset, print the result and start nothing.", "--check")
plan = _passing("plan", "verl_tinker.plan.__main__", "Tell where each part of a preset would run and what memory it needs.")
keys = _passing("keys", "verl_tinker.keys", "Make, list and remove API keys.")
doctor = _passing("doctor", "verl_tinker.doctor", "Tell what is wrong with this machine, and what to do about it.")
