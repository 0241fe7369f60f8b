"""Row weights are exact in verl's own loss: equal shares for the agents, whatever the loss counts."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_to_nested

from verl_drmas.advantage import balance_weights, row_size
from verl_drmas.config import parse
from verl_drmas.rollout.rows import Row
from verl_drmas.trainer.row_weights import row_weights
from verl_drmas.trainer.step import StepRows

# (prompt, session, agent, tokens); None is a padding row, which has one masked token.
ROWS = [
    ("p", 0, "solver", 7),
    ("p", 0, "verifier", 2),
    None,
    ("p", 1, "solver", 3),
    ("p", 1, "solver", 5),
    ("p", 1, "verifier", 1),
    ("q", 0, "solver", 4),
    ("q", 0, "verifier", 6),
]
REAL = np.array([row is not None for row in ROWS])
AGENTS = ("solver", "verifier")
PROMPT = 4


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def weights(balance, mode):
    """As the trainer writes them: one per token, for every row."""
    uid, session, agent_id, tokens = zip(*(row for row in ROWS if row is not None), strict=True)
    own = np.ones(len(ROWS))
    size = row_size(tokens, mode)
    own[REAL] = balance_weights(uid=uid, session=session, agent_id=agent_id, size=size, balance=balance)
    return own


def loss(pushed, mode, balance):
    """verl's loss over the whole batch where only the tokens of the `pushed` rows have an advantage: 1 each.

    With the ratio at 1 every token costs its advantage, so this is minus the rows' share of the loss.
    """
    lengths = [1 if row is None else row[3] for row in ROWS]
    mask = jagged([torch.full((n,), int(row is not None)) for n, row in zip(lengths, ROWS, strict=True)])
    own = weights(balance, mode)
    dense = torch.as_tensor(own, dtype=torch.float32).unsqueeze(-1).expand(-1, max(lengths))
    fields = {
        "prompts": jagged([torch.zeros(PROMPT, dtype=torch.int64)] * len(ROWS)),
        "responses": jagged([torch.zeros(n, dtype=torch.int64) for n in lengths]),
        "response_mask": mask,
        "attention_mask": jagged([torch.ones(PROMPT + n, dtype=torch.int64) for n in lengths]),
        "old_log_probs": jagged([torch.full((n,), -1.0) for n in lengths]),
        "advantages": jagged([torch.full((n,), float(p)) for n, p in zip(lengths, pushed, strict=True)]),
        "rollout_is_weights": response_to_nested(dense, mask),
    }
    if balance == "none":
        del fields["rollout_is_weights"]
    data = TensorDict(fields, batch_size=len(ROWS))
    tokens = int(sum(row[3] for row in ROWS if row is not None))
    tu.assign_non_tensor(
        data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(ROWS), max_response_len=max(lengths)
    )
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, use_kl_loss=False
    )
    log_probs = jagged([torch.full((PROMPT + n,), -1.0, requires_grad=True) for n in lengths])
    value, _ = ppo_loss(config, {"log_probs": log_probs}, data)
    return -value.item()


def share(mode, balance, **of):
    """Share of the loss of the rows with these ids."""
    names = ("uid", "session", "agent_id")

    def match(row):
        return row is not None and all(row[names.index(name)] == value for name, value in of.items())

    return loss([match(row) for row in ROWS], mode, balance)


MODES = ["token-mean", "token-sum", "seq-mean-token-mean"]


@pytest.mark.parametrize("mode", MODES)
def test_agents_of_a_prompt_carry_the_same_share(mode):
    shares = [share(mode, "agent", uid=uid, agent_id=agent) for uid in "pq" for agent in AGENTS]
    assert shares[0] > 0
    assert shares == pytest.approx([shares[0]] * 4, rel=1e-5)
    assert share(mode, "none", uid="p", agent_id="solver") != pytest.approx(
        share(mode, "none", uid="p", agent_id="verifier"), rel=0.1
    )


@pytest.mark.parametrize("mode", MODES)
def test_sessions_carry_the_same_share(mode):
    shares = [share(mode, "session", uid=uid, session=s) for uid, s in (("p", 0), ("p", 1), ("q", 0))]
    assert shares == pytest.approx([shares[0]] * 3, rel=1e-5)
    assert shares[0] > 0


@pytest.mark.parametrize("balance", ["agent", "session"])
@pytest.mark.parametrize("mode", MODES)
def test_the_whole_loss_keeps_its_size(mode, balance):
    assert share(mode, balance) == pytest.approx(share(mode, "none"), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_padding_carries_nothing(mode):
    assert loss([row is None for row in ROWS], mode, "agent") == 0


def test_by_hand():
    """Prompt p: solver 7 + 3 + 5 tokens, verifier 2 + 1; q: 4 and 6. In all 28 tokens, 7 for each of four groups."""
    assert weights("agent", "token-mean").tolist() == pytest.approx(
        [7 / 15, 7 / 3, 1, 7 / 15, 7 / 15, 7 / 3, 7 / 4, 7 / 6]
    )


# -- several models ----------------------------------------------------------------------------------------------------


def team_step(rows, balance="agent", frozen=(), served=()):
    """A step whose rows are (uid, session, agent, tokens), or None for padding; each agent is on a model of its name.

    Args:
        frozen: Agents that aren't trained, on a model that is.
        served: Agents whose models nobody trains.
    """
    agents = sorted({row[2] for row in rows if row is not None})
    section = parse(
        {
            "agents": {a: {"model": a.rstrip("0123456789"), "trainable": a not in frozen} for a in agents},
            "models": {m: {"trainable": m not in served} for m in {a.rstrip("0123456789"): None for a in agents}},
            "advantage": {"balance": balance},
        }
    )
    known = [None if row is None else Row(*row[:2], 0, 0, row[2], section.agents[row[2]].model) for row in rows]
    step = StepRows(known, section)
    step.tokens = np.array([row[3] for row in rows if row is not None])
    return step


# Two agents on model `a` and one on model `b`, with ten times the tokens.
TEAM = [
    ("p", 0, "a1", 6),
    ("p", 0, "a2", 2),
    None,
    ("p", 0, "b", 60),
    ("p", 1, "a1", 2),
    ("q", 0, "a2", 2),
    ("q", 0, "b", 20),
]


def test_rows_are_balanced_within_their_model():
    """Model a: 12 tokens in three groups, 4 for each; model b: 80 in two, 40 for each. Across models a would get 18."""
    weights = row_weights(team_step(TEAM), {"a": "token-mean", "b": "token-mean"})
    assert weights.dtype == np.float64
    assert weights.tolist() == pytest.approx([4 / 8, 4 / 2, 1, 40 / 60, 4 / 8, 4 / 2, 40 / 20])


@pytest.mark.parametrize("balance", ["agent", "session"])
def test_a_models_weights_are_those_of_its_rows_alone(balance):
    """So that a model is trained alike whatever other models are in the run."""
    modes = {"a": "seq-mean-token-mean", "b": "token-mean"}
    together = row_weights(team_step(TEAM, balance), modes)
    for model_id, mode in modes.items():
        mine = [i for i, row in enumerate(TEAM) if row is not None and row[2].startswith(model_id)]
        alone = row_weights(team_step([TEAM[i] for i in mine], balance), {model_id: mode})
        assert together[mine].tolist() == alone.tolist()
        assert alone.tolist() != [1.0] * len(mine)  # it does balance something


def test_each_model_has_its_own_way_of_averaging():
    """A mean of row means: each row counts 1, so b's two groups of one row each are balanced as they are."""
    weights = row_weights(team_step(TEAM), {"a": "seq-mean-token-mean", "b": "token-mean"})
    assert weights.tolist() == pytest.approx([4 / 6, 4 / 3, 1, 40 / 60, 4 / 6, 4 / 3, 40 / 20])
    weights = row_weights(team_step(TEAM), {"a": "token-mean", "b": "seq-mean-token-mean"})
    assert weights.tolist() == pytest.approx([4 / 8, 4 / 2, 1, 1, 4 / 8, 4 / 2, 1])


def test_rows_that_nobody_trains_have_weight_1():
    modes = {"a": "token-mean"}  # the trained models'
    weights = row_weights(team_step(TEAM, served=["b"]), modes)
    assert weights.tolist() == pytest.approx([4 / 8, 4 / 2, 1, 1, 4 / 8, 4 / 2, 1])


def test_a_frozen_agent_takes_no_share_of_its_models_loss():
    """a1 is left with one group of 8 tokens, which is all of the loss: its rows keep their weight."""
    weights = row_weights(team_step(TEAM, frozen=["a2"]), {"a": "token-mean", "b": "token-mean"})
    trained = [0, 4]
    assert weights[trained].tolist() == [1.0, 1.0]
    assert np.isfinite(weights).all()


def test_a_model_without_rows_is_no_matter():
    rows = [row for row in TEAM if row is not None and row[2] == "b"]
    weights = row_weights(team_step(rows), {"a": "token-mean", "b": "token-mean"})
    assert weights.tolist() == pytest.approx([40 / 60, 40 / 20])
