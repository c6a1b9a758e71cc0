"""Two tool calls as answers to the recipe's own prompt, one of which repairs the repository.

    python two_calls.py teach URL MODEL TASK        a state and a sampler that say each of them about every other time
    python two_calls.py weigh URL MODEL TASK PATH…  how many nats likelier the repairing one is, for each sampler

Owns the calls. Its output is one line of JSON; nothing here samples.
"""

import json
import math
import sys
from pathlib import Path

import tinker
import torch
from tinker_cookbook.recipes.harbor_rl.harbor_env import HarborTask, _initial_messages
from tinker_cookbook.recipes.harbor_rl.harbor_tools import HarborBashTool
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

COMMANDS = "bash /solution/solve.sh", "cat /testbed/stats.py"
ABOUT_EVEN = math.log(0.3), math.log(0.7)


def texts(model: str, task: Path) -> tuple[list[int], list[list[int]]]:
    """The recipe's first prompt, and each answer to it."""
    tokenizer = get_tokenizer(model)
    renderer = get_renderer("qwen3_instruct", tokenizer)
    asked = HarborTask("median", (task / "instruction.md").read_text(), task)
    prompt = renderer.build_generation_prompt(_initial_messages(asked, renderer, HarborBashTool(None))).to_ints()
    calls = [json.dumps({"name": "bash", "arguments": {"command": command}}) for command in COMMANDS]
    return prompt, [tokenizer.encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>", add_special_tokens=False)
                    for call in calls]


def teach(service: tinker.ServiceClient, model: str, task: Path) -> dict[str, str]:
    prompt, answers = texts(model, task)
    client = service.create_lora_training_client(model, rank=8, seed=0)
    data = []
    for answer in answers:
        tokens, weights = prompt + answer, [0.0] * len(prompt) + [1.0] * len(answer)
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={
            "target_tokens": torch.tensor(tokens[1:]), "weights": torch.tensor(weights[1:])}))
    for _ in range(40):
        outputs = client.forward_backward(data, "cross_entropy").result().loss_fn_outputs
        said = [sum(output["logprobs"].data[len(prompt) - 1:]) for output in outputs]
        if all(ABOUT_EVEN[0] < nats < ABOUT_EVEN[1] for nats in said):
            break
        client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    else:
        raise SystemExit(f"the two calls are not about as likely: {said}")
    return {"state": client.save_state("taught").result().path, "sampler": client.save_weights_for_sampler("taught").result().path}


def weigh(service: tinker.ServiceClient, model: str, task: Path, paths: list[str]) -> list[float]:
    prompt, answers = texts(model, task)
    advantages = []
    for path in paths:
        client = service.create_sampling_client(model_path=path)
        repairing, other = (sum(client.compute_logprobs(tinker.ModelInput.from_ints(prompt + answer)).result()[len(prompt):])
                            for answer in answers)
        advantages.append(repairing - other)
    return advantages


def main() -> None:
    what, url, model, task, *paths = sys.argv[1:]
    service = tinker.ServiceClient(base_url=url)
    result = teach(service, model, Path(task)) if what == "teach" else weigh(service, model, Path(task), paths)
    print(json.dumps(result))


main()
