"""Tokens, latency and money by agent, from the calls of finished sessions (Dr. MAS, the latency and cost study)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_drmas.config import nearest, parse

MILLION = 1_000_000


@dataclass
class Price:
    """What a million tokens cost.

    Attributes:
        prompt: Of those that are read.
        response: Of those that are sampled.
    """

    prompt: float
    response: float

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self):
        for name in ("prompt", "response"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; a price is a number, 0 or above")


@dataclass
class Prices:
    """A file of prices.

    Attributes:
        models: By model id, or by the model's name on its server.
        currency: Shown beside sums.
    """

    models: dict[str, Price]
    currency: str = "USD"

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def of(self, models: Mapping[str, str]) -> dict[str, Price]:
        """The price of each model.

        Args:
            models: Name on its server by model id.

        Raises:
            ValueError: One has none; a sum without it would be no sum.
        """
        found = {}
        for model_id, name in models.items():
            price = self.models.get(model_id) or self.models.get(name)
            if price is None:
                hint = nearest(model_id, self.models)
                raise ValueError(f"--prices: models has no price of {model_id!r} (served as {name!r}); {hint}")
            found[model_id] = price
        return found


def read_prices(path: Path) -> Prices:
    """A file of prices: `models: {<id>: {prompt: 0.3, response: 0.3}}`, per million tokens.

    Raises:
        ValueError: One line on what is wrong with it.
    """
    try:
        given = OmegaConf.to_container(OmegaConf.load(path.expanduser()), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prices {path}: {' '.join(str(error).split())}") from error
    return parse(given, Prices, path.name, strict=True)


@dataclass(frozen=True)
class Latency:
    """Seconds of several calls or sessions."""

    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency | None:
        """None of none."""
        if not seconds:
            return None
        p50, p95 = (float(value) for value in np.percentile(seconds, (50, 95)))
        return cls(fmean(seconds), p50, p95)


@dataclass(frozen=True)
class AgentUse:
    """What an agent did and took, in sessions that ended.

    Attributes:
        model: Model id.
        sessions: In which it acted.
        activations: Its activations.
        valid: Of them, with a valid action.
        truncated: Of them, with a last turn that ended at its token limit.
        calls: LLM calls.
        retried: Of them, answered after more than one attempt.
        prompt_tokens: Read, over all calls; None: a server doesn't say.
        response_tokens: Sampled; None: a server doesn't say.
        latency: Of its calls.
        cost: In the price file's currency; None: without prices, or tokens.
    """

    model: str
    sessions: int
    activations: int
    valid: int
    truncated: int
    calls: int
    retried: int
    prompt_tokens: int | None
    response_tokens: int | None
    latency: Latency | None
    cost: float | None


def use_by_agent(
    lines: Iterable[Mapping[str, Any]], agents: Mapping[str, str], prices: Mapping[str, Price] | None = None
) -> dict[str, AgentUse]:
    """What each agent did and took.

    Args:
        lines: Sessions, as `results.line_of` writes them.
        agents: Model id by agent.
        prices: By model id; None: nothing has a price.
    """
    acted: dict[str, list[Mapping[str, Any]]] = {agent: [] for agent in agents}
    called: dict[str, list[Mapping[str, Any]]] = {agent: [] for agent in agents}
    sessions = dict.fromkeys(agents, 0)
    for line in lines:
        for action in line["activations"]:
            acted[action["agent"]].append(action)
        for call in line["calls"]:
            called[call["agent"]].append(call)
        for agent in {action["agent"] for action in line["activations"]}:
            sessions[agent] += 1
    return {
        agent: AgentUse(
            model=model,
            sessions=sessions[agent],
            activations=len(acted[agent]),
            valid=sum(action["valid"] for action in acted[agent]),
            truncated=sum(action["truncated"] for action in acted[agent]),
            calls=len(called[agent]),
            retried=sum(call["tries"] > 1 for call in called[agent]),
            prompt_tokens=total(call["prompt"] for call in called[agent]),
            response_tokens=total(call["response"] for call in called[agent]),
            latency=Latency.of([call["seconds"] for call in called[agent]]),
            cost=cost_of(called[agent], prices),
        )
        for agent, model in agents.items()
    }


def cost_of(calls: Iterable[Mapping[str, Any]], prices: Mapping[str, Price] | None) -> float | None:
    """What calls cost; None: without prices, or where a server doesn't count tokens."""
    if prices is None:
        return None
    parts = []
    for call in calls:
        price = prices[call["model"]]
        if call["prompt"] is None or call["response"] is None:
            return None
        parts.append(call["prompt"] * price.prompt + call["response"] * price.response)
    return sum(parts) / MILLION


def total(counts: Iterable[int | None]) -> int | None:
    """A sum; None: a part isn't known."""
    listed = list(counts)
    return None if None in listed else sum(listed)
