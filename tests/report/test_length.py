"""Whether a run is whole, by steps or by epochs, and what can't be told."""

import pytest
from simulated_runs import make_records

from verl_drmas.report.length import shortfall, steps_of_epoch, unsure
from verl_drmas.report.runlog import read_run


@pytest.fixture
def one(runs):
    """Reads one run of `steps` steps, with epochs of `epoch`, configured for `total` steps or `epochs`."""

    def read(steps, epoch=None, total=None, epochs=2, first=1):
        (run,) = runs(run=dict(steps=steps, epoch=epoch, first=first, config={"steps": total, "epochs": epochs}))
        return run

    return read


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(steps=12, total=12), None),
        (dict(steps=9, total=12), "ends at step 9 of 12"),
        (dict(steps=9, total=9, epochs=1000), None),  # steps come before epochs, as in verl
        (dict(steps=12, epoch=6), None),
        (dict(steps=11, epoch=6), "ends at step 11 of 12 (2 epochs of 6)"),
        (dict(steps=5, epoch=6, first=4), "ends at step 8 of 12 (2 epochs of 6)"),  # the log begins late
        (dict(steps=6, epoch=6), "ends in epoch 1 of 2"),
        (dict(steps=6, epoch=6, epochs=1), None),
    ],
)
def test_a_run_that_ends_early_is_said_in_words(one, options, told):
    assert shortfall(one(**options)) == told


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (dict(steps=6, epoch=6, epochs=1), True),  # whole, or the first steps of a longer epoch
        (dict(steps=6, epoch=6), False),
        (dict(steps=12, epoch=6), False),
        (dict(steps=6, total=6, epochs=1), False),
    ],
)
def test_what_the_log_doesnt_tell_is_said(one, options, answer):
    assert unsure(one(**options)) is answer


@pytest.mark.parametrize(("epoch", "steps", "first"), [(3, 4, 1), (3, 20, 1), (7, 15, 5), (1, 2, 1)])
def test_an_epochs_length_follows_from_where_the_next_one_begins(write_log, epoch, steps, first):
    truth = make_records(steps=steps, epoch=epoch, first=first)
    assert steps_of_epoch(read_run(write_log(truth.records))) == epoch


def test_one_epoch_tells_no_length(write_log):
    assert steps_of_epoch(read_run(write_log(make_records(steps=5, epoch=9).records))) is None
