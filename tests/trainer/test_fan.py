"""One stand-in for several worker groups: every call reaches every model, checkpoints apart."""

import copy
import pickle

import pytest

from verl_drmas.placement import Pool
from verl_drmas.trainer.fan import Fan
from verl_drmas.trainer.lanes import Lanes

SHARED = {"run": Pool("run", 1, 1, ("base", "judge"))}


class Member:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


@pytest.fixture
def fan():
    return Fan({"base": Member(), "judge": Member()}, Lanes(SHARED))


def test_a_call_reaches_every_member(fan):
    fan.update_weights(7, mode="naive")
    assert [m.calls for m in fan.members.values()] == [[("update_weights", (7,), {"mode": "naive"})]] * 2


def test_checkpoints_lie_in_a_folder_of_their_model(fan):
    fan.save_checkpoint("out/global_step_3/actor", "hdfs://x/actor", 3, max_ckpt_to_keep=2)
    fan.load_checkpoint("out/global_step_3/actor", del_local_after_load=True)
    saved, loaded = fan.members["judge"].calls
    assert saved == (
        "save_checkpoint",
        ("out/global_step_3/actor/judge", "hdfs://x/actor/judge", 3),
        {"max_ckpt_to_keep": 2},
    )
    assert loaded == (
        "load_checkpoint",
        (),
        {"local_path": "out/global_step_3/actor/judge", "del_local_after_load": True},
    )
    assert fan.members["base"].calls[0][1][0] == "out/global_step_3/actor/base"


def test_no_remote_path_stays_none(fan):
    fan.save_checkpoint("out/actor", None, 1)
    assert fan.members["base"].calls[0][1] == ("out/actor/base", None, 1)


def test_an_error_of_a_member_is_not_swallowed():
    class Broken:
        def sleep(self):
            raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        Fan({"base": Broken()}, Lanes(SHARED)).sleep()


def test_finished_calls_are_counted_by_model(fan):
    fan.update_weights(1)
    fan.update_weights(2)
    fan.sleep_replicas()
    assert fan.calls["base", "update_weights"] == fan.calls["judge", "update_weights"] == 2
    assert fan.calls["judge", "sleep_replicas"] == 1


def test_copying_and_pickling_find_no_hooks_of_the_members(fan):
    assert list(copy.copy(fan).members) == ["base", "judge"]
    assert not hasattr(fan, "__getstate_of_a_member__")
    assert pickle.dumps(Fan.__new__(Fan))
