"""What a team does: workflows in plain asynchronous Python. No tokens, no tensors, no Ray, no verl."""

from verl_drmas.workflows.base import Action, Agent, Conversation, Outcome, Task, Team, Workflow
from verl_drmas.workflows.errors import PromptTooLong, SessionFailed
from verl_drmas.workflows.registry import load_workflow, register_workflow, workflow_names

__all__ = [
    "Action",
    "Agent",
    "Conversation",
    "Outcome",
    "PromptTooLong",
    "SessionFailed",
    "Task",
    "Team",
    "Workflow",
    "load_workflow",
    "register_workflow",
    "workflow_names",
]
