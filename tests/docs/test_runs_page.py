"""The files that docs/runs.md shows are files that `verl-drmas eval` takes."""

from doc_pages import blocks, text_of

from verl_drmas.evaluation.team import read_endpoints
from verl_drmas.evaluation.usage import read_prices


def test_endpoints_and_prices_are_read_as_they_stand(tmp_path):
    served, prices = blocks(text_of("docs/runs.md"), "yaml")
    (tmp_path / "served.yaml").write_text(served)
    (tmp_path / "prices.yaml").write_text(prices)
    endpoints = read_endpoints(tmp_path / "served.yaml")
    assert {agent.model for agent in endpoints.agents.values()} == set(endpoints.models)
    names = {model_id: model.model for model_id, model in endpoints.models.items()}
    assert read_prices(tmp_path / "prices.yaml").of(names).keys() == names.keys()
