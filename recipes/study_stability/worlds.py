"""The teams of the study: who is called when, and what a session earns.

A router, a searcher and an answerer serve prompts. A prompt hides a chain of keys and an answer; the searcher is shown
the next key and must say the query that belongs to it, the answerer is shown the evidence (or nothing) and must say the
answer that belongs to it. Which query and which answer belong is drawn per seed and has to be learned.

* ``search`` The router decides in each of four turns to search or to answer; a fourth search is not made, and the
  session ends without an answer. So the searcher acts 0 to 3 times, the answerer at most once, the router 1 to 4 times.
* ``rescue`` As ``search``, but most sessions have their evidence from the start, the answerer is good already, and a
  right query often finds nothing: the searcher acts in few sessions, again and again in those that fail. The world that
  the paper's argument fits best.
* ``faulty`` As ``search``, with malformed actions.
* ``even`` Everybody acts once in every session: the control, in which agent-wise statistics can change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from recipes.study_stability.policy import log_softmax

AGENTS = ("router", "searcher", "answerer")
ROUTER, SEARCHER, ANSWERER = range(3)
TURNS = 4
SEARCH, ANSWER, MALFORMED = range(3)


class Draw(IntEnum):
    """What random numbers are for. It comes first in their seed: numpy fills seeds up with zeros, so that without it
    (1,) and (1, 0), such as a world and its first step, would be the same numbers.
    """

    TRUTH = 1
    TRAINING = 2
    ORDER = 3
    PROBE = 4


@dataclass(frozen=True)
class World:
    """A world; its defaults are those of ``search``.

    Attributes:
        name: in tables and figures.
        keys: different keys, queries, pieces of evidence and answers.
        hops: pieces of evidence that prompts need, equally often.
        found: probability that a right query finds its passage.
        given: probability that a session has its evidence from the start.
        searcher: its probability of the right query before training.
        answerer: its probability of the right answer before training.
        lean: logit that the router's right choice has before training; 0 is a coin.
        malformed: probability of a malformed action before training; 0: agents have no such action. A malformed choice
            of the router is a search, as the reference code has it; a malformed query finds nothing.
        even: everybody acts once: the router picks one of two indices, and the other one finds nothing.
    """

    name: str
    keys: int = 8
    hops: tuple[int, ...] = (0, 1, 2)
    found: float = 0.8
    given: float = 0.0
    searcher: float = 0.25
    answerer: float = 0.25
    lean: float = 0.0
    malformed: float = 0.0
    even: bool = False


WORLDS = {
    world.name: world
    for world in (
        World("search"),
        World("rescue", hops=(1,), found=0.5, given=0.8, answerer=0.8, lean=2.0),
        World("even", hops=(1,), even=True),
        World("faulty", malformed=0.1),
    )
}


@dataclass(frozen=True)
class Batch:
    """The rows of one step, one per action, sorted by session and by order within it.

    Attributes:
        uid: prompt of each row, int (rows,).
        session: int (rows,), numbered over all prompts.
        agent: index into `AGENTS`, int (rows,).
        activation: order within the session, int (rows,).
        context: what the agent was shown, int (rows,).
        action: int (rows,).
        log_prob: of the action when it was sampled, float64 (rows,).
        valid: whether the action is well formed, bool (rows,).
        reward: the session's outcome, 0 or 1, float64 (rows,).
        success: outcome of each session (sessions,).
    """

    uid: np.ndarray
    session: np.ndarray
    agent: np.ndarray
    activation: np.ndarray
    context: np.ndarray
    action: np.ndarray
    log_prob: np.ndarray
    valid: np.ndarray
    reward: np.ndarray
    success: np.ndarray

    def __len__(self) -> int:
        return len(self.uid)

    def rows_of(self, agent: int) -> np.ndarray:
        """Returns the numbers of an agent's rows."""
        return np.flatnonzero(self.agent == agent)

    @property
    def ids(self) -> dict[str, np.ndarray]:
        """Returns what the estimators and diagnostics take."""
        return {"uid": self.uid, "session": self.session, "agent_id": self.agent}


@dataclass(frozen=True)
class Truth:
    """What has to be learned: the query of each key and the answer of each evidence, int (keys,) each."""

    query: np.ndarray
    answer: np.ndarray


def first_tables(world: World, seed: int) -> tuple[Truth, list[np.ndarray]]:
    """Returns what is true under a seed, and each agent's logits (contexts, actions) before training."""
    draw = np.random.default_rng((Draw.TRUTH, seed))
    keys = world.keys
    truth = Truth(draw.permutation(keys), draw.permutation(keys))

    def skilled(right: Sequence[int], skill: float, contexts: int) -> np.ndarray:
        logits = np.zeros((contexts, keys))
        logits[np.arange(len(right)), right] = np.log(skill * (keys - 1) / (1 - skill))
        return logits

    if world.even:
        router = np.zeros((2, 2))  # shown the kind of the question
    else:
        router = np.zeros((2 * TURNS, 2))  # shown whether the evidence is complete, and the turn
        router[:TURNS, SEARCH] = router[TURNS:, ANSWER] = world.lean
    tables = [
        router,
        skilled(truth.query, world.searcher, keys),
        skilled(truth.answer, world.answerer, keys + 1),  # the last context is no evidence: nothing to be right by
    ]
    if world.malformed:
        tables = [np.column_stack([table, _logit_of(world.malformed, table)]) for table in tables]
    return truth, tables


def _logit_of(share: float, logits: np.ndarray) -> np.ndarray:
    """The logit that has probability `share` beside these: (contexts,)."""
    return np.log(share / (1 - share)) + np.log(np.exp(logits).sum(-1))


class Sampler:
    """Plays sessions with the agents' tables as they stand.

    The random numbers of a step depend on purpose, seed and step alone, a number to each session, turn and agent: runs
    of different estimators differ by what they learned, not by their luck.

    Args:
        world: to play in.
        truth: what is right there.
        prompts: of a step.
        sessions: of a prompt.
        draw: what it samples for; another purpose has other prompts and other luck.
        seed: of both.
    """

    def __init__(self, world: World, truth: Truth, prompts: int, sessions: int, draw: Draw, seed: int):
        self.world, self.truth, self.prompts, self.sessions = world, truth, prompts, sessions
        self.draw, self.seed = draw, seed

    def sample(self, tables: Sequence[np.ndarray], step: int) -> Batch:
        """Returns a batch of `prompts` times `sessions` sessions, sampled from the agents' logits."""
        draw = np.random.default_rng((self.draw, self.seed, step))
        play = _Play(self, [log_softmax(table) for table in tables], draw)
        (play.pipeline if self.world.even else play.routed)()
        return play.batch()


class _Play:
    """One batch while it is played; every array has one entry a session."""

    def __init__(self, sampler: Sampler, log_probs: list[np.ndarray], draw: np.random.Generator):
        world, prompts, n = sampler.world, sampler.prompts, sampler.sessions
        self.world, self.truth, self.log_probs, self.sessions_each = world, sampler.truth, log_probs, n
        self.count = prompts * n
        self.keys = np.repeat(draw.integers(world.keys, size=(prompts, TURNS)), n, axis=0)
        self.evidence = np.repeat(draw.integers(world.keys, size=prompts), n)
        self.kind = np.repeat(draw.integers(2, size=prompts), n)
        hops = np.repeat(draw.choice(world.hops, size=prompts), n)
        self.missing = np.where(draw.random(self.count) < world.given, 0, hops)
        self.hops = self.missing.copy()
        self.luck = draw.random((self.count, TURNS, len(AGENTS)))
        self.index_luck = draw.random((self.count, TURNS))
        self.success = np.zeros(self.count)
        self.rows: list[tuple[np.ndarray, ...]] = []

    def routed(self) -> None:
        """The router decides in each turn; ``search`` and ``rescue``."""
        playing = np.arange(self.count)
        for turn in range(TURNS):
            complete = self.missing[playing] == 0
            choice = self._act(ROUTER, playing, turn, complete * TURNS + turn)
            answering = choice == ANSWER
            self._answer(playing[answering], turn)
            playing = playing[~answering]
            if turn < TURNS - 1:
                self._search(playing, turn, np.ones(len(playing), dtype=bool))

    def pipeline(self) -> None:
        """Router, searcher and answerer act once each; ``even``."""
        everybody = np.arange(self.count)
        choice = self._act(ROUTER, everybody, 0, self.kind)
        self._search(everybody, 0, choice == self.kind)
        self._answer(everybody, 0)

    def _search(self, sessions: np.ndarray, turn: int, index_has_it: np.ndarray) -> None:
        key = self.keys[sessions, (self.hops - self.missing)[sessions]]
        query = self._act(SEARCHER, sessions, turn, key)
        right = (query == self.truth.query[key]) & (self.index_luck[sessions, turn] < self.world.found) & index_has_it
        self.missing[sessions] -= right & (self.missing[sessions] > 0)

    def _answer(self, sessions: np.ndarray, turn: int) -> None:
        shown = np.where(self.missing[sessions] == 0, self.evidence[sessions], self.world.keys)
        answer = self._act(ANSWERER, sessions, turn, shown)
        self.success[sessions] = answer == self.truth.answer[self.evidence[sessions]]

    def _act(self, agent: int, sessions: np.ndarray, turn: int, context: np.ndarray) -> np.ndarray:
        """Samples an action for each session, keeps its row, and returns the actions (sessions,)."""
        log_probs = self.log_probs[agent][context]
        below = np.cumsum(np.exp(log_probs), axis=-1)[:, :-1]
        action = (self.luck[sessions, turn, agent][:, None] >= below).sum(-1)
        order = np.full(len(sessions), turn * len(AGENTS) + agent)
        chosen = log_probs[np.arange(len(sessions)), action]
        self.rows.append((sessions, np.full(len(sessions), agent), order, context, action, chosen))
        return action

    def batch(self) -> Batch:
        session, agent, order, context, action, log_prob = (
            np.concatenate(column) for column in zip(*self.rows, strict=True)
        )
        by_session = np.lexsort((order, session))
        session, agent, order = session[by_session], agent[by_session], order[by_session]
        context, action, log_prob = context[by_session], action[by_session], log_prob[by_session]
        last = np.array([table.shape[1] - 1 for table in self.log_probs])[agent]
        valid = (action < last) if self.world.malformed else np.ones(len(action), dtype=bool)
        uid = session // self.sessions_each
        reward = self.success[session]
        return Batch(uid, session, agent, order, context, action, log_prob, valid, reward, self.success)
