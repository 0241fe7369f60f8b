"""Makes logs of runs out of sessions that are counted as they are made up, as verl's file logger writes them."""

import json
from dataclasses import dataclass, field

import numpy as np

SHARED = {"solver": "base", "verifier": "base"}
SEPARATE = {"solver": "solver", "verifier": "verifier"}


@dataclass
class Truth:
    """What was made up, counted one by one."""

    sessions: int = 0
    failed: int = 0
    rows: int = 0
    sampled: int = 0
    tokens: int = 0
    seconds: float = 0.0
    records: list = field(default_factory=list)


def config_text(**changes):
    """A `.hydra/config.yaml` as verl's command leaves it, but for most of its keys."""
    values = {
        "estimator": "drmas",
        "seed": 1,
        "steps": 40,
        "epochs": 2,
        "model": "Qwen/Qwen3-4B",
        "workflow": "solver_verifier",
        "agents": SHARED,
        "own_models": {},
        "batch": 32,
        "n": 8,
        "lr": 1e-6,
        "experiment": "run",
        "project": "project",
        "more": "",
        **changes,
    }
    models = dict.fromkeys(values["agents"].values())
    section = ["drmas:", f"  workflow: {{name: {values['workflow']}, max_rounds: 2}}", "  agents:"]
    section += [f"    {agent}: {{model: {model}, invalid_penalty: 0.1}}" for agent, model in values["agents"].items()]
    section += ["  models:" if models else "  models: {}"]
    for model in models:
        path = values["own_models"].get(model)
        section += [
            f"    {model}: {{trainable: true, actor_rollout_ref: {{{f'model: {{path: {path}}}' if path else ''}}}}}"
        ]
    section += [f"  request_seed: {values['seed']}", "  updates_per_step: 1"]
    team = "\n".join(section) if values["workflow"] else "drmas_absent: true"
    return f"""\
algorithm: {{adv_estimator: {values["estimator"]}, use_kl_in_reward: false}}
data:
  train_files: /data/seed{values["seed"]}/train.parquet
  val_files: /data/seed{values["seed"]}/test.parquet
  train_batch_size: {values["batch"]}
  seed: {values["seed"]}
actor_rollout_ref:
  model: {{path: {values["model"]}}}
  actor: {{optim: {{lr: {values["lr"]}}}, data_loader_seed: {values["seed"]}}}
  rollout:
    n: {values["n"]}
    temperature: 1.0
    mode: ${{oc.env:NO_SUCH_VARIABLE}}
trainer:
  total_training_steps: {"null" if values["steps"] is None else values["steps"]}
  total_epochs: {values["epochs"]}
  project_name: {values["project"]}
  experiment_name: {values["experiment"]}
  default_local_dir: /checkpoints/{values["experiment"]}
{team}
{values["more"]}
"""


def make_records(
    *,
    seed=1,
    steps=40,
    agents=SHARED,
    prompts=4,
    n=4,
    scores=None,
    test_every=0,
    spikes=(),
    lost=(),
    failing=(),
    first=1,
    drift=0.0,
    epoch=None,
):
    """Returns what a run logs, and the truth.

    Args:
        scores: by step or "last", by data source, by metric name.
        test_every: steps between tests' times.
        spikes: steps whose gradient norm is twenty times as large.
        lost: steps whose gradient norm is NaN.
        failing: steps at which one session fails.
        first: step.
        drift: added to rewards.
        epoch: its steps; None: all are of the first one.
    """
    random = np.random.default_rng(seed)
    truth = Truth()
    last = first + steps - 1
    for step in range(first, last + 1):
        data = {"training/global_step": step, "training/epoch": (step - 1) // epoch if epoch else 0}
        failed = int(step in failing)
        ended = prompts * n - failed
        truth.sessions += ended
        truth.failed += failed
        data |= {"drmas/sessions/expected": float(prompts * n), "drmas/sessions/failed": float(failed)}
        if failed:
            data |= {"drmas/sessions/failed/timeout": 1.0, "drmas/sessions/retried_calls": 2.0}
        all_tokens = 0
        progress = (step - 1) / max(1, last)
        for i, agent in enumerate(agents):
            calls = random.integers(1, 3, size=ended) if i == 0 else np.ones(ended, dtype=int)
            rows = int(calls.sum())
            lengths = random.integers(5, 60, size=rows)
            prompt_lengths = random.integers(20, 200, size=rows)
            truth.rows += rows
            truth.sampled += int(lengths.sum())
            all_tokens += int(lengths.sum() + prompt_lengths.sum())
            prefix = f"drmas/agent/{agent}"
            data |= {
                f"{prefix}/rows": float(rows),
                f"{prefix}/reward/mean": float(0.3 + drift + 0.5 * progress + random.normal(0, 0.05)),
                f"{prefix}/activations_per_session": rows / ended,
                f"{prefix}/valid_share": float(1 - 0.3 * (1 - progress) * random.random()),
                f"{prefix}/response_length/mean": float(lengths.mean()),
                f"{prefix}/inflation_factor/mean": float(1 + random.gamma(1.5, 0.4 + 0.6 * i)),
            }
        truth.tokens += all_tokens
        seconds = {name: float(random.uniform(low, 1.3 * low)) for name, low in PHASES.items()}
        if step == first:
            seconds["gen"] += 30.0
        total = sum(seconds.values()) + 0.7
        testing = 5.0 if test_every and step % test_every == 0 else 0.0
        truth.seconds += total + testing
        data |= {f"timing_s/{name}": value for name, value in seconds.items()} | {"timing_s/step": total}
        if testing:
            data["timing_s/testing"] = testing
        data |= {"perf/total_num_tokens": all_tokens, "perf/throughput": all_tokens / total / 4}
        for model in dict.fromkeys(agents.values()):
            norm = float(random.lognormal(-0.5, 0.25)) * (20 if step in spikes else 1)
            entropy = float(0.6 - 0.3 * progress + random.normal(0, 0.02))
            values = {"grad_norm": None if step in lost else norm, "entropy": entropy}
            data |= {f"drmas/model/{model}/{name}": value for name, value in values.items()}
            if len(set(agents.values())) == 1:
                data |= {f"actor/{name}": value for name, value in values.items()}
        data["drmas/workflow/solver_success"] = data[f"drmas/agent/{next(iter(agents))}/reward/mean"]
        for source, found in (scores or {}).get("last" if step == last else step, {}).items():
            data |= {f"val/{source}/{name}": value for name, value in found.items()}
            data[f"val/{source}/failed_sessions"] = 0.0
        truth.records.append((step, data))
    return truth


PHASES = {"gen": 2.0, "old_log_prob": 0.6, "adv": 0.05, "update_actor": 1.5, "update_weights": 0.3}


def write_records(path, records):
    """Writes them as verl's file logger does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in records))
    return path


def write_run(folder, *, config=None, **options):
    """Writes a run's folder, `metrics.jsonl` and Hydra's file, and returns the truth.

    Args:
        folder: to make.
        config: changes of the configuration; False: none is left.
        options: of `make_records`.
    """
    truth = make_records(**options)
    write_records(folder / "metrics.jsonl", truth.records)
    if config is not False:
        hydra = folder / "hydra" / ".hydra"
        hydra.mkdir(parents=True)
        defaults = {"seed": options.get("seed", 1), "steps": options.get("steps", 40), "experiment": folder.name}
        own = {"agents": options.get("agents", SHARED)} | defaults | (config or {})
        (hydra / "config.yaml").write_text(config_text(**own))
    return truth
