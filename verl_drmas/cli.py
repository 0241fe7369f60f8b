"""The command `verl-drmas`. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Teams of language-model agents on stock verl. Training itself is verl's: python -m verl.trainer.main_ppo",
)

# The arguments after these commands belong to someone else: Hydra overrides, or an app of its own.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command()
def doctor() -> None:
    """Check this environment; exit 1 with a fix for each problem."""
    from verl_drmas.doctor import main as run

    raise typer.Exit(run())


@app.command(context_settings=PASS_ON)
def check(context: typer.Context) -> None:
    """Check a training configuration without starting Ray; takes the arguments of verl.trainer.main_ppo."""
    from verl_drmas.check_command import main as run

    raise typer.Exit(run(context.args))


@app.command(context_settings=PASS_ON, add_help_option=False)
def data(context: typer.Context) -> None:
    """Build the parquet files that training and validation read."""
    from verl_drmas.data.commands import data_app

    data_app(args=context.args, prog_name="verl-drmas data")


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
