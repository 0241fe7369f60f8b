"""Makes dumps as the team trainer writes them, of sessions that nobody played."""

import json

SETTINGS = {
    "estimator": "drmas",
    "base_estimator": None,
    "algorithm": {"adv_estimator": "drmas"},
    "sessions": 8,
    "sessions_played": 8,
    "section": {"agents": {}, "models": ["base"], "advantage": {}, "group_by": "prompt"},
    "alignment": None,
    "copies": None,
    "whole_team": True,
    "version": "0.1.0",
}


def activation(agent, path, pieces, *, reward=1.0, advantage=0.5, order=0, trained=True, ours=None, **changes):
    """One row: where it stands in its session, and what was said.

    Args:
        agent, path: Who, and where.
        pieces: (sampled, text) of the response.
        reward, advantage: Of the row.
        order: Of the row in its session.
        trained: False leaves out what training made of it.
        ours: Changes of that.
        changes: Of the column `drmas`, or of the line where it has that key.
    """
    own = {
        "format": 1,
        "path": path,
        "activation": order,
        "valid": True,
        "spans": [[int(sampled), max(1, len(text) // 4), len(text)] for sampled, text in pieces],
        "prompt_tokens": 12,
        "turns": float(sum(sampled for sampled, _ in pieces)),
        "versions": [4, 4],
        "reward": None if "failed" in changes else reward,
        "outcome": reward,
        "parts": {},
        "counts": {"cut_characters": 0.0, "turns": 1.0, "truncated": 0.0},
        "session": None,
        "told": {},
    }
    if trained:
        tokens = sum(n for kind, n, _ in own["spans"] if kind)
        own["trained"] = {
            "position": 0, "reward": reward, "penalty": 0.0, "tokens": tokens, "copies": None, "updated": True,
            "advantage": advantage, "weight": None, **(ours or {}),
        }  # fmt: skip
    line = {
        "input": f"You are the {agent}. Find out what is asked.",
        "output": "".join(text for _, text in pieces),
        "gts": "42",
        "score": reward,
        "step": 5,
        "agent_id": agent,
        "model_id": "base",
        "acc": reward,
    }
    for key, value in changes.items():
        (line if key in (*line, "failed", "fault") else own)[key] = value
    return line | {"drmas": own}


def write_step(folder, sessions, *, step=5, settings=SETTINGS, padding=1):
    """Write `<folder>/<step>.jsonl` as verl does.

    Args:
        sessions: Rows by (dataset index, session).
        settings: Of the step; None: validation.
        padding: Rows of padding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for (index, session), rows in sorted(sessions.items()):
        for number, row in enumerate(rows):
            lines.append(row | {"uid": f"p{index}_{session}_{number}", "index": index, "step": step})
    for position, line in enumerate(line for line in lines if "trained" in line["drmas"]):
        line["drmas"]["trained"]["position"] = position
    if settings is not None:
        next(line for line in lines if "trained" in line["drmas"])["drmas"]["settings"] = settings
    nothing = {"uid": "pad", "input": "", "output": "", "score": 0.0, "agent_id": None, "index": None, "acc": None}
    lines += [nothing | {"drmas": None}] * padding
    path = folder / f"{step}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
