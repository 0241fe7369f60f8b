"""The estimators as verl calls them: real rows only, agent by agent, and never a silent GRPO."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_drmas.advantage import ESTIMATORS, group_advantage, mgrpo_advantage
from verl_drmas.config import parse
from verl_drmas.rollout.rows import Row
from verl_drmas.support import GROUP_ESTIMATORS, MGRPO
from verl_drmas.trainer import estimators
from verl_drmas.trainer.alignment import StepAlignment
from verl_drmas.trainer.step import StepRows

AGENTS = ("solver", "verifier")


def section(**advantage):
    agents = {agent: {"model": "base", "invalid_penalty": 0.5} for agent in AGENTS}
    return parse({"agents": agents, "advantage": advantage})


def batch(seed=0, *, prompts=3, sessions=4, padding=5, options=None, base=None, invalid=False):
    """A step of two agents with unequal activations: (StepRows, rewards, mask). Padding rows stand in between."""
    rng = np.random.default_rng(seed)
    rows = []
    for uid in range(prompts):
        for session in range(sessions):
            for activation in range(int(rng.integers(2, 4))):
                valid = not invalid or bool(rng.random() < 0.7)
                rows.append(Row(f"p{uid}", session, activation, uid, AGENTS[activation % 2], "base", valid=valid))
    rows += [None] * padding
    rows = [rows[i] for i in rng.permutation(len(rows))]
    length = 6
    rewards, mask = torch.zeros(len(rows), length), torch.zeros(len(rows), length, dtype=torch.int64)
    for i, row in enumerate(rows):
        if row is None:
            continue
        tokens = int(rng.integers(1, length + 1))
        mask[i, :tokens] = 1
        mask[i, 1 : tokens - 1] = torch.from_numpy(rng.integers(0, 2, max(0, tokens - 2)))  # observations inside
        rewards[i, tokens - 1] = float(rng.integers(0, 4))
    return StepRows(rows, section(**(options or {})), base), rewards, mask


def run(step, rewards, mask, name, **config):
    """Through verl's own advantage stage."""
    uid = np.array(["pad" if row is None else row.uid for row in step.rows], dtype=object)
    keys = [f"pad_{i}_0" if r is None else f"{r.uid}_{r.session}_{r.activation}" for i, r in enumerate(step.rows)]
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": uid}
    )
    algorithm = AlgoConfig(adv_estimator=name, **config)
    with step.current():
        data = compute_advantage_for_multi_trajectories(
            data,
            keys,
            adv_estimator=name,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )
    return data.batch["advantages"], data.batch["returns"]


def per_row(advantage, mask):
    """The one value of each row, after checking that it is one."""
    first = mask.argmax(1, keepdim=True)
    value = advantage.gather(1, first)
    assert torch.equal(advantage, value * mask)
    return value.squeeze(1).double().numpy()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equals_group_advantage_over_the_real_rows(name):
    step, rewards, mask = batch()
    advantage, returns = run(step, rewards, mask, name)
    scores = rewards.sum(-1).numpy()[step.real]
    expected = group_advantage(scores, **step.ids(), **vars(ESTIMATORS[name]))
    np.testing.assert_allclose(per_row(advantage, mask)[step.real], expected, rtol=1e-6)
    assert torch.equal(advantage, returns)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_array_equal(step.scores, scores)
    np.testing.assert_array_equal(step.advantage, expected)
    np.testing.assert_array_equal(step.tokens, mask.sum(-1).numpy()[step.real])


@pytest.mark.parametrize("name", [*ESTIMATORS, estimators.PER_AGENT])
def test_padding_gets_nothing_and_changes_nothing(name):
    step, rewards, mask = batch(base="rloo")
    rewards[~torch.from_numpy(step.real)] = 1e6  # whatever a padding row may hold
    mask[~torch.from_numpy(step.real), 0] = 1
    advantage, _ = run(step, rewards, mask, name)
    padding = ~torch.from_numpy(step.real)
    assert advantage[padding].abs().sum() == 0
    alone = StepRows(step.known, step.section, "rloo")
    without, _ = run(alone, rewards[step.real], mask[step.real], name)
    assert torch.equal(advantage[step.real], without)


@pytest.mark.parametrize("name", [*ESTIMATORS, estimators.PER_AGENT, MGRPO])
def test_without_a_team_trainer_it_names_what_to_set(name):
    with pytest.raises(RuntimeError, match=rf"adv_estimator={name} .* trainer\.v1\.trainer_mode=drmas_sync"):
        get_adv_estimator_fn(name)(torch.zeros(2, 3), torch.ones(2, 3), index=np.array(["a", "a"]))


def test_the_rows_are_gone_after_the_stage():
    step, rewards, mask = batch()
    with pytest.raises(ZeroDivisionError), step.current():
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="drmas_sync"):
        get_adv_estimator_fn("drmas")(rewards, mask)


def test_verls_switch_for_the_division():
    step, rewards, mask = batch()
    advantage, _ = run(step, rewards, mask, "drmas", norm_adv_by_std_in_grpo=False)
    scores = rewards.sum(-1).numpy()[step.real]
    switches = {**vars(ESTIMATORS["drmas"]), "std_scope": "none"}
    expected = group_advantage(scores, **step.ids(), **switches)
    np.testing.assert_allclose(per_row(advantage, mask)[step.real], expected, rtol=1e-6)


def test_the_section_decides_the_options():
    for sessions, options in ((3, {"ddof": 0}), (3, {"eps": 0.5}), (3, {"std_floor": 2.0}), (1, {"singleton": "raw"})):
        step, rewards, mask = batch(sessions=sessions, options=options)
        advantage, _ = run(step, rewards, mask, "drmas")
        scores = rewards.sum(-1).numpy()[step.real]
        expected = group_advantage(scores, **step.ids(), **vars(ESTIMATORS["drmas"]), **options)
        plain = group_advantage(scores, **step.ids(), **vars(ESTIMATORS["drmas"]))
        assert np.abs(expected - plain).max() > 1e-3, options
        np.testing.assert_allclose(per_row(advantage, mask)[step.real], expected, rtol=1e-6)


def test_an_invalid_actions_penalty_inside_and_outside():
    for place in ("inside", "outside"):
        step, rewards, mask = batch(invalid=True, options={"penalty": place})
        assert 0 < sum(not row.valid for row in step.known) < len(step.known)
        advantage, _ = run(step, rewards, mask, "drmas")
        scores = rewards.sum(-1).numpy()[step.real]
        penalty = np.array([0.0 if row.valid else 0.5 for row in step.known])
        switches = vars(ESTIMATORS["drmas"])
        if place == "inside":
            expected = group_advantage(scores - penalty, **step.ids(), **switches)
        else:
            expected = group_advantage(scores, **step.ids(), **switches) - penalty
        np.testing.assert_allclose(per_row(advantage, mask)[step.real], expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(step.scores, scores)  # before the penalty, for the logs


def own_rows(step, agent_id):
    return np.array([row is not None and row.agent_id == agent_id for row in step.rows])


# These also use the whole batch, so that agents can't be computed one by one; see the two tests after this one.
WHOLE_BATCH = ("gpg", "reinforce_plus_plus_baseline")
SEPARABLE = [name for name in GROUP_ESTIMATORS if name not in WHOLE_BATCH]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("base", SEPARABLE)
def test_verls_own_estimators_run_on_each_agents_rows_alone(base, norm):
    step, rewards, mask = batch(sessions=5, base=base)
    advantage, returns = run(step, rewards, mask, estimators.PER_AGENT, norm_adv_by_std_in_grpo=norm)
    function, config = get_adv_estimator_fn(base), AlgoConfig(norm_adv_by_std_in_grpo=norm)
    extra = {"norm_adv_by_std_in_grpo": norm} if "grpo" in base else {}
    for agent_id in AGENTS:
        mine = own_rows(step, agent_id)
        uid = np.array([row.uid for row, m in zip(step.rows, mine, strict=True) if m], dtype=object)
        expected, expected_returns = function(
            token_level_rewards=rewards[mine], response_mask=mask[mine], index=uid, config=config, **extra
        )
        torch.testing.assert_close(advantage[mine], expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(returns[mine], expected_returns, rtol=1e-6, atol=1e-7)
        assert expected.abs().max() > 0.1
    np.testing.assert_allclose(per_row(advantage, mask)[step.real], step.advantage, rtol=1e-6)


def test_verls_gpg_scales_by_the_share_of_real_rows_that_scored():
    step, rewards, mask = batch(sessions=5, base="gpg", padding=7)
    advantage, _ = run(step, rewards, mask, estimators.PER_AGENT)
    scored = (rewards.sum(-1) > 0).numpy()
    for agent_id in AGENTS:
        mine = own_rows(step, agent_id)
        uid = np.array([row.uid for row, m in zip(step.rows, mine, strict=True) if m], dtype=object)
        alone, _ = get_adv_estimator_fn("gpg")(token_level_rewards=rewards[mine], response_mask=mask[mine], index=uid)
        factor = (step.real.sum() / scored.sum()) / (mine.sum() / scored[mine].sum())
        torch.testing.assert_close(advantage[mine], alone * factor, rtol=1e-5, atol=1e-6)


def test_verls_baseline_estimator_takes_each_agents_mean_before_it_whitens():
    step, rewards, mask = batch(sessions=5, base="reinforce_plus_plus_baseline")
    advantage, _ = run(step, rewards, mask, estimators.PER_AGENT)
    shifted = rewards.clone()
    shifted[own_rows(step, "solver"), -1] += 10.0  # all scores of one agent by the same amount
    moved, _ = run(step, shifted, mask, estimators.PER_AGENT)
    torch.testing.assert_close(advantage, moved, rtol=1e-4, atol=1e-5)
    assert advantage.abs().max() > 0.5


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_a_rewards_kl_terms_count_as_their_sum_to_the_bit(place):
    """A dump keeps the sum, and `verl-drmas replay` has nothing else."""
    step, rewards, mask = batch(prompts=9, sessions=5, base="rloo", invalid=True, options={"penalty": place})
    for row in step.section.agents.values():
        row.invalid_penalty = 0.3
    rewards = rewards - 0.1 * torch.rand(rewards.shape, generator=torch.Generator().manual_seed(0)) * mask
    summed = torch.zeros_like(rewards)
    summed[:, -1] = rewards.sum(-1)
    advantage, _ = run(step, rewards, mask, estimators.PER_AGENT)
    again, _ = run(step, summed, mask, estimators.PER_AGENT)
    assert torch.equal(advantage, again) and advantage.abs().max() > 0.5


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_verls_own_estimators_take_the_penalty_too(place):
    step, rewards, mask = batch(sessions=5, base="rloo", invalid=True, options={"penalty": place})
    before = rewards.clone()
    advantage, _ = run(step, rewards, mask, estimators.PER_AGENT)
    assert torch.equal(rewards, before)
    penalty = torch.zeros(len(step.rows))
    penalty[torch.from_numpy(step.real)] = torch.tensor([0.0 if row.valid else 0.5 for row in step.known])
    for agent_id in AGENTS:
        mine = own_rows(step, agent_id)
        uid = np.array([row.uid for row, m in zip(step.rows, mine, strict=True) if m], dtype=object)
        seen = rewards[mine].clone()
        if place == "inside":
            seen[:, -1] -= penalty[mine]
        expected, _ = get_adv_estimator_fn("rloo")(token_level_rewards=seen, response_mask=mask[mine], index=uid)
        if place == "outside":
            expected = expected - penalty[mine].unsqueeze(-1) * mask[mine]
        torch.testing.assert_close(advantage[mine], expected, rtol=1e-5, atol=1e-6)


def test_row_order_does_not_matter():
    step, rewards, mask = batch()
    advantage, _ = run(step, rewards, mask, "drmas")
    order = torch.randperm(len(step.rows), generator=torch.Generator().manual_seed(1))
    moved = StepRows([step.rows[i] for i in order], step.section)
    shuffled, _ = run(moved, rewards[order], mask[order], "drmas")
    torch.testing.assert_close(shuffled, advantage[order], rtol=1e-6, atol=1e-7)


# -- M-GRPO ------------------------------------------------------------------------------------------------------------

TARGET = 3


def delegations(seed=0, *, padding=5, mode="sample", **kwargs):
    """A step in which the solver delegates 0 to 5 times a session to the verifier: (StepRows, rewards, mask)."""
    options = {"ddof": 0, "eps": 0.0} | kwargs.pop("options", {})
    step, rewards, mask = batch(seed, sessions=4, padding=padding, options=options, **kwargs)
    rng = np.random.default_rng(seed)
    rows, order = [], 0
    for _ in step.known:  # the same rewards and masks, with other ids
        if order == 0:
            session, calls = len({(r.uid, r.session) for r in rows}), int(rng.integers(0, 6))
        agent, path = (AGENTS[0], "main") if order == 0 else (AGENTS[1], f"main/{order}")
        valid = step.known[len(rows)].valid
        rows.append(Row(f"p{session // 4}", session % 4, order, session // 4, agent, "base", valid=valid, path=path))
        order = (order + 1) % (calls + 1)
    known = iter(rows)
    step.rows = [None if row is None else next(known) for row in step.rows]
    step.alignment = StepAlignment((AGENTS[1],), {AGENTS[1]: TARGET}, mode, 11, 4)
    return step, rewards, mask


def aligned(step, scores, **options):
    """M-GRPO's numbers of the real rows."""
    rows = step.known
    return mgrpo_advantage(
        scores,
        activation=[row.activation for row in rows],
        index=[row.index for row in rows],
        aligned=[AGENTS[1]],
        target=TARGET,
        mode=step.alignment.mode,
        seed=11,
        step=4,
        **step.ids(),
        **options,
    )


@pytest.mark.parametrize("mode", ["sample", "expected", "mask", "none"])
def test_mgrpo_is_computed_over_the_real_rows(mode):
    step, rewards, mask = delegations(mode=mode)
    advantage, returns = run(step, rewards, mask, MGRPO)
    scores = rewards.sum(-1).numpy()[step.real]
    expected = aligned(step, scores)
    np.testing.assert_allclose(per_row(advantage, mask)[step.real], expected.advantage, rtol=1e-6)
    assert torch.equal(advantage, returns)
    assert np.abs(expected.advantage).max() > 0.5
    np.testing.assert_array_equal(step.copies, expected.copies)
    np.testing.assert_array_equal(step.scores, scores)
    np.testing.assert_array_equal(step.advantage, expected.advantage)
    np.testing.assert_array_equal(step.tokens, mask.sum(-1).numpy()[step.real])
    assert (mode == "none") == (set(expected.copies) == {1.0})


def test_mgrpo_does_not_see_padding():
    step, rewards, mask = delegations()
    padding = ~torch.from_numpy(step.real)
    rewards[padding] = 1e6  # whatever a padding row may hold
    mask[padding, 0] = 1
    advantage, _ = run(step, rewards, mask, MGRPO)
    assert padding.sum() == 5 and advantage[padding].abs().sum() == 0
    alone = StepRows(step.known, step.section, alignment=step.alignment)
    without, _ = run(alone, rewards[step.real], mask[step.real], MGRPO)
    assert torch.equal(advantage[step.real], without)
    np.testing.assert_array_equal(step.copies, alone.copies)
    assert len(step.copies) == len(step.known)


def test_mgrpo_takes_the_sections_options_and_verls_switch():
    for options in ({"ddof": 1}, {"eps": 0.5}, {"std_floor": 2.0}):
        step, rewards, mask = delegations(options=options)
        advantage, _ = run(step, rewards, mask, MGRPO)
        scores = rewards.sum(-1).numpy()[step.real]
        expected = aligned(step, scores, **options).advantage
        assert np.abs(expected - aligned(step, scores).advantage).max() > 1e-3, options
        np.testing.assert_allclose(per_row(advantage, mask)[step.real], expected, rtol=1e-6)
    step, rewards, mask = delegations()
    advantage, _ = run(step, rewards, mask, MGRPO, norm_adv_by_std_in_grpo=False)
    expected = aligned(step, scores, std_scope="none").advantage
    np.testing.assert_allclose(per_row(advantage, mask)[step.real], expected, rtol=1e-6)


def test_mgrpo_gives_a_lone_reward_as_the_section_says():
    rows = [Row("p", 0, 0, 0, AGENTS[0], "base")]
    for singleton, value in (("zero", 0.0), ("raw", 0.75)):
        alone = StepRows(rows, section(ddof=0, eps=0.0, singleton=singleton))
        alone.alignment = StepAlignment((), {}, "sample", 0, 1)
        advantage, _ = run(alone, torch.tensor([[0.0, 0.75]]), torch.ones(1, 2, dtype=torch.int64), MGRPO)
        assert advantage.tolist() == [[value, value]]


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_mgrpo_takes_the_penalty(place):
    step, rewards, mask = delegations(invalid=True, options={"penalty": place})
    assert 0 < sum(not row.valid for row in step.known) < len(step.known)
    advantage, _ = run(step, rewards, mask, MGRPO)
    scores = rewards.sum(-1).numpy()[step.real]
    penalty = np.array([0.0 if row.valid else 0.5 for row in step.known])
    inside = place == "inside"
    expected = aligned(step, scores - penalty if inside else scores).advantage - (0.0 if inside else penalty)
    np.testing.assert_allclose(per_row(advantage, mask)[step.real], expected, rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(step.scores, scores)  # before the penalty, for the logs


def test_mgrpo_without_a_workflow_names_what_to_set():
    step, rewards, mask = delegations()
    step.alignment = None
    with pytest.raises(RuntimeError, match=r"adv_estimator=mgrpo needs a workflow: set drmas\.workflow\.name"):
        run(step, rewards, mask, MGRPO)


def test_mgrpo_depends_on_neither_row_order_nor_uid_nor_which_call_ended_first():
    step, rewards, mask = delegations()
    advantage, _ = run(step, rewards, mask, MGRPO)
    copies = np.zeros(len(step.rows))
    copies[step.real] = step.copies
    order = np.random.default_rng(1).permutation(len(step.rows))
    rows = [step.rows[i] for i in order]
    late = [None if r is None else replace(r, uid=f"other {r.uid}", activation=9 - r.activation) for r in rows]
    moved = StepRows(late, step.section, alignment=step.alignment)
    shuffled, _ = run(moved, rewards[order], mask[order], MGRPO)
    torch.testing.assert_close(shuffled, advantage[order], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(moved.copies, copies[order][moved.real])
    assert len(set(moved.copies)) > 2


def test_mgrpo_without_sub_agents_is_grpo_by_the_papers_deviation():
    step, rewards, mask = delegations()
    step.alignment = StepAlignment((), {}, "sample", 11, 4)
    main = [row is not None and row.agent_id == AGENTS[0] for row in step.rows]
    step = StepRows([row for row, m in zip(step.rows, main, strict=True) if m], step.section, alignment=step.alignment)
    advantage, _ = run(step, rewards[main], mask[main], MGRPO)
    grpo, _ = run(step, rewards[main], mask[main], "grpo_team")
    torch.testing.assert_close(advantage, grpo, rtol=1e-6, atol=1e-7)
    assert set(step.copies) == {1.0}
