"""M-GRPO against the paper's numbers, against copies that are rows, and as weights in verl's own losses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from verl_drmas.advantage import (
    ALIGN_MODES,
    ESTIMATORS,
    EXACT_LOSS_AGG_MODES,
    EXACT_POLICY_LOSSES,
    align,
    copy_weights,
    group_advantage,
    mgrpo_advantage,
)
from verl_drmas.advantage.balance import LOSS_UNITS

AGENT = {"mean_scope": "agent", "std_scope": "agent", "pool": "activation"}
SUBS = ("searcher", "coder")
MODES = st.sampled_from(ALIGN_MODES)
REWARDS = st.one_of(st.sampled_from([0.0, 0.1, 0.6, 1.0]), st.floats(-5, 5, allow_subnormal=False))


def call(columns, mode="sample", target=2, **options):
    arguments = {"aligned": SUBS, "seed": 5, "step": 3, **options}
    return mgrpo_advantage(**columns, mode=mode, target=target, **arguments)


def at(columns, rows):
    return {name: np.asarray(column)[rows] for name, column in columns.items()}


def sub_rows(rewards, uid="p", index=0, agent="searcher"):
    """Columns of one prompt's sub trajectories, given as one list of rewards a session."""
    rows = [(s, i, reward) for s, mine in enumerate(rewards) for i, reward in enumerate(mine)]
    session, activation, values = zip(*rows, strict=True)
    return {
        "rewards": values,
        "uid": [uid] * len(rows),
        "session": session,
        "agent_id": [agent] * len(rows),
        "activation": activation,
        "index": [index] * len(rows),
    }


def joined(*parts):
    return {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}


@st.composite
def teams(draw):
    """Columns of a batch: up to 3 prompts, 5 sessions, a main agent and two sub-agents, 40 rows."""
    rows = draw(st.integers(1, 40))
    column = lambda values: draw(st.lists(values, min_size=rows, max_size=rows))  # noqa: E731
    uid = np.array(column(st.integers(0, 2)))
    return {
        "rewards": np.array(column(REWARDS)),
        "uid": uid,
        "session": np.array(column(st.integers(0, 4))),
        "agent_id": np.array(column(st.sampled_from(["main", *SUBS]))),
        "activation": np.array(draw(st.permutations(range(rows)))),
        "index": uid + 100,
    }


def test_the_papers_formulas_by_hand():
    """Population std, for the main agent's sessions and for sub trajectories that need no alignment."""
    main = sub_rows([[r] for r in (1, 0.1, 0, 1, 0.1, 0.1, 1, 0)], agent="main")
    got = call(main)
    want = [1.2863, -0.6842, -0.9032, 1.2863, -0.6842, -0.6842, 1.2863, -0.9032]
    np.testing.assert_allclose(got.advantage, want, atol=1e-4)
    np.testing.assert_allclose([got.mean[0], got.std[0], got.values[0]], [0.4125, 0.45672, 8], atol=1e-5)

    sub = sub_rows([[1, 1], [0.1, 0.55], [0, 0.45]])
    for mode in ALIGN_MODES:  # every session has D of them
        got = call(sub, mode)
        np.testing.assert_allclose(got.advantage, [1.2388, 1.2388, -1.0679, 0.0854, -1.3243, -0.1709], atol=1e-4)
        np.testing.assert_allclose([got.mean[0], got.std[0], got.values[0]], [0.51667, 0.39016, 6], atol=1e-5)


UNEVEN = [[1, 0.55], [0.1], [0, 0.45, 0.45, 1, 0.1], []]


def test_uneven_sessions_weigh_the_same():
    """d = 2, 1, 5, 0 at D = 4: each session that called weighs a third, the one that didn't nothing."""
    got = call(sub_rows(UNEVEN), "expected", 4)
    np.testing.assert_allclose([got.mean[0], got.std[0] ** 2, got.values[0]], [0.4250, 0.1341, 12], atol=1e-4)
    np.testing.assert_allclose(got.copies, [2, 2, 4, *[0.8] * 5])
    plain = call(sub_rows(UNEVEN), "none", None)
    np.testing.assert_allclose([plain.mean[0], plain.values[0]], [0.4563, 8], atol=1e-4)
    masked = call(sub_rows(UNEVEN), "mask", 4)
    assert masked.values[0] == 7  # 2 + 1 + 4: missing slots are no values
    assert masked.copies.tolist().count(0) == 1
    kept = masked.copies > 0
    assert masked.mean[0] == pytest.approx(np.mean(np.array(sub_rows(UNEVEN)["rewards"])[kept]))


def test_sample_tends_to_expected():
    """Copies and mu over 4,000 draws: means within 4.5 standard errors; and the variance that the draws take away.

    The mean of a draw's var plus the variance of its mu is expected's var, as for any weights with that mean.
    """
    draws = 4000
    one = sub_rows(UNEVEN)
    columns = {name: np.tile(column, draws) for name, column in one.items()}
    columns["uid"] = columns["index"] = np.repeat(np.arange(draws), len(one["uid"]))
    sampled = call(columns, "sample", 4)
    expected = call(one, "expected", 4)
    copies = sampled.copies.reshape(draws, -1)
    mu, var = sampled.mean.reshape(draws, -1)[:, 0], sampled.std.reshape(draws, -1)[:, 0] ** 2

    error = copies.std(axis=0, ddof=1) / math.sqrt(draws)
    assert (np.abs(copies.mean(axis=0) - expected.copies) <= 4.5 * error).all()
    error = mu.std(ddof=1) / math.sqrt(draws)
    assert error < 0.002
    assert abs(mu.mean() - expected.mean[0]) <= 4.5 * error
    assert abs(mu.mean() - call(one, "none", None).mean[0]) > 10 * error
    assert var.mean() + mu.var() == pytest.approx(expected.std[0] ** 2, rel=0.01)
    assert var.mean() < expected.std[0] ** 2 - 0.0005


@settings(max_examples=100, deadline=None)
@given(
    teams(),
    st.sampled_from(["sample", "mask", "none"]),
    st.integers(1, 5),
    st.sampled_from([0, 1]),
    st.sampled_from([(0.0, 0.0), (1e-3, 0.2)]),
    st.sampled_from(["zero", "raw"]),
    st.sampled_from(["agent", "none"]),
)
def test_copies_are_as_good_as_rows(team, mode, target, ddof, scale, singleton, std_scope):
    """Where copies are whole, each row has the advantage it has in `group_advantage` over rows that are repeated."""
    options = {"ddof": ddof, "eps": scale[0], "std_floor": scale[1], "singleton": singleton}
    got = call(team, mode, target, std_scope=std_scope, **options)
    assert (got.advantage[got.copies == 0] == 0).all()
    repeated = np.repeat(np.arange(len(got.copies)), got.copies.astype(int))
    rows = at(team, repeated)
    del rows["index"]
    want = group_advantage(**{**rows, "activation": None}, **{**AGENT, "std_scope": std_scope}, **options)
    np.testing.assert_allclose(got.advantage[repeated], want, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(teams(), st.integers(1, 5))
def test_expected_by_its_definition(team, target):
    """Each trajectory weighs D / d; mean and std are those of the weights, one group at a time."""
    got = call(team, "expected", target)
    groups = list(zip(team["uid"], team["agent_id"], strict=True))
    sessions = list(zip(team["uid"], team["agent_id"], team["session"], strict=True))
    weight = np.array(
        [
            1.0 if key[1] == "main" else target / sessions.count(session)
            for key, session in zip(groups, sessions, strict=True)
        ]
    )
    np.testing.assert_allclose(got.copies, weight)
    for row, key in enumerate(groups):
        mine = [i for i, other in enumerate(groups) if other == key]
        rewards = team["rewards"][mine]
        if np.ptp(rewards) <= 1e-9:  # down to rounding, of which there is a test of its own
            continue
        mean = np.average(rewards, weights=weight[mine])
        std = math.sqrt(np.average((rewards - mean) ** 2, weights=weight[mine]))
        assert got.mean[row] == pytest.approx(mean, rel=1e-9, abs=1e-9)
        assert got.advantage[row] == pytest.approx((team["rewards"][row] - mean) / std, rel=1e-6, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(teams(), MODES, st.integers(1, 5), st.randoms(use_true_random=False))
def test_row_order_changes_nothing(team, mode, target, shuffler):
    order = list(range(len(team["rewards"])))
    shuffler.shuffle(order)
    got, moved = call(team, mode, target, eps=1e-3), call(at(team, order), mode, target, eps=1e-3)
    np.testing.assert_array_equal(moved.copies, got.copies[order])
    np.testing.assert_allclose(moved.advantage, got.advantage[order], rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(teams(), MODES, st.integers(1, 5))
def test_groups_mix_neither_prompts_nor_agents(team, mode, target):
    """Each (prompt, agent) alone gives the same copies and advantages to the bit; so do other names of the prompts."""
    whole = call(team, mode, target)
    for uid in set(team["uid"].tolist()):
        for agent in set(team["agent_id"].tolist()):
            mine = np.flatnonzero((team["uid"] == uid) & (team["agent_id"] == agent))
            alone = call(at(team, mine), mode, target)
            np.testing.assert_array_equal(whole.advantage[mine], alone.advantage)
            np.testing.assert_array_equal(whole.copies[mine], alone.copies)
    renamed = call({**team, "uid": [f"uid-{9 - uid}" for uid in team["uid"]]}, mode, target)
    np.testing.assert_array_equal(whole.advantage, renamed.advantage)
    np.testing.assert_array_equal(whole.copies, renamed.copies)


@settings(max_examples=60, deadline=None)
@given(teams(), MODES)
def test_main_agent_is_grpo(team, mode):
    """Alone it is `group_advantage` to the bit; with one row a session it is `grpo_team` at ddof 0, eps 0."""
    team = {**team, "agent_id": np.array(["main"] * len(team["rewards"]))}
    columns = {name: column for name, column in team.items() if name != "index"}
    got = call(team, mode)
    assert (got.copies == 1).all()
    np.testing.assert_array_equal(got.advantage, group_advantage(**columns, **AGENT, ddof=0, eps=0.0))
    single = np.unique(np.stack([team["uid"], team["session"]], axis=1), axis=0, return_index=True)[1]
    team_rows = at(columns, single)
    want = group_advantage(**team_rows, **vars(ESTIMATORS["grpo_team"]), ddof=0, eps=0.0)
    np.testing.assert_allclose(call(at(team, single), mode).advantage, want, rtol=1e-12, atol=1e-12)


def test_draws_are_made_from_seed_step_index_agent_and_session():
    """As `align` draws them for the sessions of one group, whatever else is in the batch; never from the uid."""
    counts = [3, 9, 1, 12]
    columns = joined(
        sub_rows([[0.0] * 3] * 6, index=3, uid="other"),
        sub_rows([[float(i) for i in range(count)] for count in counts], index=17),
    )
    mine = columns["uid"] == "p"
    got = call(columns, target=8).copies[mine]
    want = align(counts, 8, seed=(5, 3, 17, "searcher"), mode="sample", sessions=range(4))
    np.testing.assert_array_equal(got, np.concatenate(want))
    np.testing.assert_array_equal(got, call({**columns, "uid": columns["index"]}, target=8).copies[mine])
    for changed in ({"seed": 6}, {"step": 4}):
        assert (call(columns, target=8, **changed).copies[mine] != got).any()
    for name, value in (("index", [18]), ("agent_id", ["coder"])):
        other = at({**columns, name: np.array(value * len(mine))}, mine)
        assert (call(other, target=8).copies != got).any()
    # The copies follow the order of activation, not that of the rows.
    turned = {**columns, "activation": 20 - columns["activation"]}
    back = np.concatenate([copies[::-1] for copies in want])
    np.testing.assert_array_equal(call(turned, target=8).copies[mine], back)


def test_every_sub_agent_has_its_own_target():
    columns = joined(sub_rows([[1, 0]] * 3, agent="searcher"), sub_rows([[1, 0]] * 3, agent="coder"))
    got = call(columns, target={"searcher": 5, "coder": 3, "unused": 1})
    assert [got.copies[:6].sum(), got.copies[6:].sum()] == [15, 9]
    assert [got.values[0], got.values[-1]] == [15, 9]


def test_what_is_dropped_does_not_matter():
    """d > D: the rewards of dropped rows are in no statistic, and a group is constant if its kept rows are."""
    columns = sub_rows([[0, 0.2, 0.4, 0.6, 0.8]])
    got = call(columns, target=3)
    kept = got.copies > 0
    assert kept.sum() == 3
    rewards = np.where(kept, columns["rewards"], 1e6)
    np.testing.assert_array_equal(call({**columns, "rewards": rewards}, target=3).advantage, got.advantage)
    assert (0.1 + 0.1 + 0.1) / 3 != 0.1  # their mean is off by rounding, which a tiny std would blow up
    rewards = np.where(kept, 0.1, 1e6)
    for options in ({}, {"eps": 1e-6, "constant": "raw"}):
        np.testing.assert_array_equal(call({**columns, "rewards": rewards}, target=3, **options).advantage, 0.0)


@pytest.mark.parametrize("mode", ALIGN_MODES)
def test_groups_without_spread_are_exactly_zero(mode):
    for rewards in ([[0.1] * 3, [0.1], [0.1] * 7], [[0.7]], [[1e-170], [0.0, 0.0]]):
        got = call(sub_rows(rewards), mode)
        assert (got.advantage == 0).all()
        assert (got.std == 0).all()
    raw = call(sub_rows([[0.7]]), mode, target=1, singleton="raw", eps=1.0)
    assert raw.advantage.tolist() == [0.35]
    # One session with three trajectories and D = 1: of one value drawn there is no spread; of three shares there is,
    # but not at ddof 1, which takes the one value off.
    got = call(sub_rows([[0, 0.5, 1]]), mode, target=1, ddof=0)
    assert got.advantage.any() == (mode in ("expected", "none"))
    assert call(sub_rows([[0, 0.5, 1]]), mode, target=1, ddof=1).advantage.any() == (mode == "none")


# The loss: main and two sub-agents, 3 prompts of 4 sessions; nobody calls the coder for prompt q, nor anybody for r.

PROMPTS, SESSIONS, TARGETS, TOKENS = 3, 4, {"searcher": 3, "coder": 2}, 12
CALLS = {
    ("p", "searcher"): (1, 5, 0, 3),
    ("p", "coder"): (0, 2, 1, 4),
    ("q", "searcher"): (2, 0, 7, 1),
}


def batch(mode, seed=0):
    """Columns, tensors and M-GRPO's numbers of the team's rows; the log-probs far enough apart to be clipped."""
    draw = np.random.default_rng(seed)
    parts = [
        sub_rows([[draw.random()] for _ in range(SESSIONS)], uid=uid, index=index, agent="main")
        for index, uid in enumerate("pqr")
    ]
    for (uid, agent), counts in CALLS.items():
        rewards = [draw.random(count) for count in counts]
        parts.append(sub_rows(rewards, uid=uid, index="pqr".index(uid), agent=agent))
    columns = joined(*parts)
    rows = len(columns["rewards"])
    length = torch.tensor(draw.integers(1, TOKENS + 1, rows))
    tensors = {
        "mask": (torch.arange(TOKENS)[None, :] < length[:, None]).double(),
        "old": torch.tensor(draw.normal(-2, 1, (rows, TOKENS))),
    }
    tensors["new"] = tensors["old"] + torch.tensor(draw.normal(0, 1, (rows, TOKENS)))
    return columns, tensors, call(columns, mode, TARGETS)


def verl_loss(name, agg_mode, tensors, rows, advantage, denominator, weights=None):
    """verl's policy loss over the given rows (repeated ones too), and its metrics."""
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.28,
        policy_loss=PolicyLossConfig(dro_beta=0.5, clip_cov_ratio=0.2, kl_cov_ratio=0.2),
    )  # fmt: skip
    config.global_batch_info.update(dp_size=1, global_batch_size=denominator, loss_scale_factor=TOKENS)
    mask = tensors["mask"][rows]
    spread = lambda values: torch.as_tensor(values)[:, None] * mask  # noqa: E731
    return get_policy_loss_fn(name)(
        old_log_prob=tensors["old"][rows],
        log_prob=tensors["new"][rows],
        advantages=spread(advantage[rows]),
        response_mask=mask,
        loss_agg_mode=agg_mode,
        config=config,
        rollout_is_weights=None if weights is None else spread(weights),
    )


def both(mode, name="vanilla", agg_mode="seq-mean-token-mean", model=("main", *SUBS)):
    """Loss and gradient by the row weights in one batch with padding, and by physical copies agent by agent."""
    columns, tensors, got = batch(mode)
    tensors["new"].requires_grad_(True)
    mine = np.flatnonzero(np.isin(columns["agent_id"], model))
    agents = columns["agent_id"][mine]

    padding = 5
    for key, value in (("mask", 0.0), ("old", -1.0), ("new", -1.0)):
        tensors[key] = torch.cat([tensors[key], torch.full((padding, TOKENS), value, dtype=torch.float64)])
    rows_in_batch = len(mine) + padding
    weights = copy_weights(
        got.copies[mine], agent_id=agents, aligned=SUBS, target=TARGETS, mode=mode, prompts=PROMPTS, sessions=SESSIONS,
        rows_in_batch=rows_in_batch,
    )  # fmt: skip
    pad = np.arange(len(got.copies), len(got.copies) + padding)
    advantage = np.append(got.advantage, np.zeros(padding))
    in_batch = np.concatenate([mine, pad])
    weighted, metrics = verl_loss(
        name, agg_mode, tensors, in_batch, advantage, rows_in_batch, np.append(weights, np.ones(padding))
    )

    physical = 0.0
    for agent in set(agents):
        rows = mine[agents == agent]
        slots = PROMPTS * SESSIONS * TARGETS.get(agent, 1)
        if mode == "none" and agent in SUBS:
            slots = len(rows)
        copies = np.repeat(rows, got.copies[rows].astype(int))
        physical = physical + verl_loss(name, agg_mode, tensors, copies, advantage, slots)[0]
    gradients = [torch.autograd.grad(loss, tensors["new"], retain_graph=True)[0] for loss in (weighted, physical)]
    return weighted.item(), physical.item(), *gradients, metrics


@pytest.mark.parametrize("model", [("main", *SUBS), ("main",), SUBS, ("coder",)], ids="+".join)
@pytest.mark.parametrize("mode", ["sample", "mask", "none"])
def test_weights_are_physical_copies_in_verls_loss(mode, model):
    """To 1e-12, with clipping and dual clipping at work; separate models and shared ones."""
    for agg_mode in EXACT_LOSS_AGG_MODES:
        weighted, physical, gradient, want, metrics = both(mode, agg_mode=agg_mode, model=model)
        assert abs(weighted - physical) <= 1e-12
        assert (gradient - want).abs().max() <= 1e-12
        assert abs(physical) > 1e-3
        assert metrics["actor/pg_clipfrac"] > 0.1
        assert metrics["actor/pg_clipfrac_lower"] > 0.01


def test_which_modes_and_losses_are_exact():
    """Each of verl's is either in the lists and equal, or not in them and different."""
    for agg_mode in LOSS_UNITS:
        weighted, physical, *_ = both("sample", agg_mode=agg_mode)
        assert (abs(weighted - physical) <= 1e-12) == (agg_mode in EXACT_LOSS_AGG_MODES), agg_mode
    for name in set(POLICY_LOSS_REGISTRY) - {"bypass_mode"}:  # it takes no row weights at all
        weighted, physical, gradient, want, _ = both("sample", name)
        same = abs(weighted - physical) <= 1e-12 and (gradient - want).abs().max() <= 1e-12
        assert same == (name in EXACT_POLICY_LOSSES), name
    assert "bypass_mode" not in EXACT_POLICY_LOSSES


def weights_of(agent_id, copies, mode="sample", rows_in_batch=10, target=2):
    return copy_weights(
        copies, agent_id=agent_id, aligned=SUBS, target=target, mode=mode, prompts=2, sessions=3,
        rows_in_batch=rows_in_batch,
    )  # fmt: skip


def test_weights_by_hand():
    """2 prompts, 3 sessions, D = 2: 12 slots for a sub-agent, 6 for the main agent, whoever called."""
    agents = ["main", "searcher", "searcher", "coder"]
    np.testing.assert_allclose(weights_of(agents, [1, 2, 0, 1.5]), [10 / 6, 20 / 12, 0, 15 / 12])
    np.testing.assert_allclose(weights_of(agents, [1, 1, 0, 1], "mask"), [10 / 6, 10 / 12, 0, 10 / 12])
    np.testing.assert_allclose(weights_of(agents, [1, 1, 1, 1], "none", target=None), [10 / 6, 10 / 2, 10 / 2, 10])
    each = weights_of(agents, [1, 2, 0, 1.5], target={"searcher": 4, "coder": 1})
    np.testing.assert_allclose(each, [10 / 6, 20 / 24, 0, 15 / 6])
    assert weights_of([], []).shape == (0,)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 30), st.integers(1, 5))
def test_every_agent_of_a_shared_model_weighs_the_same(calls, padding, target):
    """If every session calls, an agent's weights add up to the batch's rows, which verl divides by: a mean each."""
    prompts = [
        joined(sub_rows([[1.0]] * 3, uid=uid, index=index, agent="main"), sub_rows([[0.5] * calls] * 3, uid, index))
        for index, uid in enumerate("pq")
    ]
    columns = joined(*prompts)
    rows = len(columns["rewards"]) + padding
    for mode in ("sample", "expected", "none"):
        copies = call(columns, mode, target).copies
        weights = weights_of(columns["agent_id"], copies, mode, rows, target)
        for agent in ("main", "searcher"):
            assert weights[columns["agent_id"] == agent].sum() == pytest.approx(rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "samples"}, "did you mean 'sample'"),
        ({"target": {"coder": 2}}, "target of aligned agent 'searcher' is missing: it lists coder; add 'searcher'"),
        ({"target": {"searcher": 0}}, "target of aligned agent 'searcher' is 0: it must be a whole number"),
        ({"target": None}, "target of aligned agent 'searcher' is None"),
        ({"aligned": "searcher"}, "aligned='searcher' is a string: give a collection"),
        ({"index": [1, 2, 1]}, "index of row 1 is 2, unlike that of another row of its uid"),
        ({"activation": [0, 2, 2], "session": [1, 0, 0]}, "activation of row 1 is 2, as is that of another row"),
        ({"session": [0, 0]}, "session has 2 ids for 3 rows"),
        ({"session": [0, 0, 0.5]}, "seed part 0.5 is a float"),
        ({"rewards": [0, np.nan, 1]}, "rewards of row 1 is nan"),
        ({"std_scope": "prompt"}, "std_scope='prompt' is unknown"),
        ({"ddof": 2}, "ddof=2 must be 0"),
        ({"constant": "raw"}, "divides a constant group by eps"),
    ],
)
def test_wrong_input_is_refused(change, message):
    columns = {
        "rewards": [0, 0.5, 1],
        "uid": ["p"] * 3,
        "session": [0, 0, 1],
        "agent_id": ["searcher"] * 3,
        "activation": [0, 1, 0],
        "index": [1] * 3,
    }
    options = {name: change[name] for name in change if name not in columns}
    with pytest.raises(ValueError, match=message):
        call({**columns, **{name: change[name] for name in change if name in columns}}, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"copies": [1, -1]}, "copies of row 1 is -1.0"),
        ({"agent_id": ["main"]}, "agent_id has 1 ids for 2 rows"),
        ({"prompts": 0}, "prompts is 0: it must be a whole number of at least 1"),
        ({"sessions": 1.5}, "sessions is 1.5"),
        ({"rows_in_batch": 1}, "rows_in_batch is 1: it must be a whole number of at least 2"),
        ({"target": {}}, "target of aligned agent 'coder' is missing: it lists no agent"),
        ({"mode": "all"}, "mode='all' is unknown"),
    ],
)
def test_wrong_weights_are_refused(change, message):
    arguments = {
        "copies": [1, 1], "agent_id": ["main", "coder"], "aligned": SUBS, "target": 2, "mode": "sample", "prompts": 1,
        "sessions": 1, "rows_in_batch": 4,
    }  # fmt: skip
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        copy_weights(arguments.pop("copies"), **arguments)
