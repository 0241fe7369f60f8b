"""Recorded sessions, and jobs that train on them without a cluster.

Everything between the agent loop and the update is the real thing, with verl's stages, verl's sample store and a SQLite
store; sessions, engines and workers are made up.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.trainer.ppo.core_algos import FixedKLController

from verl_drmas.config import parse
from verl_drmas.placement import Pool
from verl_drmas.rollout.activation import Activation
from verl_drmas.rollout.delivery import Delivery
from verl_drmas.rollout.team import place_of
from verl_drmas.rollout.worker import TeamWorker
from verl_drmas.store.consumer import Consumer
from verl_drmas.store.database import open_store
from verl_drmas.trainer.alignment import Alignment
from verl_drmas.trainer.lanes import Lanes
from verl_drmas.trainer.masked import MaskedRows
from verl_drmas.trainer.metrics import CollapseWatch
from verl_drmas.trainer.policy import Policy
from verl_drmas.trainer.source import ClaimBuffer
from verl_drmas.trainer.sub import StoreTrainer
from verl_drmas.trainer.team import TeamTrainer
from verl_drmas.trainer.transcripts import Transcripts
from verl_drmas.trainer.watchdog import Watchdog

SUBS = ("finder", "reader")
K, SEED = 4, 5
FAILED, MASKED, LEFT_OUT = "server", "retrieval", 90  # why sessions fail; a prompt whose group verl throws away

# By step and prompt (dataset index): calls of finder and reader in each session, or why it failed.
CALLS = {
    1: {
        11: [(1, 0), (4, 2), (0, 0), (3, 1)],
        4: [(2, 5), FAILED, (1, 1), (4, 0)],
        7: [(0, 0)] * K,
        30: [(1, 4), (2, 0), MASKED, (0, 0)],
        LEFT_OUT: [(2, 1)] * K,
    },
    2: {
        5: [(0, 0), (0, 1), (2, 2), (3, 3)],
        11: [(4, 2), (1, 0), (5, 1), MASKED],
        2: [(1, 0), (0, 0), (0, 0), FAILED],
        LEFT_OUT: [(5, 5)] * K,
    },
}
PROMPTS = 5


# -- the recorded sessions ---------------------------------------------------------------------------------------------


def paths(finder, reader):
    """Places of a session's activations; every second reader is asked by a finder."""
    made = [("finder", f"main.0/turn.{i}/call.0/finder") for i in range(finder)]
    for i in range(reader):
        above = f"{made[i][1]}/turn.0/call.{i}" if i % 2 and i < finder else f"main.0/turn.{i}/call.1"
        made.append(("reader", f"{above}/reader"))
    return sorted([*made, ("main", "main.0")], key=lambda one: place_of(one[1]))


def session_rows(step, prompt, number, remote):
    """What `TrainingTeam.rows` gives for a session; the same numbers in every job.

    Args:
        remote: Models that another job serves.
    """
    calls = CALLS[step][prompt][number]
    rng = np.random.default_rng([step, prompt, number])
    outcome = float(rng.integers(0, 2))
    extra = {"acc": outcome, "outcome": outcome, "session/rounds": 2.0}
    rows = []
    for order, (agent, path) in enumerate(paths(*((2, 1) if calls == MASKED else calls))):
        length, part = int(rng.integers(2, 9)), float(rng.random())
        mask = [*rng.integers(0, 2, length - 1).tolist(), 1]
        model = "main" if agent == "main" else "sub"
        row = Activation(
            prompt_ids=rng.integers(1, 1000, int(rng.integers(3, 9))).tolist(),
            response_ids=rng.integers(1, 1000, length).tolist(),
            response_mask=mask,
            response_logprobs=(-rng.random(length)).tolist(),  # no float32 holds them
            num_turns=2 * int(rng.integers(1, 4)),
            metrics=AgentLoopMetrics(),
            own_reward=outcome + part,
            extra_fields={
                "min_global_steps": step - 1,
                "max_global_steps": step - 1,
                "turn_scores": [],
                "tool_rewards": [],
                "agent_id": agent,
                "model_id": model,
                "valid": bool(rng.random() > 0.2),
                "path": path,
                "fault": "retrieval" if rng.random() < 0.1 else None,
                "reward_parts": {"own": part},
                "counts": {"cut_characters": np.float64(rng.integers(0, 9)), "turns": 2.0, "truncated": 0.0},
                "activation": order,
                "reward_extra_info": {} if calls == MASKED else extra,
                "session_metrics": {"rounds": 2.0, "outcome": outcome} if order == 0 and calls != MASKED else None,
            },
        )
        if calls == MASKED:
            row.extra_fields["failed"], row.own_reward = MASKED, 0.0
        if model in remote:
            row.extra_fields["temperature"] = 1.0
        rows.append(row)
    rows[-1].reward_score = rows[-1].own_reward
    return rows


class Players:
    """An agent-loop manager whose worker has every session recorded; sessions end in an order of the job's own."""

    def __init__(self, section, seed):
        self.rng = np.random.default_rng(seed)
        self.remote = set(section.remote)
        self.worker = object.__new__(TeamWorker)
        vars(self.worker).update(
            section=section, failures=Counter(), delivery=Delivery(section), _said_default=False, mm_processor_kwargs={}
        )
        self.worker.reward_loop_worker_handles, self.worker.processor = None, None
        self.worker.distillation_enabled = False

    def report(self):
        return {}

    def generate_sequences(self, batch):
        asyncio.run(self._play(list(batch["uid"]), [int(i) for i in batch["index"]], batch["global_steps"]))

    async def _play(self, uids, prompts, step):
        sessions = [(i, number) for i in range(len(uids)) for number in range(K)]
        for i, number in self.rng.permutation(sessions).tolist():
            fields = {"uid": uids[i], "index": prompts[i], "session_id": number, "global_steps": step}
            if CALLS[step][prompts[i]][number] == FAILED:
                await self.worker._failed(FAILED, {"validate": False}, fields)
            else:
                rows = session_rows(step, prompts[i], number, self.remote)
                await self.worker._agent_loop_postprocess(rows, False, raw_prompt=[{"role": "user"}], **fields)


class Played:
    """Stands where verl samples finished sessions: all there are but those of one prompt, in any order."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def sample(self, global_steps, partition_id, batch_size):
        there = {key: tag for key, tag in tq.kv_list(partition_id)[partition_id].items() if tag["status"] == "success"}
        gone = [key for key in there if key.startswith(f"u{LEFT_OUT}x")]
        tq.kv_clear(keys=gone, partition_id=partition_id)
        keys = self.rng.permutation([key for key in there if key not in gone]).tolist()
        return KVBatchMeta(keys=keys, tags=[there[k] for k in keys], partition_id=partition_id, extra_info={}), {}


# -- the jobs ----------------------------------------------------------------------------------------------------------

FIELDS = [
    "prompts",
    "responses",
    "response_mask",
    "loss_mask",
    "input_ids",
    "position_ids",
    "rollout_log_probs",
    "old_log_probs",
    "rm_scores",
    "advantages",
    "returns",
    "num_turns",
]


class TrainedModel(Policy):
    """A policy on two ranks, which notes the rows that it is to train on."""

    def __init__(self, weights):
        self.actor_rollout_wg, self.tokenizer = (
            SimpleNamespace(_dispatch_info={"actor": [0, 1]}),
            SimpleNamespace(eos_token_id=0),
        )
        actor = {"loss_agg_mode": "seq-mean-token-mean"}
        self.config = OmegaConf.create({"actor_rollout_ref": {"actor": actor}})
        self.updates_per_step, self.use_critic, self.weights = 4, False, weights
        self.use_reference_policy = True  # asked only where the job has one
        self.seen = []

    def _compute_old_log_prob(self, batch, metrics):
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["rollout_log_probs"])
        data["old_log_probs"] = data.pop("rollout_log_probs") * 0.5
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)
        return batch

    def _compute_ref_log_prob(self, batch, metrics):
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["rollout_log_probs"])
        data["ref_log_prob"] = data.pop("rollout_log_probs") * 0.7
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=data)
        return batch

    def _update_actor(self, batch, metrics):
        names = [*FIELDS, "index", *(["rollout_is_weights"] if self.weights else [])]
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=[*names, "extra_fields"])
        columns = {
            name: [getattr(v, "tolist", lambda v=v: getattr(v, "data", v))() for v in data[name]] for name in names
        }
        for i, tag in enumerate(batch.tags):
            row = {name: column[i] for name, column in columns.items()}
            self.seen.append("padding" if tag.get("is_padding") else (batch.keys[i], row, tag))
        return batch


@dataclass
class Trained:
    """What came of a step: the sub model's batch, in order, and metrics."""

    batch: list
    metrics: dict

    @property
    def rows(self):
        return [row for row in self.batch if row != "padding"]


def algorithm(estimator, kl=None):
    return {
        "adv_estimator": estimator,
        "use_kl_in_reward": kl is not None,
        "kl_penalty": "kl",
        "gamma": 1.0,
        "lam": 1.0,
        "norm_adv_by_std_in_grpo": True,
        "rollout_correction": None,
    }


def section_of(job, url, case):
    agents = {"main": {"model": "main"}} if job != "sub" else {}
    agents |= {agent: {"model": "sub", "invalid_penalty": 0.25} for agent in SUBS}
    models = {"main": {}, "sub": {"remote": {"store": url, "role": "sub"}} if job == "main" else {}}
    section = {"agents": agents, "models": models, "faults": {"failed_sessions": "mask", "max_failed_share": 0.9}}
    section |= {"alignment": case.get("alignment", {}), "advantage": {"balance": case.get("balance", "none")}}
    section["group_by"] = case.get("group_by")
    if job == "sub":
        section |= {"models": {"sub": {}}, "store": {"url": url, "role": "sub"}, "workflow": {"name": "delegate"}}
    return parse({key: value for key, value in section.items() if value is not None})


class Letters:
    """A tokenizer of one model: letters for ids, in a case of its own."""

    eos_token_id = pad_token_id = 0

    def __init__(self, first):
        self.first = ord(first)

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(self.first + int(i) % 26) for i in ids)


def job(cls, name, url, case, dump=None):
    """A trainer without a cluster; with `dump`, a folder, it writes its rollouts."""
    made, section = object.__new__(cls), section_of(name, url, case)
    estimator = case.get("estimator", "mgrpo")
    rollout = {"n": K, "temperature": 1.0, "calculate_log_probs": True}
    made.config = OmegaConf.create(
        {
            "data": {"train_batch_size": PROMPTS},
            "algorithm": algorithm(estimator, case.get("kl")),
            "actor_rollout_ref": {"rollout": rollout},
            "trainer": {"critic_warmup": 0, "v1": {}, "rollout_data_dir": dump},
        }
    )
    policy = OmegaConf.merge(made.config, {"actor_rollout_ref": {"model": {"path": "tiny"}}})
    policies = dict.fromkeys(section.models, policy)
    made.section, made.prepared = section, SimpleNamespace(base_estimator=case.get("base"), policies=policies)
    made.total_training_steps = 2
    made.rows, made._padding, made._masked, made._shown = {}, {}, MaskedRows(dumped=dump is not None), True
    made.tokenizer = Letters("a")
    made.transcripts = Transcripts({model_id: Letters("aA"[i]) for i, model_id in enumerate(section.models)})
    made._init_dump_executor()
    made._collapse, made.workflow, made.curr_step_profile = CollapseWatch(), None, False
    made.use_critic, made.use_reference_policy = False, "kl" in case
    made.kl_ctrl_in_reward = FixedKLController(case.get("kl"))
    made.trainer_mode, made.parameter_sync_step = "sync", 1
    made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    made.lanes = Lanes({"run": Pool("run", 1, 1, tuple(section.models))})
    made.watchdog = Watchdog([], poll=1, hang_timeout=1, on_dead=print, on_end=print)
    made.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)
    made.alignment = Alignment(section.alignment, SUBS, SEED) if estimator == "mgrpo" else None
    weights = case.get("weights", True)
    made.trained = {m: TrainedModel(weights) for m, model in section.models.items() if model.trained_here}
    made.policies = {model_id: made.trained.get(model_id) for model_id in section.models}
    made._build_feeds()
    return made


def player(name, url, case, seed, dump=None):
    made = job(TeamTrainer, name, url, case, dump)
    made.agent_loop_manager, made.replay_buffer = Players(made.section, seed), Played(seed + 1)

    def prompts(num_prompts=None):
        """The step's prompts under names of this job's own."""
        mine = list(CALLS[made.global_steps])
        uids = [f"u{prompt}x{seed}" for prompt in mine]
        fields = {"uid": NonTensorStack(*uids), "index": torch.tensor(mine)}
        return TensorDict({**fields, "global_steps": NonTensorData(made.global_steps)}, batch_size=len(mine))

    made._next_train_batch = prompts
    return made


def trainee(url, case, dump=None):
    made = job(StoreTrainer, "sub", url, case, dump)
    made.model_id, made._mixes, made._sleeps, made._trained_step, made.claimed = "sub", False, False, 0, None
    made.consumer = Consumer(open_store(url, patience=20), "sub", lease=30)
    made.consumer.attach(0)
    made.replay_buffer = ClaimBuffer(made.consumer, made._take)
    made.gateway = SimpleNamespace(report=lambda: {})
    return made


def train(made, step):
    """One step; what the job trained, with rows named by what they are in both jobs."""
    made.global_steps, metrics = step, {}

    def step_once(own, *args):
        done = type(made)._step_once(made, own, *args)
        metrics.update(own)  # before verl multiplies them with the number of rows and divides by it
        return done

    made._step_once = step_once
    for policy in made.trained.values():
        policy.seen = []
    batch = made.step({}, {})
    result = {}
    for model_id, policy in made.trained.items():
        named = []
        for one in policy.seen:
            if one != "padding":
                key, fields, tag = one
                known = {k: v for k, v in vars(made.rows[key]).items() if k not in ("uid", "metrics")}
                one = {**known, **fields, "tag": tag}
            named.append(one)
        result[model_id] = Trained(named, metrics)
    if folder := made.config.trainer.rollout_data_dir:
        made._log_rollout_data(batch, {}, folder)
        made._shutdown_dump_executor()
        made._init_dump_executor()
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    return result


CASES = {
    **{mode: {"alignment": {"mode": mode, "target": 3}} for mode in ("sample", "expected", "mask", "none")},
    "physical": {"alignment": {"mode": "sample", "target": 3, "copies": "physical"}, "weights": False},
    "auto": {"alignment": {"mode": "sample", "target": "auto", "auto_steps": 2}},
    "drmas": {"estimator": "drmas", "weights": False},
    "drmas, balanced": {"estimator": "drmas", "balance": "agent"},
    "rloo by agent": {"estimator": "drmas_per_agent", "base": "rloo", "group_by": "agent", "weights": False},
    "grpo_team": {"estimator": "grpo_team", "weights": False},
}
