"""`algorithm.adv_estimator=recorded`: `drmas`, written down row by row; the advantages of one agent may be zeroed.

Loaded by verl through VERL_USE_EXTERNAL_MODULES, as a user's own estimator would be.
"""

from __future__ import annotations

import json
import os

import wrapt


def _register(_) -> None:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, register_adv_est

    from verl_drmas.trainer.step import current_rows

    @register_adv_est("recorded")
    def recorded(**kwargs):
        advantages, returns = get_adv_estimator_fn("drmas")(**kwargs)
        step = current_rows("recorded")
        zero = os.environ.get("RECORDING_ZERO")
        for i, row in enumerate(step.rows):
            if row is not None and row.agent_id == zero:
                advantages[i] = 0.0
        if path := os.environ.get("RECORDING_PATH"):
            record = [
                [*row.order, row.agent_id, float(score), float(advantage)]
                for row, score, advantage in zip(step.known, step.scores, step.advantage, strict=True)
            ]
            with open(path, "a") as file:
                file.write(json.dumps(sorted(record)) + "\n")
        return advantages, returns


wrapt.register_post_import_hook(_register, "verl_drmas.trainer.estimators")
