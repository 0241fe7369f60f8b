"""Whether a run is as long as it was to be, by `trainer.total_training_steps` or else `trainer.total_epochs`."""

from __future__ import annotations

from collections.abc import Sequence

from verl_drmas.report.find import Run
from verl_drmas.report.runlog import RunLog

EPOCH = "training/epoch"  # verl counts from 0: of step s it is (s - 1) // steps of an epoch


def shortfall(run: Run) -> str | None:
    """Returns where a run ends before its configuration's end, such as `ends at step 9 of 12`; None: it isn't known to.

    `unsure` says whether that is because nothing tells.
    """
    steps, settings = run.log.training, run.settings
    if not steps or settings is None:
        return None
    end = steps[-1].step
    if settings.last_step is not None:
        return f"ends at step {end} of {settings.last_step}" if end < settings.last_step else None
    if settings.epochs is None:
        return None
    each, last = steps_of_epoch(run.log), _last_epoch(run.log)
    if each is not None and end < each * settings.epochs:
        return f"ends at step {end} of {each * settings.epochs} ({settings.epochs} epochs of {each})"
    if each is None and last is not None and last + 1 < settings.epochs:
        return f"ends in epoch {last + 1} of {settings.epochs}"
    return None


def unsure(run: Run) -> bool:
    """True if the configuration counts in epochs, and the log doesn't tell where the last of them would end."""
    settings = run.settings
    if not run.log.training or settings is None or settings.last_step is not None or settings.epochs is None:
        return False
    return steps_of_epoch(run.log) is None and shortfall(run) is None


def steps_of_epoch(log: RunLog) -> int | None:
    """Returns how many steps an epoch has, from the step at which the next one began; None: the log has none."""
    logged = [(step, int(epoch)) for step, epoch in zip(*log.series(EPOCH), strict=True)]
    least = max(((step - 1) // (epoch + 1) + 1 for step, epoch in logged), default=0)
    most = min(((step - 1) // epoch for step, epoch in logged if epoch > 0), default=None)
    return least if least == most else None


def _last_epoch(log: RunLog) -> int | None:
    epochs: Sequence[float] = log.series(EPOCH)[1]
    return int(epochs[-1]) if epochs else None
