"""mini-swe-agent 2 from its baked runtime.

Owns its command line. Runs in Harbor's process inside the sandbox.
"""

from __future__ import annotations

from baked import BakedAgent


class MiniSweAgent(BakedAgent):
    program = "mini"

    @staticmethod
    def name() -> str:
        return "mini-swe-agent"

    def command(self, instruction: str) -> list[str]:
        limits = self.limits
        settings = {"model.model_kwargs.api_base": limits.api_base, "model.model_kwargs.temperature": limits.temperature,
                    "agent.step_limit": limits.per_instance_call_limit,
                    **{f"model.model_kwargs.{name}": value for name, value in limits.completion_kwargs.items()}}
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self.path, "-m", self.model_name or "openai/policy", "-t", instruction, "-y", "--exit-immediately",
                "-l", "0", "-c", "mini", *flags, "-o", "/logs/agent/mini.traj.json"]

    async def run(self, instruction, environment, context) -> None:
        await self.start(environment, self.command(instruction), {
            "OPENAI_API_KEY": "none", "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True"})
