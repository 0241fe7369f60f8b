"""Two small jobs that meet in a store, for tests that kill them: python store_jobs.py main|sub URL FOLDER STEPS.

`main` plays steps and resumes at its last checkpoint. `sub` trains on them; its "weights", the list of what it trained
on, go into a checkpoint every second step, and it resumes from there.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from played import row, session

from verl_drmas.store.codec import checksum, pack
from verl_drmas.store.consumer import Consumer
from verl_drmas.store.database import open_store
from verl_drmas.store.producer import Producer

PROMPTS, SESSIONS, MAX_LAG = 3, 4, 1
PATIENCE = 120


def played(step):
    """The sessions of a step, the same in every run; some failed, some have no rows, and step 4 has none at all."""
    draw = random.Random(step)
    for prompt in range(PROMPTS):
        for number in range(SESSIONS):
            ended, rows = draw.random() < 0.9, 0 if step == 4 else draw.randrange(3)
            made = session(step, prompt, number, rows=0, ended=ended, reason="" if ended else "late")
            seed = step * 1000 + prompt * 100 + number * 10
            yield replace(made, rows=tuple(row(seed + i, response=400) for i in range(rows)))


def manifest(step):
    """What the main job trains on: sessions that ended."""
    return {"sessions": [[one.prompt, one.session] for one in played(step) if one.ended]}


def digest(sessions):
    """One text for what a step was trained on."""
    packed = [pack(one) for record in sessions for one in record.rows]
    return checksum(b"".join(packed)).hex()


def weights(steps):
    """What a sub job that trained everything once, in order, has."""
    listed = {step: [one for one in played(step) if one.ended] for step in range(1, steps + 1)}
    return [[step, digest(found)] for step, found in listed.items() if any(one.rows for one in found)]


def main(url, folder, steps):
    producer = Producer(open_store(url, patience=PATIENCE), "sub")
    producer.begin(producer.last_saved() + 1)
    for step in range(producer.last_saved() + 1, steps + 1):
        while producer.gate(step, MAX_LAG).unfinished:
            time.sleep(0.02)
        producer.open_step(step, range(PROMPTS), SESSIONS)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(producer.put_session, played(step)))
        producer.close_step(step, manifest(step))
        time.sleep(0.05)
        if step % 3 == 0:
            producer.saved(step)
    producer.finish(steps)


def sub(url, folder, steps):
    checkpoint = folder / "checkpoint.json"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "weights": []}
    consumer = Consumer(
        open_store(url, patience=PATIENCE), "sub", owner="sub", lease=10, max_attempts=1000, keep_steps=2
    )
    consumer.attach(state["step"])
    while True:
        claimed = consumer.claim()
        if claimed is None:
            if consumer.finished() is not None:
                break
            time.sleep(0.02)
            continue
        time.sleep(0.05)
        state["weights"].append([claimed.step, digest(claimed.sessions)])
        state["step"] = claimed.step
        consumer.trained(claimed.step)
        if len(state["weights"]) % 2 == 0:
            save(state, checkpoint)
            consumer.saved(claimed.step)
    save(state, checkpoint)
    consumer.saved(state["step"])
    consumer.detach()


def save(state, path):
    part = path.with_suffix(".part")
    part.write_text(json.dumps(state))
    os.replace(part, path)


if __name__ == "__main__":
    {"main": main, "sub": sub}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
