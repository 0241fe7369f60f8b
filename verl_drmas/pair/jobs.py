"""What the two jobs of a pair are started with: arguments, environment, and what both must agree on."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_drmas.check_pair import STORE_MODE
from verl_drmas.config import ConfigError
from verl_drmas.listening import is_loopback, listen_at
from verl_drmas.pair.facts import Facts
from verl_drmas.quoting import quoted
from verl_drmas.sockets import JOB

MAIN, SUB = "main", "sub"
STORE = "DRMAS_STORE"  # environment variable with the store's URL, which may hold a password
FROM_STORE = f"${{oc.env:{STORE}}}"
GPUS = "CUDA_VISIBLE_DEVICES"
SHIPPED = Path(__file__).parents[1] / "configs"  # of an installation; in a checkout they are beside the package
CHECKOUT = Path(__file__).parents[2] / "configs"


@dataclass(frozen=True)
class Job:
    """One of the two.

    Attributes:
        name: `main` or `sub`.
        folder: Where its files go.
        config: Flags of main_ppo that name the configuration.
        overrides: The user's.
        own: Ours, which the user's may undo.
        env: What is added to the environment.
    """

    name: str
    folder: Path
    config: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict, repr=False)  # with the token

    def command(self, place: Path) -> list[str]:
        """The command; Ray's files and sockets go to `place`, a folder with a short path that no other job has."""
        return [
            *(sys.executable, "-m", "verl.trainer.main_ppo", *self.config),
            *("++ray_kwargs.ray_init.address=local", f"++ray_kwargs.ray_init._temp_dir={quoted(place)}"),
            f"hydra.run.dir={quoted(self.folder / 'hydra')}",
            f"trainer.default_local_dir={quoted(self.folder / 'checkpoints')}",
            *self.own,
            *self.overrides,
        ]

    def environment(self, place: Path) -> dict[str, str]:
        """The whole environment of a start."""
        own = {JOB: place.name, "VERL_FILE_LOGGER_PATH": str(self.folder / "metrics.jsonl"), "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **own, **self.env}


def config_flags(named: str) -> tuple[str, ...]:
    """Flags of main_ppo for a YAML file, or for the name of a configuration that comes with this package.

    Raises:
        ConfigError: It is neither.
    """
    path = Path(named).expanduser()
    for file in (path, Path(f"{path}.yaml")):
        if file.is_file() and file.suffix == ".yaml":
            # Not --config-path, which would take verl's own folder off the search path.
            return (f"--config-dir={file.resolve().parent}", f"--config-name={file.stem}")
    name = path.name.removesuffix(".yaml")
    folder = SHIPPED if SHIPPED.is_dir() else CHECKOUT
    if str(path) in (name, f"{name}.yaml") and (folder / f"{name}.yaml").is_file():
        return (f"--config-name={name}",)
    raise ConfigError(f"{named}: no such YAML file, and no configuration of this package has that name")


def check_fit(main: Facts, sub: Facts, *, one_machine: bool) -> None:
    """The two configurations are a pair's.

    Args:
        main: Of the job that plays sessions.
        sub: Of the job that trains on them.
        one_machine: Both run here.

    Raises:
        ConfigError: Names job, key, value and fix.
    """
    if main.mode == STORE_MODE or not main.remotes:
        raise ConfigError(
            f"{MAIN}: has no model with drmas.models.<id>.remote (trainer.v1.trainer_mode is {main.mode!r}); the first "
            "configuration is the job's that plays the sessions"
        )
    if sub.mode != STORE_MODE:
        raise ConfigError(
            f"{SUB}: trainer.v1.trainer_mode is {sub.mode!r}; the second configuration is the job's that trains on the "
            f"other's sessions, with {STORE_MODE}"
        )
    roles = {remote.get("role") for remote in main.remotes.values()}
    if sub.store.get("role") not in roles:
        known = ", ".join(sorted(map(str, roles)))
        raise ConfigError(
            f"{SUB}: drmas.store.role is {sub.store.get('role')!r}, and the other job's remote roles are: {known}"
        )
    if len(roles) > 1:
        others = ", ".join(sorted(map(str, roles - {sub.store.get("role")})))
        raise ConfigError(f"{MAIN}: a pair has one remote role; start the jobs of the others ({others}) by hand")
    for name, facts in ((MAIN, main), (SUB, sub)):
        if one_machine and facts.nodes > 1:
            raise ConfigError(
                f"{name}: trainer.nnodes is {facts.nodes}, and a pair is started on one machine: add --{name} "
                "trainer.nnodes=1, or start the jobs by hand, as --dry-run prints"
            )


def choose_store(main: Facts, sub: Facts, given: str | None, default: str) -> tuple[str, list[str], list[str]]:
    """The store's URL, and the overrides of both jobs that name it.

    Args:
        main: Of the job that plays sessions.
        sub: Of the job that trains on them.
        given: What the user wants; None: what the configurations say.
        default: Where nobody says.

    Raises:
        ConfigError: The configurations say different things.
    """
    said = {remote["store"] for remote in main.remotes.values() if remote.get("store")}
    said |= {sub.store["url"]} if sub.store.get("url") else set()
    if given is None and len(said) > 1:
        raise ConfigError(
            "the configurations name two stores: set drmas.models.<id>.remote.store and drmas.store.url alike, or give "
            "--store"
        )
    url = given or next(iter(said), default)

    def missing(own: str | None) -> bool:
        return given is not None or not own

    of_main = [
        f"drmas.models.{model_id}.remote.store={FROM_STORE}"
        for model_id, remote in main.remotes.items()
        if missing(remote.get("store"))
    ]
    return url, of_main, [f"drmas.store.url={FROM_STORE}"] if missing(sub.store.get("url")) else []


def shared_token(main: Facts, sub: Facts, env: Mapping[str, str]) -> dict[str, str]:
    """Token variables of both jobs, all with one value: the environment's, or a new one.

    Raises:
        ConfigError: The environment has different ones.
    """
    names = list(dict.fromkeys([*main.token_variables, *sub.token_variables]))
    values = {env[name].strip() for name in names if env.get(name, "").strip()}
    if len(values) > 1:
        raise ConfigError(f"{' and '.join(names)} hold different tokens; both jobs need the same: set one of them only")
    token = values.pop() if values else secrets.token_urlsafe(32)
    return dict.fromkeys(names, token)


def free_port(host: str, port: int) -> int:
    """`port` if nobody listens there, else a free one.

    Raises:
        ConfigError: The host is no address of this machine.
    """
    try:
        try:
            probe = listen_at(host, port)
        except PermissionError:
            raise
        except OSError:  # taken, or no address: then port 0 is refused as well
            probe = listen_at(host, 0)
        with probe:
            return probe.getsockname()[1]
    except OSError as error:
        raise ConfigError(f"drmas.gateway.host is {host!r}, port {port}: {error.strerror or error}") from None


def split_gpus(main: Facts, sub: Facts, env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Environments that give each job GPUs of its own: Ray would hand the first ones to both.

    Raises:
        ConfigError: There are too few.
    """
    if main.device != "cuda" or sub.device != "cuda":
        return {}, {}
    named = [gpu.strip() for gpu in env.get(GPUS, "").split(",") if gpu.strip()]
    here = named or [str(i) for i in range(main.visible)]
    needed = main.gpus + sub.gpus
    if len(here) < needed:
        raise ConfigError(
            f"the jobs need {main.gpus} + {sub.gpus} GPUs, and this machine has {len(here)} for them: lower "
            f"trainer.n_gpus_per_node of one (--{MAIN}, --{SUB}), or use two machines (--dry-run)"
        )
    return {GPUS: ",".join(here[: main.gpus])}, {GPUS: ",".join(here[main.gpus : needed])}


def hide(text: str) -> str:
    """The text without passwords of URLs."""
    return re.sub(r"(://[^:/@\s]*:)[^@/\s]+@", r"\1***@", text)


def by_hand(job: Job, facts: Facts, url: str | None) -> str:
    """How to start a job alone on a machine: a shell's lines, with the token by its variable's name.

    Args:
        job: The job.
        facts: Of its configuration.
        url: The store that its configuration names; None: none.
    """
    lines = [f"# {job.name}: on a machine of its own"]
    if facts.nodes > 1:
        lines.append("# its cluster has several machines: set the variables on each before `ray start`")
    lines += [_needed(name, "one long random text, the same for both jobs") for name in facts.token_variables]
    own: Sequence[str] = ()
    if url is None or url.startswith("sqlite"):
        own = [o for o in job.own if o.endswith(FROM_STORE)]
        lines.append(_needed(STORE, "postgresql+psycopg://user@host/name; the password in PGPASSWORD or ~/.pgpass"))
    if facts.store and is_loopback(facts.host):
        lines.append(
            f"# drmas.gateway.host is {facts.host}: add drmas.gateway.host=ADDRESS for the other machine to reach it, "
            "with tls_cert and tls_key unless the network is private"
        )
    words = ["python", "-m", "verl.trainer.main_ppo", *job.config, *own, *job.overrides]
    return "\n".join([*lines, hide(shlex.join(words))])


def _needed(name: str, what: str) -> str:
    """A shell's line that stops where a variable isn't set."""
    return f'export {name}="${{{name}:?{what}}}"'
