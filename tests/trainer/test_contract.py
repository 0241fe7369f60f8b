"""What two jobs must agree on, and which store belongs to which checkpoint."""

import json

import pytest
from omegaconf import OmegaConf

from verl_drmas.config import ConfigError, parse
from verl_drmas.trainer.contract import check_store, check_terms, terms

SUBS = {"finder": {"model": "sub", "sampling": {"stop": ["END"]}}, "reader": {"model": "sub", "invalid_penalty": 0.1}}
RUN = {
    "data": {"train_batch_size": 4},
    "actor_rollout_ref": {"rollout": {"n": 8, "temperature": 0.5}},
    "algorithm": {"adv_estimator": "mgrpo", "norm_adv_by_std_in_grpo": True},
}
SHARED = {"workflow": {"name": "delegate", "tools": [{"name": "search", "k": 3}]}}


def main_terms(run=RUN, subs=SUBS, **section):
    agents = {"main": {"model": "main"}, **subs}
    remote = {"store": "sqlite:///x.db", "role": "finders"}
    made = parse({**SHARED, "agents": agents, "models": {"main": {}, "sub": {"remote": remote}}, **section})
    return terms(OmegaConf.create(run), made, made.agents_of("sub"))


def sub_terms(run=RUN, subs=SUBS, **section):
    """The other job calls its model as it likes, and lists its agents in any order."""
    agents = {name: {**subs[name], "model": "mine"} for name in reversed(subs)}
    store = {"url": "sqlite:///x.db", "role": "finders"}
    made = parse({**SHARED, "agents": agents, "models": {"mine": {}}, "store": store, **section})
    return terms(OmegaConf.create(run), made, list(made.agents))


def through_the_store(theirs):
    return json.loads(json.dumps(theirs))


def test_two_jobs_with_the_same_settings_agree():
    check_terms(through_the_store(main_terms()), sub_terms())


def test_what_is_for_the_metrics_alone_may_differ():
    check_terms(through_the_store(main_terms(advantage={"shadow": False})), sub_terms(advantage={"shadow": True}))


def changed(key, value):
    run = OmegaConf.create(RUN)
    OmegaConf.update(run, key, value, force_add=True)
    return {"run": OmegaConf.to_container(run)}


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (changed("data.train_batch_size", 5), "data.train_batch_size is 4 there and 5 here"),
        (changed("actor_rollout_ref.rollout.n", 2), "actor_rollout_ref.rollout.n is 8 there and 2 here"),
        (
            changed("actor_rollout_ref.rollout.temperature", 1.0),
            "actor_rollout_ref.rollout.temperature is 0.5 there and 1.0 here",
        ),
        (changed("algorithm.adv_estimator", "drmas"), "algorithm.adv_estimator is 'mgrpo' there and 'drmas' here"),
        (
            changed("algorithm.norm_adv_by_std_in_grpo", False),
            "algorithm.norm_adv_by_std_in_grpo is True there and False here",
        ),
        (changed("drmas_base_estimator", "rloo"), "drmas_base_estimator is None there and 'rloo' here"),
        ({"advantage": {"ddof": 0}}, "drmas.advantage.ddof is 1 there and 0 here"),
        ({"alignment": {"mode": "mask"}}, "drmas.alignment.mode is 'sample' there and 'mask' here"),
        (
            {"workflow": {**SHARED["workflow"], "rounds": 1}},
            "drmas.workflow.rounds is None there and 1 here",
        ),
        (
            {"subs": {**SUBS, "reader": {"model": "sub"}}},
            "drmas.agents.reader.invalid_penalty is 0.1 there and 0.0 here",
        ),
        (
            {"subs": {**SUBS, "finder": {"model": "sub"}}},
            "drmas.agents.finder.sampling.stop is ['END'] there and None here",
        ),
        ({"subs": {"finder": SUBS["finder"]}}, "agents is ['finder', 'reader'] there and ['finder'] here"),
    ],
)
def test_what_differs_is_named_with_both_values(own, line):
    with pytest.raises(ConfigError) as caught:
        check_terms(through_the_store(main_terms()), sub_terms(**own))
    assert line in str(caught.value) and str(caught.value).endswith(": set both alike")
    assert "\n" not in str(caught.value)


def test_every_difference_is_named():
    run = {**RUN, "data": {"train_batch_size": 5}}
    with pytest.raises(ConfigError) as caught:
        check_terms(main_terms(), sub_terms(run=run, advantage={"eps": 0.1}))
    assert str(caught.value).count(" there and ") == 2


def test_other_agents_of_the_team_are_none_of_the_others_business():
    own = main_terms()
    assert "drmas.agents.main" not in own and own["agents"] == ["finder", "reader"]
    check_terms(own, {**sub_terms()})


# -- one run, one store ------------------------------------------------------------------------------------------------

OWN, OTHER = {"id": "1", "role": "sub"}, {"id": "2", "role": "sub"}


def refusal(saved, now=OWN, *, known, step, chosen=False):
    with pytest.raises(ConfigError) as caught:
        check_store("drmas.store", saved, now, known=known, step=step, chosen=chosen)
    assert str(caught.value).startswith("drmas.store: ") and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("saved", "known", "step"),
    [
        (None, 0, 0),  # a new run
        (OWN, 3, 3),  # goes on
        (OWN, 0, 3),  # saved a checkpoint, and was killed before the store heard of it
        (OWN, 2, 3),
        (None, 0, 3),  # a run that becomes one of a pair
    ],
)
def test_a_store_of_ones_own_is_taken(saved, known, step):
    for chosen in (True, False):
        check_store("drmas.store", saved, OWN, known=known, step=step, chosen=chosen)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("now", [OTHER, {"id": "1", "role": "other"}])
def test_another_store_or_role_than_the_checkpoints_is_refused(now, chosen):
    line = refusal(OWN, now, known=3, step=3, chosen=chosen)
    assert "was saved with store 1 (role sub)" in line and f"is {now['id']} (role {now['role']})" in line


@pytest.mark.parametrize("chosen", [True, False])
def test_another_runs_store_is_refused_for_a_checkpoint_without_one(chosen):
    assert "holds another run's steps up to 2" in refusal(None, known=2, step=3, chosen=chosen)


@pytest.mark.parametrize(("saved", "step"), [(OWN, 3), (None, 0)])
def test_a_later_checkpoint_is_only_left_behind_by_who_says_so(saved, step):
    line = refusal(saved, known=5, step=step)
    assert f"a checkpoint of step 5, and this run would start from step {step}" in line and "resume_path" in line
    check_store("drmas.store", saved, OWN, known=5, step=step, chosen=True)
