"""`verl-drmas retriever ...`: build an index of passages, and serve it."""

from __future__ import annotations

import typer

from verl_drmas.retrieval.index_command import index_command
from verl_drmas.retrieval.serve_command import serve_command

retriever_app = typer.Typer(no_args_is_help=True, help="Search over passages, for teams that search.")
retriever_app.command("index")(index_command)
retriever_app.command("serve")(serve_command)
