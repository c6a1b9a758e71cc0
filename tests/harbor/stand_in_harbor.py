"""A program in Harbor's place for tests without containers: it asks the model as an agent does, and leaves a recorded tree.

Owns the agent's behaviour, which the task's instruction names. What Harbor itself does is tested with the containers.

    stand_in_harbor.py jobs start -c job.yaml
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded" / "jobs"


def ask(url: str, messages: list[dict], **more) -> dict:
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps({"messages": messages, **more}).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def talk(url: str, turns: int, length: int = 40) -> None:
    messages = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "x" * length}]
    for i in range(turns):
        messages += [ask(url, messages), {"role": "user", "content": f"observation {i}"}]


def leave(config: dict, name: str) -> None:
    source = next((RECORDED / name).glob("*/"))
    shutil.copytree(source, Path(config["jobs_dir"]) / config["job_name"] / source.name)


def main() -> int:
    config = json.loads(Path(sys.argv[4]).read_text())
    task, url = Path(config["tasks"][0]["path"]), config["agents"][0]["kwargs"]["api_base"]
    limit = config["agents"][0]["kwargs"]["per_instance_call_limit"]
    count, *behaviours = (task / "instruction.md").read_text().split()
    (Path(config["jobs_dir"]) / config["job_name"]).mkdir(parents=True)
    number = int(Path(count).read_text()) if Path(count).exists() else 0
    Path(count).write_text(str(number + 1))
    return behave(behaviours[number % len(behaviours)], config, url, limit)


def behave(name: str, config: dict, url: str, limit: int) -> int:
    """Attempts at the task end one after another as the words of its instruction say."""
    if name == "loops":
        talk(url, limit + 3)
    elif name == "rambles":
        talk(url, 1, length=200_000)
    elif name == "sleeps":
        talk(url, 1)
        time.sleep(600)
    elif name == "breaks":
        print("no such option: -c", file=sys.stderr)
        return 2
    else:
        talk(url, 2)
        leave(config, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
