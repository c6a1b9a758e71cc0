"""SWE-agent 1 from its baked runtime, on the task's repository in place.

Owns its command line. Runs in Harbor's process inside the sandbox.
"""

from __future__ import annotations

import json

from baked import BakedAgent

PROBLEM = "/logs/agent/problem_statement.md"


class SweAgent(BakedAgent):
    program = "sweagent"

    @staticmethod
    def name() -> str:
        return "swe-agent"

    def command(self, repository: str) -> list[str]:
        limits = self.limits
        model = {"name": self.model_name or "openai/policy", "api_base": limits.api_base, "api_key": "none",
                 "per_instance_cost_limit": 0, "total_cost_limit": 0,
                 "per_instance_call_limit": limits.per_instance_call_limit, "max_input_tokens": limits.max_input_tokens,
                 "max_output_tokens": limits.max_output_tokens, "temperature": limits.temperature,
                 "completion_kwargs": limits.completion_json}
        keep = [{"type": "last_n_observations", "n": limits.last_n_observations}]
        return [self.path, "run", *(f"--agent.model.{name}={value}" for name, value in model.items()),
                f"--agent.templates.max_observation_length={limits.max_observation_length}",
                f"--agent.history_processors={json.dumps(keep)}", f"--problem_statement.path={PROBLEM}",
                "--env.deployment.type=local", "--env.repo.type=preexisting", f"--env.repo.repo_name={repository}",
                "--output_dir=/logs/agent/swe-agent-output"]

    async def run(self, instruction, environment, context) -> None:
        statement = self.logs_dir / "problem_statement.md"
        statement.write_text(instruction)
        await environment.upload_file(statement, PROBLEM)
        where = await environment.exec("if [ -d /testbed ]; then echo /testbed; else pwd; fi")
        await self.start(environment, self.command((where.stdout or "").strip()), {
            "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"})
