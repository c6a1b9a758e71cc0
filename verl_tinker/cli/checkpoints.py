"""`checkpoints`: list, remove, bring to this machine, and take over what was trained elsewhere.

Owns the unpacking of archives. Does not read or write the server's folder, but for `import`.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

import click
import httpx
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from verl_tinker.cli.server import Server, age, json_option, out, print_json, server_option, size, table

PASSED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@click.group()
def checkpoints() -> None:
    """Saved weights and training states."""


@checkpoints.command("ls")
@server_option
@json_option
@click.argument("run", required=False)
def list_(server: Server, as_json: bool, run: str | None) -> None:
    """All of them, or those of one RUN, newest first."""
    if run:
        found = server.get(f"/api/v1/training_runs/{run}/checkpoints")["checkpoints"]
    else:
        found = server.pages("/api/v1/checkpoints", "checkpoints")
    if as_json:
        print_json(found)
        return
    table({"path": "left", "size": "right", "saved": "right", "": "left"},
          [[c["tinker_path"], size(c["size_bytes"]), f"{age(c['time'])} ago", _marks(c)] for c in found])


def _marks(checkpoint: dict) -> str:
    ends = checkpoint["expires_at"]
    return ", ".join(filter(None, ["public" if checkpoint["public"] else "", f"until {ends[:16]}" if ends else ""]))


@checkpoints.command("rm")
@server_option
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@click.argument("paths", nargs=-1, required=True)
def remove(server: Server, yes: bool, paths: tuple[str, ...]) -> None:
    """Delete the checkpoints of PATHS (tinker://...). Samplers that stand for them say so from then on."""
    places = [_route(path) for path in paths]
    if not yes:
        click.confirm(f"Delete {', '.join(paths)}?", abort=True)
    for path, place in zip(paths, places, strict=True):
        server.delete(place)
        out.print(f"deleted {path}")


@checkpoints.command("export")
@server_option
@click.argument("path")
@click.argument("folder", type=click.Path(path_type=Path))
def export(server: Server, path: str, folder: Path) -> None:
    """Fetch the files of PATH (tinker://...) into FOLDER, which must not be there yet."""
    if folder.exists():
        raise click.ClickException(f"{folder} is there already; name a new folder")
    with server.failures():
        link = server.http.get(f"{_route(path)}/archive")
        if link.status_code != 302:
            server.checked(link)
            raise click.ClickException(f"{server.url} has no archive of {path}")
        # Whole or not at all: it gets its name when everything is there.
        with tempfile.TemporaryDirectory(dir=_existing(folder.absolute().parent), prefix=".fetching-") as part:
            archive = Path(part) / "archive.tar"
            _fetch(server, link.headers["Location"], archive)
            files = Path(part) / "files"
            _unpack(archive, files)
            files.rename(folder)
    out.print(f"{folder}: {size(sum(f.stat().st_size for f in folder.rglob('*') if f.is_file()))}")


@checkpoints.command("import", context_settings=PASSED)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def import_(arguments: tuple[str, ...]) -> None:
    """Make a checkpoint of a PEFT adapter that was trained elsewhere; runs on the server's machine."""
    from verl_tinker.cli.local import called

    called("verl_tinker.import_adapter", "checkpoints import", arguments)


def _route(path: str) -> str:
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or not all(parts):
        raise click.ClickException(f"{path} is no checkpoint; write tinker://RUN/KIND/NAME, as checkpoints ls shows it")
    return "/api/v1/training_runs/{}/checkpoints/{}/{}".format(*parts)


def _existing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fetch(server: Server, address: str, file: Path) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # The link is a key of its own, so the API key stays out of it.
    with httpx.stream("GET", address, timeout=60, trust_env=False, verify=address.startswith("https:")) as answer:
        server.checked(answer)
        total = int(answer.headers["Content-Length"])
        with Progress(*columns, console=out, transient=True) as progress, open(file, "wb") as target:
            task = progress.add_task("fetching", total=total)
            for data in answer.iter_bytes(1 << 20):
                target.write(data)
                progress.advance(task, len(data))
    if file.stat().st_size != total:
        raise click.ClickException(f"the server sent {file.stat().st_size} of {total} bytes; try again")


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        if "checkpoint_complete" not in names:
            raise click.ClickException("the archive is not whole; try again")
        tar.extractall(folder, [m for m in tar.getmembers() if m.name != "checkpoint_complete"], filter="data")
