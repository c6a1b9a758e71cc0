"""Calls every public method of the newest SDK's clients on a server with the tests' engine, and tells how each ends.

Owns the calls and what a good answer is. Does not judge outcomes: tests/contract/test_compatibility.py does.

    .venv/bin/python tests/support/compatibility.py        (writes docs/compatibility.md)
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tinker
from tinker import types
from tinker.lib.public_interfaces.api_future import APIFuture
from tinker.lib.public_interfaces.custom_loss import LossHandle
from tinker.lib.queue_state_logger import QueueState

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from data import sft  # noqa: E402
from fake_engine import FakeEngine  # noqa: E402
from server import TestServer  # noqa: E402

from verl_tinker.models import default_cache_dir, prepare_tiny  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
# A wrapper forwards each method of its client, which has a line of its own.
CLASSES = (
    tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient,
    tinker.APIFuture, tinker.BackcompatTrainingClientFuture, tinker.BackcompatSamplingClientFuture,
)
WORKS, NOT_OFFERED, REFUSED, BY_SDK, FAILS = "works", "not offered", "refused", "needs what is off", "FAILS"
PROMPT = types.ModelInput.from_ints([1, 2])
ONE_TOKEN = types.SamplingParams(max_tokens=1)
MONTH = {"starting_on": "2026-01-01T00:00:00Z", "ending_before": "2026-02-01T00:00:00Z"}


@dataclass
class Line:
    method: str
    outcome: str
    note: str = ""


class Clients:
    """One client of each class on one server, and fresh things for calls that use them up."""

    def __init__(self, server: TestServer, base_model: str):
        self.base_model = base_model
        self.service = tinker.ServiceClient(base_url=server.url, project_id="p", display_name="compatibility")
        self.rest, self.admin = tinker.RestClient(base_url=server.url), tinker.AdminClient(base_url=server.url)
        self.created = self.service.create_lora_training_client(base_model=base_model, rank=4)
        self.training = self.created.result(30)
        self.sampler_future = self.service.create_sampling_client(base_model=base_model)
        self.sampling = self.sampler_future.result(30)
        self.session_id = self.training.model_id.partition(":")[0]
        self._numbers = itertools.count()

    def name(self) -> str:
        return f"n{next(self._numbers)}"

    def state(self) -> str:
        return self.training.save_state(self.name()).result(30).path

    def gradient(self) -> None:
        self.training.forward_backward([sft()], "cross_entropy").result(30)

    def ref(self) -> tuple[str, str]:
        """A run's id and a checkpoint's id in it."""
        run, kind, name = self.state().removeprefix("tinker://").split("/")
        return run, f"{kind}/{name}"


@dataclass
class Call:
    """The arguments of a call, and whether its answer is the one that is due."""

    arguments: Callable[[Clients], tuple[tuple, dict]]
    is_good: Callable[[Clients, Any], bool]


def call(is_good: Callable[[Clients, Any], bool], *args: Any, **kwargs: Any) -> Call:
    """An argument that is a lambda is called with the clients when its turn comes."""

    def made(c: Clients, value: Any) -> Any:
        return value(c) if inspect.isfunction(value) and value.__name__ == "<lambda>" else value

    return Call(lambda c: (tuple(made(c, a) for a in args), {k: made(c, v) for k, v in kwargs.items()}), is_good)


def is_a(kind: type) -> Callable[[Clients, Any], bool]:
    return lambda c, r: isinstance(r, kind)


def nothing(c: Clients, r: Any) -> bool:
    return r is None


def custom_loss(data, logprobs):
    return -sum(lp.sum() for lp in logprobs), {"mine": 1.0}


def traced_loss(logprobs):
    return -logprobs.sum(), {"custom/total:sum": logprobs.sum()}


BASE, STATE, NAME = (lambda c: c.base_model), (lambda c: c.state()), (lambda c: c.name())
RUN, SESSION = (lambda c: c.training.model_id), (lambda c: c.session_id)
SAMPLER = (lambda c: c.training.save_weights_for_sampler(c.name()).result(30).path)
EXPORT = (lambda c: c.training.save_weights_external(c.name()).result(30).path)
TELEMETRY = call(lambda c, r: r is None or hasattr(r, "log"))
CONSOLE = call(lambda c, r: c.session_id in r)
TOKENIZER = call(lambda c, r: r.decode(r("a b")["input_ids"]) == "a b")

CALLS: dict[str, dict[str, Call]] = {
    "ServiceClient": {
        "create_lora_training_client": call(is_a(tinker.TrainingClient), base_model=BASE, rank=4),
        "create_training_client_from_state": call(is_a(tinker.TrainingClient), STATE),
        "create_training_client_from_state_with_optimizer": call(is_a(tinker.TrainingClient), STATE),
        "create_sampling_client": call(lambda c, r: r.get_base_model() == c.base_model, model_path=SAMPLER),
        "create_rest_client": call(is_a(tinker.RestClient)),
        "create_custom_loss": call(is_a(LossHandle), traced_loss, {"logprobs": 1}),
        "copy_weights": call(lambda c, r: r.startswith("tinker://copy-"), STATE),
        "get_server_capabilities": call(lambda c, r: r.supported_models[0].model_name == c.base_model),
        "get_console_url": CONSOLE,
        "get_telemetry": TELEMETRY,
        "close": call(nothing, "success"),
    },
    "TrainingClient": {
        "create_sampling_client": call(is_a(tinker.SamplingClient), SAMPLER),
        "forward": call(lambda c, r: len(r.loss_fn_outputs) == 1, [sft()], "cross_entropy"),
        "forward_backward": call(lambda c, r: "loss:sum" in r.metrics, [sft()], "cross_entropy"),
        "forward_backward_custom": call(lambda c, r: r.metrics["mine"] == 1.0, [sft()], custom_loss),
        "get_console_url": CONSOLE,
        "get_info": call(lambda c, r: r.lora_rank == 4),
        "get_telemetry": TELEMETRY,
        "get_tokenizer": TOKENIZER,
        "load_state": call(lambda c, r: r.path, STATE),
        "load_state_with_optimizer": call(lambda c, r: r.path, STATE),
        "optim_step": call(lambda c, r: r.metrics["grad_norm"] > 0, lambda c: c.gradient() or types.AdamParams()),
        "save_state": call(lambda c, r: "/weights/" in r.path, NAME),
        "save_weights_and_get_sampling_client": call(is_a(tinker.SamplingClient)),
        "save_weights_external": call(lambda c, r: "/external_weights/" in r.path, NAME),
        "save_weights_for_sampler": call(lambda c, r: "/sampler_weights/" in r.path, NAME),
    },
    "SamplingClient": {
        "compute_logprobs": call(lambda c, r: len(r) == 2 and r[0] is None, PROMPT),
        "create": call(is_a(tinker.SamplingClient), lambda c: c.service.holder, base_model=BASE),
        "from_sampler_handle": call(is_a(tinker.SamplingClient), lambda c: c.sampling.get_sampler_handle()),
        "get_base_model": call(lambda c, r: r == c.base_model),
        "get_sampler_handle": call(lambda c, r: isinstance(r, str)),
        "get_telemetry": TELEMETRY,
        "get_tokenizer": TOKENIZER,
        "on_queue_state_change": call(nothing, QueueState.ACTIVE, None),
        "sample": call(lambda c, r: len(r.sequences) == 1, PROMPT, 1, ONE_TOKEN),
    },
    "RestClient": {
        "assign_session_project": call(nothing, SESSION, "p2"),
        "copy_weights": call(lambda c, r: r.startswith("tinker://copy-"), STATE, "p"),
        "delete_checkpoint": call(nothing, lambda c: c.ref()[0], lambda c: c.ref()[1]),
        "delete_checkpoint_from_tinker_path": call(nothing, STATE),
        "export_session_trace": call(is_a(str), SESSION),
        "get_audit_log": call(is_a(types.AuditLogResponse)),
        "get_billing_usage": call(is_a(types.BillingUsageResponse), **MONTH),
        "get_current_checkpoint_storage_usage": call(is_a(types.CurrentCheckpointStorageUsageResponse)),
        "get_external_weights_urls": call(lambda c, r: "weights.json" in r.urls, EXPORT),
        "get_sampler": call(lambda c, r: r.base_model == c.base_model, lambda c: f"{c.session_id}:sample:0"),
        "get_server_capabilities": call(lambda c, r: r.supported_models[0].model_name == c.base_model),
        "get_session": call(lambda c, r: c.training.model_id in r.training_run_ids, SESSION),
        "get_telemetry": TELEMETRY,
        "get_training_run": call(lambda c, r: r.lora_rank == 4, RUN),
        "get_training_run_by_tinker_path": call(lambda c, r: r.training_run_id == c.training.model_id, STATE),
        "get_weights_info_by_tinker_path": call(lambda c, r: r.lora_rank == 4, STATE),
        "list_checkpoints": call(lambda c, r: bool(r.checkpoints), lambda c: c.ref()[0]),
        "list_sessions": call(lambda c, r: c.session_id in r.sessions),
        "list_training_runs": call(lambda c, r: r.cursor.total_count > 0),
        "list_user_checkpoints": call(lambda c, r: r.cursor.total_count > 0),
        "publish_checkpoint_from_tinker_path": call(nothing, STATE),
        "search_sessions": call(
            lambda c, r: [s.session_id for s in r.sessions] == [c.session_id],
            types.SessionSearchRequest(display_name="compat")),
        "set_checkpoint_ttl_from_tinker_path": call(nothing, STATE, 3600),
        "unpublish_checkpoint_from_tinker_path": call(nothing, STATE),
        "whoami": call(is_a(types.WhoamiResponse)),
    },
    "AdminClient": {
        "get_audit_log": call(is_a(types.AuditLogResponse)),
        "get_billing_usage": call(is_a(types.BillingUsageResponse), **MONTH),
        "get_current_checkpoint_storage_usage": call(is_a(types.CurrentCheckpointStorageUsageResponse)),
        "get_telemetry": TELEMETRY,
    },
}

ANSWER = call(lambda c, r: r is not None)
FUTURE = {"result": ANSWER, "result_async": ANSWER, "future": ANSWER, "coroutine": ANSWER}
CALLS["APIFuture"] = FUTURE
CALLS["BackcompatTrainingClientFuture"] = {**CALLS["TrainingClient"], **FUTURE}
CALLS["BackcompatSamplingClientFuture"] = {**CALLS["SamplingClient"], **FUTURE}

IMAGE = types.ModelInput(chunks=[types.ImageChunk(data=b"png", format="png")])
# Arguments that the SDK has and this server does not take.
REFUSALS: dict[str, Callable[[Clients], Any]] = {
    'forward_backward(loss_fn="custom")': lambda c: c.training.forward_backward([sft()], "custom"),
    'forward_backward(loss_fn="stable_reinforce") without provenance': lambda c: c.training.forward_backward([sft()], "stable_reinforce"),
    "optim_step(DimuonParams)": lambda c: c.training.optim_step(types.DimuonParams(learning_rate=0.1)),
    "sample(prompt=IMAGE)": lambda c: c.sampling.sample(IMAGE, 1, ONE_TOKEN),
}


def public_methods(kind: type) -> list[str]:
    return sorted(name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_"))


def lines(c: Clients) -> Iterator[Line]:
    targets = {
        "ServiceClient": c.service, "TrainingClient": c.training, "SamplingClient": c.sampling, "RestClient": c.rest,
        "AdminClient": c.admin, "BackcompatTrainingClientFuture": c.created,
        "BackcompatSamplingClientFuture": c.sampler_future,
    }
    ordered = [(kind.__name__, name) for kind in CLASSES for name in public_methods(kind)]
    # Closing ends the session of all the others.
    for owner, name in sorted(ordered, key=lambda pair: pair[1] == "close"):
        known = CALLS[owner].get(name) or CALLS[owner].get(name.removesuffix("_async"))
        if known is None:
            yield Line(f"{owner}.{name}", FAILS, "tests/support/compatibility.py has no call for it")
        else:
            target = targets.get(owner) or c.training.forward([sft()], "cross_entropy")
            yield outcome(c, f"{owner}.{name}", lambda: _called(c, target, name, known))


def refusals(c: Clients) -> list[Line]:
    return [outcome(c, text, lambda make=make: bool(settled(make(c)))) for text, make in REFUSALS.items()]


def _called(c: Clients, target: Any, name: str, known: Call) -> bool:
    args, kwargs = known.arguments(c)
    return known.is_good(c, settled(getattr(target, name)(*args, **kwargs)))


def settled(answer: Any) -> Any:
    """The value behind coroutines and futures."""
    if inspect.iscoroutine(answer):
        answer = asyncio.run(_awaited(answer))
    return settled(answer.result(30)) if isinstance(answer, (APIFuture, Future)) else answer


async def _awaited(answer: Any) -> Any:
    return await answer


def outcome(c: Clients, method: str, attempt: Callable[[], bool]) -> Line:
    try:
        return Line(method, WORKS) if attempt() else Line(method, FAILS, "the answer is not the one that is due")
    except tinker.NotFoundError as error:
        detail = error.body["detail"]
        return Line(method, NOT_OFFERED if "not offered" in detail else FAILS, _plain(c, detail))
    except tinker.BadRequestError as error:
        return Line(method, REFUSED, _plain(c, error.body["detail"]))
    except tinker.RequestFailedError as error:
        # The SDK wraps the server's words in its own.
        words = str(error).removeprefix("Request failed: ").partition(" for self.request_id=")[0]
        return Line(method, REFUSED if error.category.value == "user" else FAILS, _plain(c, words))
    except RuntimeError as error:
        return Line(method, BY_SDK, _plain(c, str(error)))
    except Exception as error:
        return Line(method, FAILS, f"{type(error).__name__}: {error}")


def _plain(c: Clients, text: str) -> str:
    return text.replace(c.session_id, "SESSION").replace(c.base_model, "MODEL").replace("|", "\\|").splitlines()[0]


def measure() -> tuple[list[Line], list[Line]]:
    """Every public method with its outcome, and every refusal."""
    os.environ.setdefault("TINKER_API_KEY", "tml-compatibility")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = TestServer(Path(folder) / "checkpoints", max_runs=64)
        # Tokenizers are read from the folder that the name of the base model is.
        model = prepare_tiny(default_cache_dir())
        infos = [replace(info, name=str(model)) for info in FakeEngine().base_models()[:1]]
        server.engine.base_models = lambda: infos
        try:
            c = Clients(server, str(model))
            refused = refusals(c)
            return list(lines(c)), refused
        finally:
            server.stop()


def page(methods: list[Line], refused: list[Line]) -> str:
    """The page; a method and its async form share a line when they end alike."""
    parts = [INTRODUCTION.format(version=tinker.__version__)]
    rows: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for line in methods:
        owner, name = line.method.split(".")
        key = (name.removesuffix("_async"), line.outcome, line.note)
        rows.setdefault(owner, {}).setdefault(key, []).append(name)
    for owner, found in rows.items():
        parts.append(f"\n## {owner}\n\n| method | outcome | what the server says |\n|---|---|---|\n")
        for (_, result, note), names in sorted(found.items()):
            parts.append(f"| {', '.join(f'`{name}`' for name in names)} | {result} | {note} |\n")
    parts.append(REFUSED_HEAD)
    parts += [f"| `{line.method}` | {line.note} |\n" for line in refused]
    return "".join(parts)


INTRODUCTION = """# Compatibility

Every public method of the clients of SDK {version}, called against this server with the tests' engine, and how it ends.
`tests/support/compatibility.py` writes this page; `tests/contract/test_compatibility.py` compares it with the server as
it is and with the SDK as it is installed.

- **works**: the call returned, and its answer is the one that is due.
- **not offered**: 404 with the words shown; the method belongs to the vendor's own service.
- **needs what is off**: the SDK itself refuses without a call to the server.
"""
REFUSED_HEAD = """
## Arguments that are refused

Each is an error of category `user`, from the future of the call; nothing changes.

| call | what the server says |
|---|---|
"""

if __name__ == "__main__":
    logging.disable()
    PAGE.write_text(page(*measure()))
