"""What a launcher must know of a job's configuration: `python -m verl_drmas.pair.facts <arguments of main_ppo>`.

Composing a configuration imports verl and torch, which a launcher that lives as long as the jobs shouldn't hold; so it
asks a process of its own, which answers in JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verl_drmas.config import ConfigError
from verl_drmas.store.settings import TOKEN, GatewayConfig

TIMEOUT = 300  # seconds to compose a configuration on a busy machine


@dataclass(frozen=True)
class Facts:
    """Of one job.

    Attributes:
        mode: `trainer.v1.trainer_mode`.
        device: `trainer.device`.
        nodes: Machines of the job's largest pool.
        gpus: GPUs it needs on a machine.
        visible: GPUs that this machine has for it.
        remotes: `drmas.models.<id>.remote` by model id, as far as it is set.
        store: `drmas.store`, as far as it is set.
        gateway: `drmas.gateway`, as far as it is set.
    """

    mode: str = ""
    device: str = "cuda"
    nodes: int = 1
    gpus: int = 1
    visible: int = 0
    remotes: dict[str, dict[str, Any]] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)
    gateway: dict[str, Any] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return self.gateway.get("host") or GatewayConfig.host

    @property
    def port(self) -> int:
        port = self.gateway.get("port")
        return GatewayConfig.port if port is None else int(port)

    @property
    def token_variables(self) -> list[str]:
        """Environment variables in which the job looks for the gateway's token."""
        sections = [*self.remotes.values(), *([self.gateway] if self.store else [])]
        return list(dict.fromkeys(section.get("token_env") or TOKEN for section in sections))


def look(jobs: Mapping[str, Sequence[str]], env: Mapping[str, str]) -> dict[str, Facts]:
    """Compose the jobs' configurations, all at once.

    Args:
        jobs: Arguments of main_ppo, by job.
        env: Environment of the jobs.

    Raises:
        ConfigError: Why one of them can't be composed.
    """
    command = [sys.executable, "-m", __name__]
    asked = {
        name: subprocess.Popen([*command, *arguments], env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name, arguments in jobs.items()
    }
    answers = {}
    try:
        for name, process in asked.items():
            try:
                out, err = process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                raise ConfigError(f"{name}: its configuration was not composed within {TIMEOUT} s") from None
            if process.returncode:
                lines = err.decode(errors="replace").strip().splitlines() or ["it said nothing"]
                raise ConfigError(f"{name}: {lines[-1]}")
            answers[name] = Facts(**json.loads(out.decode().splitlines()[-1]))
    finally:
        for process in asked.values():
            if process.poll() is None:
                process.kill()
                process.communicate()
    return answers


def read(config: Any) -> Facts:
    """What a composed configuration says."""
    from omegaconf import OmegaConf

    def section(key: str) -> dict[str, Any]:
        found = OmegaConf.select(config, key)
        plain = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else {}
        return plain if isinstance(plain, dict) else {}

    models = {name: model or {} for name, model in section("drmas.models").items()}
    remotes = {name: model["remote"] for name, model in models.items() if model.get("remote")}
    here = [model for name, model in models.items() if name not in remotes] or [{}]
    run = {key: int(OmegaConf.select(config, f"trainer.{key}") or 1) for key in ("n_gpus_per_node", "nnodes")}
    pools = list(section("drmas.pools").values())
    if any(not model.get("pool") for model in here):
        pools.append(run)
    return Facts(
        mode=str(OmegaConf.select(config, "trainer.v1.trainer_mode")),
        device=str(OmegaConf.select(config, "trainer.device") or "cuda"),
        nodes=max(int(pool.get("nnodes") or 1) for pool in pools),
        gpus=sum(int(pool.get("n_gpus_per_node") or 1) for pool in pools),
        remotes=remotes,
        store=section("drmas.store"),
        gateway=section("drmas.gateway"),
    )


def main(arguments: Sequence[str]) -> int:
    """Print the facts, or one line on why there are none."""
    from dataclasses import replace

    import torch
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_drmas.check_command import compose_as_verl

    try:
        facts = read(compose_as_verl(arguments))
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 1
    if facts.device == "cuda":
        facts = replace(facts, visible=torch.cuda.device_count())
    sys.stdout.write(f"{json.dumps(asdict(facts))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
