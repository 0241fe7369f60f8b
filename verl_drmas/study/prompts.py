"""What a single agent on verl's own agent loops is asked: data sets that put a question as a bundled workflow does.

Stock loops send a row's messages as they are, and our data files hold bare questions, because a team's agents bring
prompts of their own. One of these classes in `data.custom_cls` makes such a prompt of the question, so that all arms of
a study read the same files, and an evaluation of the workflow asks what was trained.
"""

from __future__ import annotations

from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_drmas.workflows.base import Message, Task
from verl_drmas.workflows.delegate import main_request
from verl_drmas.workflows.solver_verifier import SolverVerifier


class SolverPrompts(RLHFDataset):
    """The solver of `solver_verifier` before anybody has spoken; `verl-drmas eval` has it with `max_rounds: 1`."""

    def _build_messages(self, example: dict, key: str) -> list[Message]:
        return SolverVerifier().prompt("solver", Task(question=question_of(example[key])), [])


class SearcherPrompts(RLHFDataset):
    """The main agent of `delegate`, which has no sub-agents where `subs` is empty."""

    def _build_messages(self, example: dict, key: str) -> list[Message]:
        return main_request(question_of(example[key]))


def question_of(messages: list[Message]) -> str:
    """The question of a data row, as a workflow's task has it: its last user message.

    Raises:
        ValueError: The row has none.
    """
    users = [message["content"] for message in messages if message["role"] == "user"]
    if not users:
        raise ValueError(f"a row without a user message: {messages!r}; build the file with `verl-drmas data`")
    return users[-1]
