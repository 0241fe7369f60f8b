"""docs/migration.md: what it says of our side is there, and its translated script composes to the shipped values."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from doc_config import composed, exists
from doc_pages import blocks, spans, tables, text_of
from hydra.core.override_parser.overrides_parser import OverridesParser
from metric_page import undocumented
from omegaconf import OmegaConf

from verl_drmas.config import ConfigError, parse
from verl_drmas.workflows import load_workflow

PAGE = text_of("docs/migration.md")
SHORT, SPELT = (block for block in blocks(PAGE, "bash"))
# Rows of our side: the second column, and the third where ours is the second and how to have theirs the third.
OURS = [
    span
    for table in tables(PAGE)
    if table[0][1] == "here"
    for row in table[1:]
    for cell in row[1:]
    for span in re.findall(r"`([^`]+)`", cell)
    if re.match(r"(algorithm|data|drmas|trainer|actor_rollout_ref|ray_kwargs)\.[\w.]+=", span)
]


def arguments(block):
    words = shlex.split(block.replace("\\\n", " ").replace("$HOME/", "/home/"))
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    return words[3:]


@pytest.fixture(scope="module")
def spelt():
    return composed(*arguments(SPELT))


def test_every_setting_of_ours_can_be_set(verl_config):
    """Each parses as an override, verl's keys are verl's, and our own parser takes the value."""
    assert len(OURS) > 50
    for span in OURS:
        (override,) = OverridesParser.create().parse_overrides([span])
        key, value = override.key_or_group, override.value()
        if key.startswith("drmas.workflow.") and not key.endswith(".name"):
            assert taken_by_a_workflow(key.removeprefix("drmas.workflow.").split("."), value), span
        elif key.startswith("drmas."):
            section = OmegaConf.create(around(key))
            OmegaConf.update(section, key.removeprefix("drmas."), value, force_add=True)
            parse(OmegaConf.to_container(section))
        else:
            assert exists(verl_config, key) or key == "ray_kwargs.ray_init.num_cpus", span


def around(key):
    """A team in which one key of `drmas` may be set."""
    model = key.split(".")[2] if key.startswith("drmas.models.") else "base"
    agents = {"solver": {"model": "base"}, "verifier": {"model": "base"}}
    agents |= {model: {"model": model}} if model in agents else {}
    models = {agent["model"]: {"pool": "right"} if ".pools." in key else {} for agent in agents.values()}
    return {"agents": agents, "models": models, **({"pools": {}} if ".pools." in key else {})}


def taken_by_a_workflow(path, value):
    """Whether a bundled workflow has the setting and takes the value."""
    for name in ("solver_verifier", "search_hierarchy"):
        cls = load_workflow(name)
        if path[0] in cls.setting_names():
            given = {"retrieval": {"urls": ["http://127.0.0.1:1"]}} if name == "search_hierarchy" else {}
            settings = OmegaConf.create(given)
            OmegaConf.update(settings, ".".join(path), value, force_add=True)
            try:
                parse(OmegaConf.to_container(settings), cls.Settings, "drmas.workflow", strict=True)
                return True
            except ConfigError:
                continue
    return False


def test_the_script_composes_to_the_shipped_configuration(spelt):
    """Value by value, but for what the shipped file says beside the script."""
    shipped = composed_shipped()
    asked = [word.split("=", 1)[0].lstrip("+") for word in arguments(SPELT) if not word.startswith("+drmas=")]
    pairs = {key: (OmegaConf.select(spelt, key), OmegaConf.select(shipped, key)) for key in asked}
    for key in ("data.train_files", "data.val_files"):  # the shell's home, and verl's
        assert pairs.pop(key)[0].replace("/home/", "~/") == OmegaConf.select(shipped, key)
    different = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    # The reference's separate script has micro-batches of 2 rows; ours the 4 of the others.
    assert different.pop("actor_rollout_ref.actor.ppo_max_token_len_per_gpu") == (2 * 12288, 4 * 12288)
    assert different == {}
    assert parse(OmegaConf.to_container(spelt.drmas, resolve=True)).agents["solver"].model == "solver"


def composed_shipped():
    folder = Path(importlib.util.find_spec("verl_drmas.configs").submodule_search_locations[0])
    words = arguments(SHORT)
    assert words[0] == "--config-name"
    return composed(*words[2:], name=words[1], folder=folder)


def test_the_metrics_are_ours():
    (table,) = (table for table in tables(PAGE) if table[0] == ["reference", "here"])
    names = [span for row in table[1:] for span in re.findall(r"`((?:drmas|val)/[^`]+)`", row[1])]
    filled = [re.sub(r"<k>", "4", re.sub(r"<(?!k>)\w+>", "one", name)) for name in names]
    assert len(names) >= 9
    assert undocumented(filled, verls=["actor/grad_norm"]) == []


FLAGS = """
algorithm.adv_estimator algorithm.group_by_agent_id data.train_batch_size data.val_batch_size data.truncation
data.return_raw_chat agent.agent_specific_parameters.actor.optim.lr actor.use_adaptive_ppo_mini_batch_size
actor.ppo_mini_update_num actor.ppo_micro_batch_size_per_gpu actor.use_invalid_action_penalty
actor.invalid_action_penalty_coef rollout.log_prob_micro_batch_size_per_gpu rollout.name
rollout.gpu_memory_utilization rollout.enable_chunked_prefill rollout.free_cache_engine env.env_name env.seed
env.rollout.n env.rollout.val_n env.max_steps env.history_length env.search.search_url agent.agent_ids
agent.model_ids agent.model_sharing agent.orchestra_type agent.orchestra.math.max_loop_num trainer.n_gpus_per_node
trainer.val_only algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches
"""


def test_every_flag_of_the_reference_has_a_row():
    """The flags of its scripts that verl 0.9 hasn't, or that have another meaning here."""
    named = {span.split("=")[0] for span in spans(PAGE)}
    assert [flag for flag in FLAGS.split() if flag not in named] == []
