"""The keys that the pages name exist, verl's in its configuration and ours in the section; none is missing."""

import ast
import importlib.util
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest
from doc_config import exists
from doc_pages import PAGES, code, spans, tables, text_of

import verl_drmas
from verl_drmas.advantage import EXACT_LOSS_AGG_MODES, EXACT_POLICY_LOSSES
from verl_drmas.compose import ROW_COUNTS, RUN_LEVEL
from verl_drmas.config import DrmasConfig
from verl_drmas.support import GROUP_ESTIMATORS, REFUSED_ESTIMATORS, SWITCHES
from verl_drmas.workflows import load_workflow, workflow_names

PAGE = text_of("docs/verl_keys.md")
KEYS = [code(row[0]) for table in tables(PAGE) if table[0][0] == "key" for row in table[1:]]
# Keys that verl's files don't hold: fields of its dataclasses, and arguments of others.
FIELDS = {
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class": ("workers/config/rollout.py", "AgentLoopConfig"),
    "actor_rollout_ref.rollout.enable_sleep_mode": ("workers/config/rollout.py", "RolloutConfig"),
}
OTHERS = {
    "trainer.v1.drmas_sync.parameter_sync_step": "the section of a trainer mode, which PPOTrainer looks up",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls": "vLLM's",
    "ray_kwargs.ray_init.num_gpus": "Ray's",
}


def test_every_key_is_verls(verl_config):
    absent = [key for key in KEYS if not exists(verl_config, key)]
    assert sorted(absent) == sorted({*FIELDS, *OTHERS})
    assert len(KEYS) > 80 and len(set(KEYS)) == len(KEYS)


@pytest.mark.parametrize("key", FIELDS)
def test_keys_that_its_files_lack_are_fields_of_its_dataclasses(key):
    file, name = FIELDS[key]
    verl = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    (cls,) = (n for n in ast.parse((verl / file).read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)
    assert key.rpartition(".")[2] in {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign)}


def test_every_switch_and_every_key_of_the_run_is_on_the_page():
    wanted = {switch.key for switch in SWITCHES if not switch.key.startswith("drmas.")}
    for name in (*RUN_LEVEL, *ROW_COUNTS):
        key = f"actor_rollout_ref.{name}"
        wanted |= set() if any(k.startswith(f"{key}.") for k in KEYS) else {key}
    assert sorted(wanted - set(KEYS)) == []


def test_every_key_that_the_check_fills_in_is_on_the_page():
    """Keys that `check.py` and `sockets.py` set, as they stand in the sources."""
    source = (Path(verl_drmas.__file__).parent / "check.py").read_text()
    (fill,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "_fill")
    named = {s.value for s in ast.walk(fill) if isinstance(s, ast.Constant) and isinstance(s.value, str)}
    filled = {name for name in named if re.match(r"(actor_rollout_ref|trainer|data|algorithm)\.", name)}
    assert len(filled) >= 7 and sorted(filled - set(KEYS)) == []
    told = {row: text for row, text in ((code(r[0]), r[1]) for t in tables(PAGE) for r in t[1:])}
    silent = filled - {"algorithm.adv_estimator"}
    assert [key for key in sorted(silent) if "illed in" not in told[key]] == []


def test_the_lists_of_names_are_the_codes():
    rows = {code(row[0]): row[1] for table in tables(PAGE) for row in table[1:]}
    estimators = set(re.findall(r"`(\w+)`", rows["algorithm.adv_estimator"]))
    assert {*GROUP_ESTIMATORS, *REFUSED_ESTIMATORS} | {"drmas_per_agent"} == estimators
    assert set(EXACT_LOSS_AGG_MODES) <= set(re.findall(r"`([\w-]+)`", rows["actor_rollout_ref.actor.loss_agg_mode"]))
    modes = set(re.findall(r"`(\w+)`", rows["actor_rollout_ref.actor.policy_loss.loss_mode"]))
    assert modes - {"mgrpo"} == set(EXACT_POLICY_LOSSES)


# -- ours, on every page -----------------------------------------------------------------------------------------------


def drmas_keys(text):
    """Keys of our section in a page, without values; of a list of keys, each."""
    inside = "\n".join(spans(text) + re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    yield from re.findall(r"(?<![\w.])drmas\.((?:[\w*-]+|<[\w ]+>)(?:\.(?:[\w*-]+|<[\w ]+>))*)", inside)


def settings_of_workflows():
    return {name for workflow in workflow_names() for name in load_workflow(workflow).setting_names()} | {"name"}


def known(parts, owner, config, settings):
    """Whether a section of a type has a key, given as its parts; ids stand for any."""
    if not parts:
        return True
    if is_dataclass(owner):
        hints = get_type_hints(owner)
        if parts[0] not in hints:
            return False
        if owner is DrmasConfig and parts[0] == "workflow":
            return len(parts) == 1 or parts[1] in settings
        if parts[0] == "actor_rollout_ref":
            return exists(config, ".".join(parts))
        return known(parts[1:], hints[parts[0]], config, settings)
    inner = get_args(owner)
    if get_origin(owner) is dict:
        return known(parts[1:], inner[1], config, settings)
    return any(known(parts, one, config, settings) for one in inner if is_dataclass(one))


@pytest.mark.parametrize("name", PAGES)
def test_every_key_of_ours_exists(name, verl_config):
    settings = settings_of_workflows()
    wrong = [k for k in drmas_keys(text_of(name)) if not known(k.split("."), DrmasConfig, verl_config, settings)]
    assert wrong == []


def test_a_key_that_is_not_there_is_found(verl_config):
    settings = settings_of_workflows()
    for key, there in {
        "agents.<id>.turn_length": True,
        "agents.<id>.turns": False,
        "models.sub.remote.max_lag": True,
        "models.sub.remote.lag": False,
        "models.x.actor_rollout_ref.actor.optim.lr": True,
        "models.x.actor_rollout_ref.actor.optim.rate": False,
        "workflow.max_rounds": True,
        "workflow.most_rounds": False,
        "updates_per_step": True,
        "updates_per_step.solver": False,
        "store.url": True,
    }.items():
        assert known(key.split("."), DrmasConfig, verl_config, settings) is there, key
    page = "`drmas.agents.*.invalid_penalty` and\n```bash\nrun +drmas.pools.right.n_gpus_per_node=4\n```"
    assert list(drmas_keys(page)) == ["agents.*.invalid_penalty", "pools.right.n_gpus_per_node"]
