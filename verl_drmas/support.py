"""verl's own switches under a team: each is supported or refused, in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from verl_drmas.advantage import ESTIMATORS, EXACT_LOSS_AGG_MODES, EXACT_POLICY_LOSSES
from verl_drmas.config import DrmasConfig

# verl's group estimators that take (rewards, mask, index, config) and no more; usable per agent with
# drmas.group_by=agent.
GROUP_ESTIMATORS = (
    "grpo",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "grpo_vectorized",
    "reinforce_plus_plus_baseline",
)
PER_AGENT = "drmas_per_agent"  # ours: runs one of them per (prompt, agent)
MGRPO = "mgrpo"
REFUSED_ESTIMATORS = {
    "gae": "it needs a critic, which values one agent's tokens and not a team's",
    "remax": "it needs a second, greedy rollout of every session",
    "gdpo": "it reads reward dimensions that a team's rows don't have",
    "optimal_token_baseline": "it needs sum_pi_squared of every token",
    "tir_optimal_token_baseline": "it needs sum_pi_squared of every token",
    "reinforce_plus_plus": "it whitens over the whole batch, so that one agent's scale moves another's",
}


@dataclass(frozen=True)
class Switch:
    """One of verl's switches.

    Attributes:
        key: Where it stands.
        says: What a team run makes of it.
        refused: True for a configuration that can't run; None for switches that are simply supported.
        default: verl's own setting, which `verl-drmas check` doesn't mention.
    """

    key: str
    says: str
    refused: Callable[[Any, DrmasConfig], bool] | None = None
    default: Any = False


def get(config: Any, key: str, default: Any = None) -> Any:
    """A key of an unresolved configuration; the default if it is absent or null."""
    value = OmegaConf.select(config, key, default=default, throw_on_missing=False)
    return default if value is None else value


def is_mgrpo(config: Any) -> bool:
    """The run's estimator is M-GRPO's."""
    return str(get(config, "algorithm.adv_estimator")) == MGRPO


def weighs_copies(config: Any, section: DrmasConfig) -> bool:
    """Copies of M-GRPO's trajectories are weights in the loss of the model whose agents the section is narrowed to; a
    model that nobody trains has no loss.
    """
    trained = any(section.trained(agent_id) for agent_id in section.agents)
    return is_mgrpo(config) and section.alignment.copies == "weights" and trained


def _weighs_rows(config: Any, section: DrmasConfig) -> bool:
    """The run writes row weights of its own, through verl's `rollout_is_weights`."""
    return section.advantage.balance != "none" or weighs_copies(config, section)


def _updates(config: Any, section: DrmasConfig) -> int:
    """Updates per step of the model whose agents the section is narrowed to."""
    models = {agent.model for agent in section.agents.values()} or set(section.models)
    own = [section.updates(model) for model in models]
    default = int(get(config, "data.train_batch_size", 1)) // int(
        get(config, "actor_rollout_ref.actor.ppo_mini_batch_size", 1)
    )
    return max(updates or default for updates in own)


SWITCHES = (
    Switch(
        "algorithm.norm_adv_by_std_in_grpo", "supported: false leaves out the division (std_scope none)", default=True
    ),
    Switch("algorithm.use_kl_in_reward", "supported: the statistics see the reward after the penalty"),
    Switch(
        "actor_rollout_ref.actor.use_kl_loss",
        "supported, but not with mgrpo, whose copies don't weigh the KL term: use algorithm.use_kl_in_reward, or "
        "drmas.alignment.copies=physical",
        lambda c, d: weighs_copies(c, d) and bool(get(c, "actor_rollout_ref.actor.use_kl_loss", False)),
    ),
    Switch(
        "algorithm.filter_groups.metric",
        "supported with metric=outcome (or acc), one value a session; metric=reward compares rows of different agents",
        lambda c, _: (
            bool(get(c, "algorithm.filter_groups.enable", False))
            and get(c, "algorithm.filter_groups.metric") not in ("outcome", "acc")
        ),
        default="reward",
    ),
    Switch(
        "algorithm.filter_groups.enable",
        "supported with drmas.faults.failed_sessions=drop; masked rows have no outcome that a group could be judged by",
        lambda c, d: bool(get(c, "algorithm.filter_groups.enable", False)) and d.faults.failed_sessions == "mask",
    ),
    Switch(
        "algorithm.rollout_correction.rollout_is",
        "supported without drmas.advantage.balance and mgrpo's copies, which are written to the same field "
        "(rollout_is_weights); set it to null, or the other to none (copies: drmas.alignment.copies=physical)",
        lambda c, d: _weighs_rows(c, d) and get(c, "algorithm.rollout_correction.rollout_is") is not None,
    ),
    Switch(
        "algorithm.rollout_correction.bypass_mode",
        "supported without drmas.advantage.balance and mgrpo's copies (but for drmas.alignment.copies=physical): its "
        "loss doesn't read row weights",
        lambda c, d: _weighs_rows(c, d) and bool(get(c, "algorithm.rollout_correction.bypass_mode", False)),
    ),
    Switch(
        "algorithm.rollout_correction.rollout_is_batch_normalize",
        "supported with one model: it divides by a mean over the rows of all of them",
        lambda c, d: (
            len(d.models) > 1 and bool(get(c, "algorithm.rollout_correction.rollout_is_batch_normalize", False))
        ),
    ),
    Switch(
        "algorithm.kl_ctrl.type",
        "adaptive is supported where one model trains on all rows: its controller looks at the mean over all of them",
        lambda c, d: (
            bool(get(c, "algorithm.use_kl_in_reward", False))
            and get(c, "algorithm.kl_ctrl.type") == "adaptive"
            and (len(d.models) > 1 or not all(d.trained(agent_id) for agent_id in d.agents))
        ),
        default="fixed",
    ),
    Switch(
        "actor_rollout_ref.rollout.disaggregation.enabled",
        "supported with one model: servers of several models are counted without it",
        lambda c, d: len(d.models) > 1 and bool(get(c, "actor_rollout_ref.rollout.disaggregation.enabled", False)),
    ),
    Switch(
        "actor_rollout_ref.actor.loss_agg_mode",
        f"mgrpo needs one of {', '.join(EXACT_LOSS_AGG_MODES)}, where a weight is as good as copies; or set "
        "drmas.alignment.copies=physical",
        lambda c, d: (
            weighs_copies(c, d) and get(c, "actor_rollout_ref.actor.loss_agg_mode") not in EXACT_LOSS_AGG_MODES
        ),
        default="token-mean",
    ),
    Switch(
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        f"mgrpo needs one of {', '.join(EXACT_POLICY_LOSSES)}; or set drmas.alignment.copies=physical",
        lambda c, d: (
            weighs_copies(c, d)
            and get(c, "actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla") not in EXACT_POLICY_LOSSES
        ),
        default="vanilla",
    ),
    Switch(
        "actor_rollout_ref.actor.entropy_coeff",
        "mgrpo's copies don't weigh the entropy term: set it to 0, or drmas.alignment.copies=physical",
        lambda c, d: weighs_copies(c, d) and float(get(c, "actor_rollout_ref.actor.entropy_coeff", 0.0)) != 0.0,
        default=0.0,
    ),
    Switch(
        "drmas.updates_per_step",
        "mgrpo's weights are as good as copies with one update a step: set it (and drmas.models.<id>.updates_per_step) "
        "to 1, or drmas.alignment.copies=physical",
        lambda c, d: weighs_copies(c, d) and _updates(c, d) > 1,
        default=None,
    ),
    Switch(
        "drmas.advantage.balance",
        "mgrpo balances by its alignment: set drmas.advantage.balance=none",
        lambda c, d: is_mgrpo(c) and d.advantage.balance != "none",
        default="none",
    ),
    Switch(
        "algorithm.use_pf_ppo",
        "refused: it resamples rows of one advantage estimator, gae, only",
        lambda c, _: bool(get(c, "algorithm.use_pf_ppo", False)),
    ),
    Switch(
        "reward.reward_model.enable",
        "refused: it scores a session's last row with the main tokenizer; score inside the workflow",
        lambda c, _: bool(get(c, "reward.reward_model.enable", False)),
    ),
    Switch(
        "distillation.enabled",
        "refused: verl computes teacher log-probs for a session's last row only",
        lambda c, _: bool(get(c, "distillation.enabled", False)),
    ),
    Switch("critic.enable", "refused: see gae", lambda c, _: bool(get(c, "critic.enable", False))),
    Switch(
        "trainer.v1.drmas_sync.parameter_sync_step",
        "refused above 1: drmas_sync trains on the sessions of its own step",
        lambda c, _: int(get(c, "trainer.v1.drmas_sync.parameter_sync_step", 1)) > 1,
        default=1,
    ),
    Switch(
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
        "supported within one job: which experts a token went to is not handed to another job",
        lambda c, d: (
            bool(get(c, "actor_rollout_ref.rollout.enable_rollout_routing_replay", False))
            and bool(d.remote or d.store is not None)
        ),
    ),
    Switch(
        "actor_rollout_ref.actor.shuffle",
        "refused: it undoes the spreading of padding rows, and an update of padding only has no tokens to average over",
        lambda c, _: bool(get(c, "actor_rollout_ref.actor.shuffle", False)),
    ),
    Switch(
        "drmas.request_seed",
        "supported with vllm: verl hands sampling parameters on as they are, and sglang's name for a seed is another",
        lambda c, d: d.request_seed is not None and get(c, "actor_rollout_ref.rollout.name") == "sglang",
    ),
    Switch(
        "actor_rollout_ref.rollout.temperature",
        "must be above 0: training divides the logits by it",
        lambda c, _: not float(get(c, "actor_rollout_ref.rollout.temperature", 1.0)) > 0,
        default=1.0,
    ),
    Switch(
        "actor_rollout_ref.model.use_fused_kernels",
        "supported unless agents sample at different temperatures: the fused loss takes one temperature",
        lambda c, d: (
            bool(get(c, "actor_rollout_ref.model.use_fused_kernels", False))
            and d.mixes_temperature(get(c, "actor_rollout_ref.rollout.temperature", 1.0))
        ),
    ),
    Switch(
        "actor_rollout_ref.actor.checkpoint.async_save",
        "refused: the tracker of a step is written when all its models are, and nobody is told when an async save ends",
        lambda c, _: bool(get(c, "actor_rollout_ref.actor.checkpoint.async_save", False)),
    ),
    Switch(
        "actor_rollout_ref.rollout.calculate_log_probs",
        "must be true with a frozen agent: its rows keep the sampled log-probs",
        lambda c, d: (
            not get(c, "actor_rollout_ref.rollout.calculate_log_probs", True)
            and not all(d.trained(agent_id) for agent_id in d.agents)
        ),
        default=True,
    ),
)


def switch_refusals(policy: Any, section: DrmasConfig) -> list[str]:
    """One line for every switch that stands in the way of one model.

    Args:
        policy: The run's configuration as the model sees it.
        section: The section with this model's agents alone.
    """
    return [
        f"{s.key}={get(policy, s.key)}: {s.says}"
        for s in SWITCHES
        if s.refused is not None and s.refused(policy, section)
    ]


def estimator_refusals(config: Any, section: DrmasConfig) -> list[str]:
    """One line if the estimator can't be a team's, or doesn't fit `drmas.group_by` or a pair of jobs."""
    lines = []
    estimator = str(get(config, "algorithm.adv_estimator", "gae"))
    per_agent = section.group_by == "agent"
    if estimator in REFUSED_ESTIMATORS:
        lines.append(
            f"algorithm.adv_estimator={estimator}: refused for teams: {REFUSED_ESTIMATORS[estimator]}; use drmas"
        )
    elif estimator == MGRPO and section.workflow is None:
        lines.append(
            f"algorithm.adv_estimator={MGRPO}: only a workflow says who the sub-agents are; set drmas.workflow.name"
        )
    elif per_agent and (estimator in ESTIMATORS or estimator == MGRPO):
        lines.append(f"drmas.group_by=agent: {estimator} sets its own groups; drop one of the two")
    elif estimator == PER_AGENT:
        if not (per_agent and get(config, "drmas_base_estimator")):  # both are there once the check has filled them in
            lines.append(
                f"algorithm.adv_estimator={PER_AGENT}: is set by the check; name verl's estimator and set "
                "drmas.group_by=agent"
            )
    elif (section.remote or section.store is not None) and spans_agents(estimator):
        lines.append(
            f"algorithm.adv_estimator={estimator}: its statistics are over all agents of a prompt, and a job of a pair "
            f"has the rewards of its own agents only; use drmas or {MGRPO}"
        )
    elif per_agent and estimator not in GROUP_ESTIMATORS:
        lines.append(f"drmas.group_by=agent: {estimator} is none of {', '.join(GROUP_ESTIMATORS)}")
    elif not per_agent and estimator in GROUP_ESTIMATORS:
        lines.append(
            f"algorithm.adv_estimator={estimator}: for a team set grpo_team (or drmas), or drmas.group_by=agent to run "
            f"{estimator} per agent"
        )
    return lines


def spans_agents(estimator: str) -> bool:
    """One of ours whose statistics are over all agents of a prompt."""
    switches = ESTIMATORS.get(estimator)
    return switches is not None and "prompt" in (switches.mean_scope, switches.std_scope)
