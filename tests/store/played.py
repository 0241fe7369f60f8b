"""Rows and steps as a main job would write them."""

import os

import numpy as np
import pytest
import sqlalchemy as sa

from verl_drmas.store.codec import PackedRow
from verl_drmas.store.database import open_store
from verl_drmas.store.records import SessionRecord

BOTH = [pytest.param("sqlite"), pytest.param("postgresql", marks=pytest.mark.process)]


def row(seed=0, prompt=5, response=7, **changes):
    draw = np.random.default_rng(seed)
    values = {
        "agent_id": "finder",
        "prompt_ids": draw.integers(0, 150_000, prompt).astype(np.int32),
        "response_ids": draw.integers(0, 150_000, response).astype(np.int32),
        "response_mask": draw.random(response) < 0.8,
        "logprobs": -draw.random(response).astype(np.float32),
        "reward": float(draw.random()),
        "min_version": 0,
        "max_version": 1,
        "fields": {"activation": seed, "path": f"main/0/sub.{seed}"},
    }
    return PackedRow(**values | changes)


def session(step, prompt, number, rows=1, **changes):
    seeds = (step * 10_000 + prompt * 100 + number * 10 + i for i in range(rows))
    values = {
        "step": step,
        "prompt": prompt,
        "session": number,
        "ended": True,
        "reason": "",
        "outcome": 0.5,
        "main_version": step - 1,
        "rows": tuple(row(seed) for seed in seeds),
    }
    return SessionRecord(**values | changes)


def play(producer, step, prompts=(0, 1), sessions=2, rows=1, close=True):
    """Play a step whole and close it; returns its sessions as a consumer should see them."""
    producer.open_step(step, prompts, sessions)
    records = [session(step, prompt, number, rows) for prompt in sorted(prompts) for number in range(sessions)]
    for record in records:
        assert producer.put_session(record)
    if close:
        producer.close_step(step, {"sessions": [[one.prompt, one.session] for one in records]})
    return tuple(records)


def train(consumer):
    """Claim the next step and train on it; returns its number, or None."""
    claimed = consumer.claim()
    if claimed is None:
        return None
    consumer.trained(claimed.step)
    return claimed.step


def tamper(store, statement, **values):
    """Change a store behind its back; returns how many rows changed."""
    return store.write(lambda connection: connection.execute(sa.text(statement), values).rowcount)


def states(store):
    """State of each step."""
    query = sa.text("SELECT step, state FROM drmas_step ORDER BY step")
    return dict(store.read(lambda connection: connection.execute(query).tuples().all()))


# What other processes run: they find this module, and not a test's.


def opened(url):
    """Id of the store that is opened, or made."""
    return open_store(url).id


def put_steps(producer, number):
    """Plays session `number` of steps that all processes share; returns the process."""
    for step in range(1, 6):
        producer.open_step(step, range(4), 4)
        for prompt in range(4):
            assert producer.put_session(session(step, prompt, number, rows=2))
    return os.getpid()
