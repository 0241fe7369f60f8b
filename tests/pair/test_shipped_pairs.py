"""The shipped pairs agree on all that a pair must agree on, and are the one-job configuration in two parts."""

import copy

import pytest
from omegaconf import OmegaConf

from verl_drmas.check import prepare_keys, validate_with_verl
from verl_drmas.check_command import compose_as_verl
from verl_drmas.pair.facts import read
from verl_drmas.pair.jobs import check_fit
from verl_drmas.trainer.contract import check_terms, terms

pytestmark = pytest.mark.long

MODEL = "actor_rollout_ref.model.path=org/model"
URL = "sqlite:///store.db"
SHARED = {"mgrpo": [], "cpu_delegate": ["drmas.workflow.tools.search.retrieval.local=index"]}
STORES = {"": [], "_main": [f"drmas.models.sub.remote.store={URL}"], "_sub": [f"drmas.store.url={URL}"]}


@pytest.fixture(scope="module", params=SHARED)
def composed(request):
    """The configurations of one job for all, of main and of sub."""
    name = request.param
    return [compose_as_verl(["--config-name", name + part, MODEL, *SHARED[name], *own]) for part, own in STORES.items()]


def test_a_shipped_pair_passes_every_check_and_fits(composed):
    composed = copy.deepcopy(composed)  # the check fills keys in
    one, main, sub = composed
    check_fit(read(main), read(sub), one_machine=False)
    prepared = {}
    for name, config in (("one", one), ("main", main), ("sub", sub)):
        prepared[name] = prepare_keys(config)
        validate_with_verl(config, prepared[name].policies)
    (agent,) = prepared["sub"].section.agents
    agreed = [terms(config, prepared[name].section, [agent]) for name, config in zip(prepared, composed, strict=True)]
    check_terms(agreed[1], agreed[2])
    check_terms(agreed[0], agreed[1])
    section = prepared["main"].section
    assert section.models["main"].trained_here and not section.models["sub"].trained_here
    assert section.remote["sub"].max_lag == 0


def test_a_shipped_pair_saves_and_resumes_and_trains_as_the_one_job_does(composed):
    one, main, sub = composed
    for config in (main, sub):
        assert config.trainer.save_freq > 0 and config.trainer.resume_mode == "auto"
        for part in ("actor", "rollout"):  # uncomposed: some values name the experiment
            ours, theirs = (OmegaConf.to_container(c.actor_rollout_ref[part]) for c in (config, one))
            assert ours == theirs
    names = {str(config.trainer.experiment_name) for config in (one, main, sub)}
    assert len(names) == 3  # verl names a run's folders after it
