"""Result files: their names and fields, and trajectories as text for people.

Owns the form of summary.json, result.json, step_result.json, rollout_NN.json and their texts. Does not compute them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harbor_env.episode import Episode


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: a run may be stopped at any moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.rename(file)


def summary(episode: Episode) -> dict[str, Any]:
    """What every mode says of an episode. `reward` is null unless Harbor's verifier scored it validly."""
    first = next((turn for turn in sorted(episode.turns, key=lambda t: t.index) if turn.sampled), None)
    return {
        "task_id": episode.task_id,
        "reward": episode.reward,
        "episode_done": episode.is_done,
        "turns_used": len(episode.turns),
        "time_seconds": round(episode.seconds, 1),
        "cause": episode.cause,
        "error": episode.error,
        "rewards": dict(episode.trial.rewards) if episode.trial else {},
        "tolerated_error": episode.trial.tolerated if episode.trial else None,
        "first_action_tokens": list(first.sampled) if first else [],
    }


def turns(episode: Episode) -> list[dict[str, Any]]:
    """Every turn as it was sampled: enough to train on it again."""
    return [{"index": turn.index, "prompt_tokens": list(turn.prompt), "sampled_tokens": list(turn.sampled),
             "logprobs": list(turn.logprobs), "stop_reason": turn.stop_reason,
             "answer": turn.answer["choices"][0]["message"] if turn.answer else None}
            for turn in sorted(episode.turns, key=lambda t: t.index)]


def rollout(episode: Episode, advantage: float | None) -> dict[str, Any]:
    return {**summary(episode), "return": episode.reward, "advantage": advantage, "turns": turns(episode)}


def trajectory_text(episode: Episode) -> str:
    """The conversation as the agent led it: new messages and the model's answer, turn by turn."""
    lines = [f"task {episode.task_id}   reward {episode.reward}   turns {len(episode.turns)}   "
             f"cause {episode.cause or 'none'}"]
    seen = 0
    for turn in sorted(episode.turns, key=lambda t: t.index):
        messages = turn.request.get("messages", [])
        if len(messages) < seen:
            seen = 0
        for message in messages[seen:]:
            lines.append(f"\n--- {message.get('role')} ---\n{_text(message)}")
        answer = turn.answer["choices"][0]["message"]
        lines.append(f"\n--- turn {turn.index}: {len(turn.prompt)} prompt tokens, {len(turn.sampled)} sampled, "
                     f"{turn.stop_reason} ---\n{_text(answer)}")
        seen = len(messages) + 1
    return "\n".join([*lines, *([f"\nended: {episode.error}"] if episode.error else [])]) + "\n"


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])
    calls = [f"[{c['function']['name']}] {c['function']['arguments']}" for c in message.get("tool_calls") or []]
    return "\n".join([text, *calls]).strip()
