"""Steps come from the store one by one, until the job that fills it is done."""

from collections import deque

import pytest

from verl_drmas.trainer import source as module
from verl_drmas.trainer.source import ClaimBuffer, Finished, NoData


class Script:
    """A consumer that plays a script: each look at it takes one entry, (finished, claimed)."""

    def __init__(self, *looks):
        self.looks = deque(looks)
        self.asked = []

    def finished(self):
        self.asked.append("finished")
        self.now = self.looks.popleft()
        return self.now[0]

    def claim(self):
        self.asked.append("claim")
        return self.now[1]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


NOTHING = (None, None)


def test_a_step_is_waited_for_and_put_where_verl_looks():
    buffer = ClaimBuffer(Script(NOTHING, NOTHING, (None, "step 4")), lambda claimed: f"rows of {claimed}")
    assert buffer.sample(global_steps=4, partition_id="train", batch_size=8) == ("rows of step 4", {})
    assert buffer.waited == pytest.approx(2 * module.POLL)


def test_steps_that_are_left_are_trained_though_the_other_job_is_done():
    buffer = ClaimBuffer(Script((9, "step 8"), (9, "step 9"), (9, None)), lambda claimed: claimed)
    assert [buffer.sample()[0] for _ in range(2)] == ["step 8", "step 9"]
    with pytest.raises(Finished):
        buffer.sample()


def test_whether_it_is_done_is_asked_before_what_there_is():
    """The other way round, a step that is closed between the two questions would be lost."""
    script = Script(NOTHING, (9, None))
    assert ClaimBuffer(script, print).wait() is None
    assert script.asked == ["finished", "claim"] * 2


def test_a_run_that_can_not_go_on_waits_no_more():
    def check():
        raise RuntimeError("no server left")

    with pytest.raises(RuntimeError, match="no server left"):
        ClaimBuffer(Script(NOTHING), print, check).wait()


def test_a_long_wait_is_said_now_and_then(caplog):
    looks = int(2.5 * module.SAY / module.POLL)
    ClaimBuffer(Script(*[NOTHING] * looks, (1, None)), print).wait()
    assert caplog.text.count("waiting for the next step") == 2


def test_no_data_is_saved_and_loaded():
    made = NoData()
    made.load_state_dict(made.state_dict())
    assert made.state_dict() == {}
