"""`status` and `runs`: a look at a running server.

Owns how it is printed. Does not measure anything: the server does.
"""

from __future__ import annotations

import sys

import click

from verl_tinker.cli.server import Server, age, json_option, out, print_json, server_option, span, table


@click.command()
@server_option
@json_option
def status(server: Server, as_json: bool) -> None:
    """What the server does now. Exit status 0 when it is ready, 3 when it starts, 4 when it has failed."""
    seen = server.get("/api/v1/overview")
    if as_json:
        print_json(seen)
    else:
        _print(server, seen)
    sys.exit({"ok": 0, "starting": 3, "failed": 4}[seen["server"]["status"]])


def _print(server: Server, seen: dict) -> None:
    about, load = seen["server"], seen["load"]
    words = {"ok": "ready", "starting": f"starting: {about['phase']}", "failed": f"failed: {about['reason']}"}
    out.print(f"{server.url}  {words[about['status']]}, up {span(about['up_s'])}", style="bold")
    for model in about["models"]:
        uses = " and ".join(name for name, can in (("trains", model["trainable"]), ("samples", model["sampleable"])) if can)
        out.print(f"  {model['name']}: {uses}, up to {model['max_context']} tokens")
    rates = load["tokens_per_second"]
    out.print(f"  tokens a second: {rates['trained']:.0f} trained, {rates['sampled']:.0f} sampled; {load['versions']} "
              "versions loaded beside the base model")
    for state in ("running", "waiting"):
        if load[state]:
            out.print(f"  {state}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(load[state].items())))
    if about["weight_mismatches"]:
        out.print(f"  {about['weight_mismatches']} samples were answered by other weights and refused", style="red")
    if seen["runs"]:
        out.print()
        table({"run": "left", "steps": "right", "loss": "right", "grad norm": "right", "waiting": "right", "now": "left"},
              [[run["run_id"], run["steps"], _number(run["last"].get("loss")), _number(run["last"].get("grad_norm")),
                run["waiting"], run["running"] or ("on disk" if run["place"] == "disk" else "rests")]
               for run in seen["runs"]])
    for error in seen["errors"][:3]:
        out.print(f"{age(error['time'])} ago {error['kind']}: {error['text']}", style="red")


@click.command()
@server_option
@json_option
@click.option("--limit", default=20, show_default=True, help="How many, newest first; 0 for all.")
def runs(server: Server, as_json: bool, limit: int) -> None:
    """Training runs, live ones and earlier ones."""
    found = server.pages("/api/v1/training_runs", "training_runs") if not limit else server.get(
        "/api/v1/training_runs", limit=limit)["training_runs"]
    if as_json:
        print_json(found)
        return
    table({"run": "left", "base model": "left", "rank": "right", "last request": "right", "state": "left",
           "sampler": "left"},
          [[run["training_run_id"], run["base_model"], run["lora_rank"] or "full", f"{age(run['last_request_time'])} ago",
            _path(run["last_checkpoint"]), _path(run["last_sampler_checkpoint"])] for run in found])


def _path(checkpoint: dict | None) -> str:
    return checkpoint["checkpoint_id"].partition("/")[2] if checkpoint else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
