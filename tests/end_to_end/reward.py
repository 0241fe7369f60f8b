"""A reward with spread for random weights: share of the answer's characters that are digits."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    text = solution_str or ""
    return sum(c.isdigit() for c in text) / max(1, len(text)) + 0.5 * text.startswith(str(ground_truth)[:1])
