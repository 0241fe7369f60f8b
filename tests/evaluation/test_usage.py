"""Prices from a file, and what agents took, from the calls of sessions."""

import numpy as np
import pytest

from verl_drmas.evaluation.usage import Latency, Price, Prices, cost_of, read_prices, use_by_agent


def call(agent, model, prompt, response, seconds=1.0, tries=1):
    return {"agent": agent, "model": model, "prompt": prompt, "response": response, "seconds": seconds, "tries": tries}


def acted(agent, valid=True, truncated=False):
    return {"agent": agent, "turns": 1, "valid": valid, "truncated": truncated}


LINES = [
    {
        "activations": [acted("a"), acted("b", valid=False), acted("a", truncated=True)],
        "calls": [call("a", "m", 10, 1, 0.5), call("b", "n", 100, 20, 2.0, tries=3), call("a", "m", 30, 2, 1.5)],
    },
    {"activations": [acted("a")], "calls": [call("a", "m", 5, 3, 4.0)]},
]


def test_agents_are_told_apart():
    prices = {"m": Price(2.0, 4.0), "n": Price(1.0, 1.0)}
    uses = use_by_agent(LINES, {"a": "m", "b": "n", "idle": "n"}, prices)
    a, b, idle = uses["a"], uses["b"], uses["idle"]
    assert (a.sessions, a.activations, a.valid, a.truncated, a.calls, a.retried) == (2, 3, 3, 1, 3, 0)
    assert (a.prompt_tokens, a.response_tokens, a.cost) == (45, 6, pytest.approx((45 * 2 + 6 * 4) / 1e6))
    assert a.latency == Latency(2.0, 1.5, pytest.approx(np.percentile([0.5, 1.5, 4.0], 95)))
    assert (b.valid, b.retried, b.cost) == (0, 1, pytest.approx(120 / 1e6))
    assert (idle.sessions, idle.calls, idle.latency, idle.prompt_tokens, idle.cost) == (0, 0, None, 0, 0)


def test_what_isnt_known_is_no_0():
    lines = [{"activations": [acted("a")], "calls": [call("a", "m", None, 3), call("a", "m", 5, 3)]}]
    use = use_by_agent(lines, {"a": "m"}, {"m": Price(1, 1)})["a"]
    assert (use.prompt_tokens, use.response_tokens, use.cost) == (None, 6, None)
    assert cost_of(lines[0]["calls"][1:], None) is None


def test_prices_are_found_by_id_or_by_served_name():
    prices = Prices({"large": Price(1, 2), "Qwen/Qwen3-8B": Price(3, 4), "other": Price(0, 0)})
    assert prices.of({"large": "x", "small": "Qwen/Qwen3-8B"}) == {"large": Price(1, 2), "small": Price(3, 4)}
    with pytest.raises(ValueError, match=r"no price of 'larg' \(served as 'y'\); did you mean 'large'\?"):
        prices.of({"larg": "y"})


def test_a_file_of_prices(tmp_path):
    file = tmp_path / "prices.yaml"
    file.write_text("currency: EUR\nmodels:\n  m: {prompt: 0.3, response: 1}\n")
    assert read_prices(file) == Prices({"m": Price(0.3, 1)}, "EUR")


@pytest.mark.parametrize(
    "text, says",
    [
        ("models: {m: {prompt: 1}}", r"prices.yaml.models.m.response: missing"),
        (
            "models: {m: {prompt: -1, response: 1}}",
            r"prices.yaml.models.m.prompt is -1.0; a price is a number, 0 or above",
        ),
        ("models: {m: {prompt: .nan, response: 1}}", r"prices.yaml.models.m.prompt is nan; a price is a number"),
        ("models: {m: {prompt: 1, response: .inf}}", r"prices.yaml.models.m.response is inf; a price is a number"),
        ("models: {m: {prompt: 1, respons: 1}}", r"prices.yaml.models.m.respons: unknown key; did you mean 'response'"),
        ("models: {m: {prompt: free, response: 1}}", r"prices.yaml.models.m.prompt: 'free' is not valid"),
        ("m: [", r"--prices .*prices.yaml: while parsing"),
        ("- 1", r"prices.yaml: \[1\] is not valid: a section of keys"),
    ],
)
def test_wrong_prices_are_one_line(tmp_path, text, says):
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=says) as error:
        read_prices(file)
    assert "\n" not in str(error.value)
