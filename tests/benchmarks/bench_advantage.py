"""Cost of a step's advantages over the one masked broadcast that any estimator needs."""

import statistics
import time
import uuid

import numpy as np
import pytest
import torch

from verl_drmas.advantage import ESTIMATORS, broadcast, group_advantage, shadow

PROMPTS, SESSIONS, CALLS, TOKENS = 512, 8, 5, 1024  # 20,480 rows: an agent's turns alternate in each session
PAIRS = 9
DRMAS = vars(ESTIMATORS["drmas"])


@pytest.fixture(scope="module")
def batch():
    draw = np.random.default_rng(0)
    rows = PROMPTS * SESSIONS * CALLS
    lengths = torch.from_numpy(draw.integers(1, TOKENS + 1, rows))
    columns = {
        "uid": np.repeat(
            np.array([str(uuid.UUID(bytes=draw.bytes(16))) for _ in range(PROMPTS)], object), rows // PROMPTS
        ),
        "session": np.tile(np.repeat(np.arange(SESSIONS), CALLS), PROMPTS),
        "agent_id": np.array([("solver", "verifier")[i % CALLS % 2] for i in range(rows)], dtype=object),
    }
    rewards = np.repeat(draw.integers(0, 2, PROMPTS * SESSIONS), CALLS).astype(np.float32)
    mask = (torch.arange(TOKENS)[None, :] < lengths[:, None]).long()
    return columns, rewards, mask, lengths.numpy()


def paired(one, other):
    """Median over pairs of the seconds of each, and of their ratio; the two are timed in turn."""
    one(), other()
    times = []
    for _ in range(PAIRS):
        start = time.perf_counter()
        one()
        middle = time.perf_counter()
        other()
        times.append((middle - start, time.perf_counter() - middle))
    ratio = statistics.median(a / b for a, b in times)
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times), ratio


def median_ms(function):
    times = []
    for _ in range(PAIRS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


@pytest.mark.benchmark
def test_advantages_cost_little_more_than_their_broadcast(batch):
    columns, rewards, mask, tokens = batch
    advantage = group_advantage(rewards, **columns, **DRMAS)
    only = lambda: broadcast(advantage, mask)  # noqa: E731

    def whole():
        scores = np.asarray(rewards, dtype=np.float64)
        return broadcast(group_advantage(scores, **columns, **DRMAS), mask)

    seconds, base, ratio = paired(whole, only)
    print(f"\nadvantages of {len(rewards)} rows x {TOKENS} tokens: {seconds * 1e3:.1f} ms")
    print(f"one masked broadcast: {base * 1e3:.1f} ms; ratio {ratio:.3f} (at most 1.3)")

    token_rewards = torch.zeros(mask.shape)
    token_rewards[:, 0] = torch.from_numpy(rewards)

    def from_tokens():
        scores = token_rewards.sum(-1).numpy()
        return broadcast(group_advantage(scores, **columns, **DRMAS), mask)

    seconds, base, token_ratio = paired(from_tokens, only)
    print(f"with the scores summed from a reward tensor: {seconds * 1e3:.1f} ms; ratio {token_ratio:.3f}")

    print(f"group_advantage alone: {median_ms(lambda: group_advantage(rewards, **columns, **DRMAS)):.1f} ms")
    print(f"shadow alone: {median_ms(lambda: shadow(rewards, advantage, **columns, tokens=tokens)):.1f} ms")
    assert ratio <= 1.3
