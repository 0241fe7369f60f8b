"""The replay buffer gives up when nothing more will come, and not before."""

import itertools

import pytest
from verl.trainer.ppo.v1 import replay_buffer as verl_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_drmas.trainer.buffer import TeamReplayBuffer


class Clock:
    """Time that passes only while the buffer sleeps."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(verl_buffer.time, "sleep", self.sleep)
        monkeypatch.setattr(verl_buffer.time, "monotonic", lambda: self.now)

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def store(monkeypatch, steps):
    """TransferQueue whose contents are those of the next look; the last stays."""
    looks = itertools.chain(steps, itertools.repeat(steps[-1]))
    monkeypatch.setattr(verl_buffer.tq, "kv_list", lambda: {"train": next(looks)})
    monkeypatch.setattr(verl_buffer.tq, "kv_clear", lambda **_: None)


def prompts(running=(), ended=(), rows=()):
    tags = {uid: {"is_prompt": True, "status": "running", "global_steps": 1} for uid in running}
    tags |= {uid: {"is_prompt": True, "status": "finished", "global_steps": 1} for uid in ended}
    return tags | {key: {"status": "success", "seq_len": 3} for key in rows}


def buffer(check=lambda: None, stall_timeout=10.0):
    stock = ReplayBuffer(
        trainer_mode="sync",
        trainer_config=None,
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
    )
    assert stock.poll_interval == 2.0
    return TeamReplayBuffer.adopt(
        stock, poll_interval=0.5, stall_timeout=stall_timeout, check=check, sampled=lambda batch: None
    )


def sample(built, size=1):
    return built.sample(global_steps=1, partition_id="train", batch_size=size)


def test_adopt_keeps_everything_of_verls_buffer():
    built = buffer()
    assert isinstance(built, ReplayBuffer)
    assert (built.poll_interval, built.stall_timeout) == (0.5, 10.0)
    assert built.max_off_policy_threshold == 8
    assert built.filter_groups_metric is None


def test_a_batch_that_is_there_comes_at_once(monkeypatch, clock):
    store(monkeypatch, [prompts(ended=["u"], rows=["u_0_0", "u_1_0"])])
    batch, _ = sample(buffer())
    assert batch.keys == ["u_0_0", "u_1_0"]
    assert clock.now == 1000.0


def test_it_polls_at_its_own_interval(monkeypatch, clock):
    store(monkeypatch, [prompts(running=["u"])] * 3 + [prompts(ended=["u"], rows=["u_0_0"])])
    sample(buffer())
    assert clock.now == 1001.5


def test_nothing_ending_for_too_long_raises(monkeypatch, clock):
    store(monkeypatch, [prompts(running=["u", "v"])])
    with pytest.raises(TimeoutError, match=r"10 s \(drmas\.faults\.stall_timeout\); 2 prompts still run"):
        sample(buffer())
    assert 1010 < clock.now < 1012


def test_every_session_that_ends_starts_the_wait_anew(monkeypatch, clock):
    """Each step below takes 8 s of at most 10; the third prompt would never come in 10 s from the start."""
    quiet = 16  # looks of 0.5 s
    looks = [prompts(running=["u", "v"])] * quiet
    looks += [prompts(running=["u", "v"], rows=["u_0_0"])] * quiet
    looks += [prompts(running=["v"], ended=["u"], rows=["u_0_0"])] * quiet
    looks += [prompts(ended=["u", "v"], rows=["u_0_0", "v_0_0"])]
    store(monkeypatch, looks)
    batch, _ = sample(buffer(), size=2)
    assert len(batch) == 2
    assert clock.now == 1024.0


def test_a_failed_prompt_is_progress_too(monkeypatch, clock):
    failed = prompts(running=["v"]) | {"u": {"is_prompt": True, "status": "failure", "global_steps": 1}}
    looks = [prompts(running=["u", "v"])] * 16 + [failed] * 16 + [prompts(ended=["u", "v"], rows=["v_0_0"])]
    store(monkeypatch, looks)
    sample(buffer(), size=2)
    assert clock.now == 1016.0


def test_the_time_between_two_calls_is_no_stall(monkeypatch, clock):
    built = buffer()
    store(monkeypatch, [prompts(running=["u"]), prompts(ended=["u"], rows=["u_0_0"])])
    sample(built)
    clock.now += 1000.0  # training
    store(monkeypatch, [prompts(running=["u"])] * 3 + [prompts(ended=["u"], rows=["u_0_0"])])
    sample(built)


def test_the_check_is_asked_while_waiting_and_ends_it(monkeypatch, clock):
    asked = []

    def check():
        asked.append(clock.now)
        if len(asked) == 3:
            raise RuntimeError("LLM server died")

    store(monkeypatch, [prompts(running=["u"])])
    with pytest.raises(RuntimeError, match="LLM server died"):
        sample(buffer(check))
    assert asked == [1000.0, 1000.5, 1001.0]
