import pickle

import pytest

from verl_drmas.config import ConfigError
from verl_drmas.gateway.bearer import as_token, header, is_right, read_token


def test_a_token_is_read_and_never_shown(monkeypatch):
    monkeypatch.setenv("GATE", " open-sesame\n")
    token = read_token("GATE", "drmas.gateway.token_env")
    assert header(token) == "Bearer open-sesame"
    assert "sesame" not in f"{token} {token!r} {[token]!r}"
    assert pickle.loads(pickle.dumps(token)) == token


@pytest.mark.parametrize("value", [None, "", "  ", "two words", "umlaut-ä", "line\nbreak"])
def test_what_is_no_token_names_key_and_variable_and_not_its_value(monkeypatch, value):
    monkeypatch.delenv("GATE", raising=False)
    if value is not None:
        monkeypatch.setenv("GATE", value)
    with pytest.raises(ConfigError, match=r"drmas\.gateway\.token_env is 'GATE'") as refused:
        read_token("GATE", "drmas.gateway.token_env")
    assert not value or not value.strip() or value not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("Bearer open-sesame", True),
        ("bearer open-sesame", True),
        ("Bearer  open-sesame ", True),
        ("Bearer open-sesam", False),
        ("Bearer open-sesamee", False),
        ("Bearer öpen-sesame", False),
        ("Bearer ", False),
        ("Basic open-sesame", False),
        ("open-sesame", False),
        ("", False),
        (None, False),
    ],
)
def test_only_the_whole_token_is_right(given, right):
    assert is_right(given, as_token("open-sesame")) is right
