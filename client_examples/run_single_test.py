"""Runs one of the nine workloads of workloads.py against a server that is up, and says by a number whether it holds.

Owns the order: folder, stages, checks, verdict. Launches through run.py, and never starts or stops a server.

    python3 client_examples/run_single_test.py --lite --test-name opd_deepmath
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import run
from checks import Metrics, NotShown
from workloads import WORKLOADS, Stage, Workload

# Renderers of the models that the cookbook's own table lacks; for the others the cookbook is asked.
RENDERERS = {run.MODEL: "qwen3_instruct", "Qwen/Qwen3-1.7B": "qwen3"}
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]


class Unable(Exception):
    """Why the workload could not be run; the text says what to do."""


def renderer_of(model: str) -> str:
    if model in RENDERERS:
        return RENDERERS[model]
    name = ask_client("import sys; from tinker_cookbook import model_info; "
                      "print(model_info.get_recommended_renderer_name(sys.argv[1]))", model)
    if name is None:
        raise Unable(f"the cookbook knows no renderer for {model}; name one by --renderer-name")
    return name


def ask_client(code: str, *arguments: str) -> str | None:
    """The last line that a piece of code prints in the client's environment; None when it fails."""
    answer = subprocess.run([str(run.CLIENT_PYTHON), "-c", code, *arguments], capture_output=True, text=True)
    return answer.stdout.strip().rpartition("\n")[2] if answer.returncode == 0 else None


def lay_out(folder: Path, model: str, tokenizer: str, lite: bool) -> None:
    """Put the tokenizer where a recipe finds it by the model's name; with `lite` the stand-in data as well."""
    local = Path(tokenizer).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    if lite:
        run.prepare_folder(folder, local if local.is_dir() else None)
    if local.is_dir():
        link(folder / model, local.resolve())
    elif tokenizer != model:
        fetched = ask_client("import sys; from huggingface_hub import snapshot_download as fetch; "
                             "print(fetch(sys.argv[1], allow_patterns=sys.argv[2:]))", tokenizer, *TOKENIZER_FILES)
        if fetched is None:
            raise Unable(f"--tokenizer-name-or-path {tokenizer} is neither a folder nor to be had from the hub")
        link(folder / model, Path(fetched))


def link(name: Path, target: Path) -> None:
    if name.is_symlink():
        name.unlink()
    elif name.exists():
        raise Unable(f"{name} is there and is no link; give another --folder")
    name.parent.mkdir(parents=True, exist_ok=True)
    name.symlink_to(target)


def check_server(base_url: str) -> None:
    url = f"{base_url.rstrip('/')}/api/v1/healthz"
    try:
        urlopen(url, timeout=10).close()
    except HTTPError as error:
        raise Unable(f"the server at {base_url} is not ready: {error.read().decode(errors='replace')}") from None
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise Unable(f"no server answers at {base_url} ({reason}); start one, or give --base-url") from None


def wait_for(process: subprocess.Popen, what: str) -> None:
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    if code != 0:
        raise Unable(f"{what} ended with status {code}; what it said is above")


def run_stages(workload: Workload, options: argparse.Namespace, extra: list[str]) -> dict[str, Metrics]:
    """Each stage to its end, its metrics by its name; the caller's own flags go to the last one."""
    found: dict[str, Metrics] = {}
    names = {"model": options.model_name, "renderer": options.renderer_name}
    if workload.solutions:
        settings = run.environment(options.base_url, options.log_path, options.lite)
        script = [str(run.CLIENT_PYTHON), str(run.ROOT / "client_examples" / "gsm8k_sft.py"), "gsm8k_sft.jsonl"]
        wait_for(subprocess.Popen(script, cwd=options.folder, env=settings), "gsm8k_sft.py")
    for stage in workload.stages:
        flags = [*(stage.lite if options.lite else []), *(extra if stage is workload.stages[-1] else [])]
        logs = options.log_path / stage.name
        print(f"-- {options.test_name}: {stage.name}", flush=True)
        process = run.launch(stage.recipe, logs, options.base_url, options.folder, flags, names=names, offline=options.lite)
        wait_for(process, stage.name)
        found[stage.name] = Metrics.read(stage.name, logs)
        names[stage.name] = found[stage.name].final["state_path"]
    return found


def judge(workload: Workload, found: dict[str, Metrics], lite: bool) -> list[str]:
    return [check(found) for check in (workload.lite_checks if lite else workload.checks)]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--test-name", required=True, choices=WORKLOADS)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model-name", help="as the server calls it; by default the workload's own")
    parser.add_argument("--tokenizer-name-or-path", help="a folder or a hub name; by default the model's name")
    parser.add_argument("--renderer-name", help="the cookbook's renderer; by default the one that suits the model")
    parser.add_argument("--api-key", default=os.environ.get("TINKER_API_KEY", "tml-local"))
    parser.add_argument("--lite", action="store_true", help="the small form, on stand-in data, for a machine without a GPU")
    parser.add_argument("--folder", type=Path, help="where recipes are started")
    parser.add_argument("--log-path", type=Path, help="a new folder for metrics and checkpoint records")
    parser.epilog = "After -- come flags of the cookbook's own for the last stage."
    options = parser.parse_args(arguments)
    options.model_name = options.model_name or WORKLOADS[options.test_name].default_model(options.lite)
    options.tokenizer_name_or_path = options.tokenizer_name_or_path or options.model_name
    options.folder = options.folder or run.ROOT / "runs" / ("work" if options.lite else "hub")
    options.log_path = options.log_path or run.ROOT / "runs" / f"{options.test_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return options


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, extra = parse(sys.argv[1:at]), sys.argv[at + 1 :]
    os.environ["TINKER_API_KEY"] = options.api_key
    workload = WORKLOADS[options.test_name]
    try:
        if not run.CLIENT_PYTHON.exists():
            raise Unable("the client environment is missing; run client_examples/setup.sh")
        if options.log_path.exists():
            raise Unable(f"--log-path {options.log_path} is there already; recipes would go on where its records end")
        check_server(options.base_url)
        options.renderer_name = options.renderer_name or renderer_of(options.model_name)
        lay_out(options.folder, options.model_name, options.tokenizer_name_or_path, options.lite)
        shown = judge(workload, run_stages(workload, options, extra), options.lite)
    except (Unable, NotShown) as error:
        sys.exit(f"{options.test_name}: FAILED: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{options.test_name}: stopped")
    (options.log_path / "summary.json").write_text(json.dumps({"test": options.test_name, "shown": shown}, indent=1) + "\n")
    print(f"{options.test_name}: OK: {'; '.join(shown)}. Metrics are in {options.log_path}")


if __name__ == "__main__":
    main()
