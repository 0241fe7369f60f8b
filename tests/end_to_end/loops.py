"""Agent loops on verl's own base class, for tests: they know nothing of verl-drmas but its seed function."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from verl_drmas.rollout.seeds import call_seed


class SeededLoop(AgentLoopBase):
    """One LLM call with a seed that depends on the row only, so that two trainers sample the same text."""

    async def call(
        self, messages: list[dict], sampling_params: dict[str, Any], path: str, **row: Any
    ) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(messages)
        seed = call_seed(7, index=row["index"], session=row["session_id"], step=row["global_steps"], path=path)
        output = await self.server_manager.generate(
            uuid4().hex, prompt_ids=prompt, sampling_params={**sampling_params, "seed": seed}
        )
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields=dict(output.extra_fields),
        )


@register("one_call")
class OneCall(SeededLoop):
    """One row without a reward (verl's reward loop scores it) and without an agent id."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        return await self.call(list(row["raw_prompt"]), sampling_params, "call", **row)


@register("two_agents")
class TwoAgents(SeededLoop):
    """A stock multi-output loop that names its agents and their rewards itself."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        outputs = []
        for agent_id in ("writer", "editor")[: 1 + row["session_id"] % 2]:
            output = await self.call(list(row["raw_prompt"]), sampling_params, agent_id, **row)
            output.reward_score = float(sum(output.response_ids) % 3)
            output.extra_fields |= {"agent_id": agent_id, "reward_extra_info": {}}
            outputs.append(output)
        return outputs
