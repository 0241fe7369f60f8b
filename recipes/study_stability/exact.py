"""The expected success of a team, by its tables: what sampling would give with no end of sessions, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recipes.study_stability.worlds import ANSWER, TURNS, Truth, World


def expected_success(world: World, truth: Truth, tables: Sequence[np.ndarray]) -> tuple[float, list[np.ndarray]]:
    """Returns the probability that a session succeeds, and its gradient by each agent's logits.

    Args:
        world: without malformed actions.
        truth: what is right.
        tables: each agent's logits (contexts, actions).

    Raises:
        ValueError: the world has malformed actions.
    """
    if world.malformed:
        raise ValueError(
            f"world {world.name!r} has malformed actions, of which the formula knows nothing: give another"
        )
    logits = [torch.tensor(table, dtype=torch.float64, requires_grad=True) for table in tables]
    router, searcher, answerer = (torch.softmax(table, -1) for table in logits)
    keys = torch.arange(world.keys)
    hit = searcher[keys, torch.from_numpy(truth.query)] * world.found  # by key
    knows = answerer[keys, torch.from_numpy(truth.answer)].mean()
    guesses = answerer[-1, torch.from_numpy(truth.answer)].mean()
    if world.even:
        complete = (router[0, 0] + router[1, 1]) / 2 * hit.mean()
        value = complete * knows + (1 - complete) * guesses
    else:
        value = _routed(world, router, hit, knows, guesses)
    value.backward()
    return float(value.detach()), [table.grad.numpy() for table in logits]


def _routed(world: World, router: Tensor, hit: Tensor, knows: Tensor, guesses: Tensor) -> Tensor:
    """Backwards over the turns. `missing[m]` is the value with m pieces missing, by the key of the next one (keys,)."""
    longest = max(world.hops)
    complete = torch.zeros((), dtype=torch.float64)
    missing = [torch.zeros_like(hit) for _ in range(longest + 1)]
    for turn in reversed(range(TURNS)):
        done, seeking = router[TURNS + turn], router[turn]
        # The last turn's search is not made: what comes after it is worth nothing.
        later = [complete.expand_as(hit), *(missing[m].mean().expand_as(hit) for m in range(1, longest))]
        missing = [
            missing[0],
            *(
                seeking[ANSWER] * guesses + (1 - seeking[ANSWER]) * (hit * later[m - 1] + (1 - hit) * missing[m])
                for m in range(1, longest + 1)
            ),
        ]
        complete = done[ANSWER] * knows + (1 - done[ANSWER]) * complete
    starts = torch.stack([complete if hops == 0 else missing[hops].mean() for hops in world.hops])
    return world.given * complete + (1 - world.given) * starts.mean()
