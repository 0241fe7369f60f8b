"""Version labels (`make drills`): answers of a real engine behind a real gateway, some of them over a weight update.

A job of mode `drmas_store` trains on sessions that this file puts into its store, while calls go on at its gateway.
Each call has a prompt and a seed, and is asked again and again: weights of one version give it one text. So an answer
whose label leaves out a version shows: it has another text than the others of its label.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from delegate_job import PROMPTS, SESSIONS
from launch import start as start_job
from pair_job import of_main, of_sub
from pydantic import SecretStr

from recipes.cpu_job import QUIET
from verl_drmas.gateway.caller import Caller
from verl_drmas.gateway.errors import Busy, CallFailed
from verl_drmas.gateway.wire import Answer, write_request
from verl_drmas.store.codec import PackedRow
from verl_drmas.store.database import open_store
from verl_drmas.store.producer import Producer
from verl_drmas.store.records import SessionRecord

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]

TOKEN = "a-long-random-text-of-the-versions-drill"
STEPS = 6
CALLS = 24  # different ones
LENGTH = 40  # tokens of an answer, long enough to be cut by an update
LABEL = tuple[int, int]


def contract(start) -> dict:
    """What the job that plays the sessions would have put."""
    from verl_drmas.check import prepare_keys
    from verl_drmas.check_command import compose_as_verl
    from verl_drmas.trainer.contract import terms

    config = compose_as_verl(
        ["--config-name=cpu_delegate_main", "drmas.models.sub.remote.store=sqlite:////unused.db", *of_main(start)]
    )
    prepared = prepare_keys(config)
    return {
        "terms": terms(config, prepared.section, ["finder"]),
        "total_training_steps": STEPS,
        "alignment_seed": 1,
        "model": "finder",
    }


class Load:
    """Asks the gateway the same calls over and over, and keeps every answer by its call and its label."""

    def __init__(self, url: str):
        self.url, self.caller = url, Caller(SecretStr(TOKEN))
        self.texts: dict[int, dict[LABEL, Counter[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(Counter))
        self.turned_away: Counter[str] = Counter()

    def prompt(self, call: int) -> list[int]:
        return [random.Random(call).randrange(5, 40) for _ in range(12)]

    async def ask(self, call: int) -> Answer:
        """One answer, asked until it comes."""
        sampling = {"max_tokens": LENGTH, "temperature": 1.0, "seed": call, "ignore_eos": True, "logprobs": True}
        body = write_request(uuid4().hex, "sub", self.prompt(call), sampling, 0)
        while True:
            try:
                answer = await self.caller.generate(self.url, body)
            except Busy:
                self.turned_away["busy"] += 1
                await asyncio.sleep(0.2)
            except CallFailed as error:
                self.turned_away[type(error).__name__] += 1
                await asyncio.sleep(0.2)
            else:
                label = answer.min_version, answer.max_version
                self.texts[call][label][tuple(answer.token_ids)] += 1
                return answer

    async def go_on(self, calls: range) -> None:
        """Ask for ever."""
        while True:
            for call in calls:
                await self.ask(call)


def session(step: int, prompt: int, number: int, asked: list[int], answer: Answer) -> SessionRecord:
    """A session with one call, rewarded by chance, so that every step changes the weights."""
    row = PackedRow(
        agent_id="finder",
        prompt_ids=np.array(asked, dtype=np.int32),
        response_ids=np.array(answer.token_ids, dtype=np.int32),
        response_mask=np.ones(len(answer.token_ids), dtype=bool),
        logprobs=np.array(answer.log_probs, dtype=np.float32),
        reward=float((number + prompt) % 2),
        min_version=answer.min_version,
        max_version=answer.max_version,
        fields={
            "position": 0,
            "num_turns": 2,
            "extra": {"model_id": "sub", "valid": True, "path": "main/turn.0/call.0/finder"},
        },
    )
    return SessionRecord(step, prompt, number, True, "", row.reward, step - 1, (row,))


async def play(producer: Producer, load: Load) -> None:
    """Feed the job step by step, in the middle of the load, without ever waiting for its training."""
    background = [asyncio.create_task(load.go_on(range(i, CALLS, 4))) for i in range(4)]
    try:
        for step in range(1, STEPS + 1):
            producer.open_step(step, range(PROMPTS), SESSIONS)
            for prompt in range(PROMPTS):
                for number in range(SESSIONS):
                    call = prompt * SESSIONS + number
                    producer.put_session(session(step, prompt, number, load.prompt(call), await load.ask(call)))
            sessions = [[p, n] for p in range(PROMPTS) for n in range(SESSIONS)]
            producer.close_step(step, {"sessions": sessions, "target": {"finder": 2}})
        while producer.consumer().version < STEPS:
            await asyncio.sleep(0.2)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)


@pytest.fixture(scope="module")
def load(delegate_start):
    folder = Path(tempfile.mkdtemp(prefix="v"))
    url = f"sqlite:///{folder / 'store.db'}"
    producer = Producer(open_store(url), "sub")
    producer.put_contract(contract(delegate_start))
    producer.begin(1)
    more = [f"drmas.store.url={url}", "+drmas.gateway.port=0", "trainer.resume_mode=disable", "trainer.save_freq=-1"]
    job = start_job(
        folder / "sub", of_sub(delegate_start, *more), steps=STEPS, defaults=("--config-name=cpu_delegate_sub",),
        DRMAS_GATEWAY_TOKEN=TOKEN, **QUIET,
    )  # fmt: skip
    try:
        job.wait_for(r"the gateway is on", 420)
        while (endpoint := producer.consumer().endpoint) is None:
            assert job.process.poll() is None, job.log[-3000:]
        made = Load(endpoint)

        async def run() -> None:
            try:
                await asyncio.wait_for(play(producer, made), 300)
            finally:
                await made.caller.close()

        asyncio.run(run())
        producer.finish(STEPS)
        job.wait(60)
        assert job.returncode == 0, job.log[-3000:]
        yield made
    finally:
        job.kill()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_version_gives_a_call_one_text(load):
    """An answer over an update that is labelled with one version would be a second text of that version."""
    pure = 0
    for call, by_label in load.texts.items():
        for (first, last), texts in by_label.items():
            if first == last:
                assert len(texts) == 1, (call, first, texts)
                pure += sum(texts.values())
    versions = {label[0] for by_label in load.texts.values() for label in by_label}
    assert versions >= set(range(STEPS)) and pure > 50
    changed = sum(len({t for (a, b), texts in by.items() if a == b for t in texts}) > 1 for by in load.texts.values())
    assert changed > CALLS / 2  # the weights did change, and the texts with them


def test_an_answer_over_an_update_has_both_labels_and_begins_as_the_old_weights_say(load):
    spanning = 0
    for by_label in load.texts.values():
        for (first, last), texts in by_label.items():
            if first == last:
                continue
            assert last > first
            spanning += sum(texts.values())
            (old,) = by_label.get((first, first), {None: 1})
            for text in texts:
                assert len(text) == LENGTH
                assert old is None or text[0] == old[0]
    total = sum(sum(texts.values()) for by in load.texts.values() for texts in by.values())
    print(f"\n{total} answers, {spanning} over an update, turned away {dict(load.turned_away)}")
    assert spanning > 0
