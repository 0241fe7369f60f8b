"""An estimator for the learning control: `drmas` after the rewards were shuffled among the rows of each agent.

Named by VERL_USE_EXTERNAL_MODULES, which verl imports first of all; so it registers when verl's registry is there.
"""

import numpy as np
import torch
import wrapt

SEED = 5


@wrapt.when_imported("verl.trainer.ppo.core_algos")
def register(core_algos) -> None:
    draw = np.random.default_rng(SEED)

    @core_algos.register_adv_est("permuted")
    def permuted(token_level_rewards, response_mask, **kwargs):
        from verl_drmas.trainer.step import current_rows

        agents = np.array([row.agent_id if row else None for row in current_rows("permuted").rows], dtype=object)
        scores = token_level_rewards.sum(-1)
        for agent_id in {a for a in agents if a is not None}:
            mine = np.flatnonzero(agents == agent_id)
            scores[torch.from_numpy(mine)] = scores[torch.from_numpy(draw.permutation(mine))]
        rewards = torch.zeros_like(token_level_rewards)
        rewards[:, 0] = scores
        return core_algos.get_adv_estimator_fn("drmas")(
            token_level_rewards=rewards, response_mask=response_mask, **kwargs
        )
