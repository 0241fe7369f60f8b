"""`verl-drmas data ...`: the commands that write prompt files."""

from pathlib import Path
from typing import Annotated

import typer

from verl_drmas.data import search
from verl_drmas.data.arithmetic import arithmetic_rows
from verl_drmas.data.command_support import one_line_errors, refuse_output
from verl_drmas.data.filter_command import filter_command
from verl_drmas.data.math import FILES, SOURCES, load_prompts
from verl_drmas.data.parquet import write_rows
from verl_drmas.data.passages import load_passages, write_passages
from verl_drmas.data.research_commands import gaia_command, webwalker_command, xbench_command
from verl_drmas.data.world import World, world_rows

data_app = typer.Typer(no_args_is_help=True, help="Build the parquet files that training and validation read.")

_SETS = ", ".join([*FILES, *SOURCES])
_SEARCH_SETS = ", ".join([*search.FILES, *search.SOURCES])


@data_app.command("math")
def math_command(
    sources: Annotated[
        list[str], typer.Argument(help=f"Set ({_SETS}), .json/.jsonl/.parquet file, or Hugging Face id; one or more.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write.")],
    question_key: Annotated[str | None, typer.Option(help="Column of the question; found by itself if usual.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of the gold answer; found by itself if usual.")] = None,
    split: Annotated[str | None, typer.Option(help="Split to read and to note in the rows; default train.")] = None,
    data_source: Annotated[str | None, typer.Option(help="Name to report scores under; default set or file.")] = None,
    limit: Annotated[int | None, typer.Option(help="Keep the first rows only.")] = None,
    shuffle: Annotated[int | None, typer.Option(metavar="SEED", help="Shuffle all rows with this seed.")] = None,
    drop_missing: Annotated[bool, typer.Option(help="Drop and count rows without question or gold.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Score every gold against itself with math-verify.")] = False,
) -> None:
    """Math prompts in verl's RLHF format."""
    with one_line_errors():
        refuse_output(output)
        rows, notes = load_prompts(
            sources,
            question_key=question_key,
            answer_key=answer_key,
            split=split,
            data_source=data_source,
            drop_missing=drop_missing,
            shuffle_seed=shuffle,
            limit=limit,
        )
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        failed = _check_golds([row["reward_model"]["ground_truth"] for row in rows]) if check else []
        if failed:
            raise ValueError(
                f"{len(failed)} of {len(rows)} golds don't equal themselves under the math reward and could never be "
                f"scored right; nothing written. First: {'; '.join(failed[:3])}"
            )
        written = write_rows(rows, output)
    if check:
        typer.echo(f"checked: {len(rows)} of {len(rows)} golds equal themselves")
    typer.echo(f"wrote {len(rows)} prompts to {written}")


@data_app.command("search")
def search_command(
    sources: Annotated[
        list[str],
        typer.Argument(help=f"Set ({_SEARCH_SETS}), .json/.jsonl/.parquet file, or Hugging Face id; one or more."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Parquet file to write.")],
    question_key: Annotated[str | None, typer.Option(help="Column of the question; found by itself if usual.")] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of the golds; found by itself if usual.")] = None,
    split: Annotated[str | None, typer.Option(help="Split to read and to note in the rows; default train.")] = None,
    data_source: Annotated[
        str | None, typer.Option(help="Name to report scores under; default the row's own, set or file.")
    ] = None,
    per_source: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the first N rows of each data source.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Keep the first rows only.")] = None,
    shuffle: Annotated[int | None, typer.Option(metavar="SEED", help="Shuffle all rows with this seed.")] = None,
    drop_missing: Annotated[bool, typer.Option(help="Drop and count rows without question or gold.")] = False,
    drop_repeated: Annotated[bool, typer.Option(help="Drop and count rows whose question came before.")] = False,
) -> None:
    """Questions with one or more golds in verl's RLHF format, for teams that search."""
    with one_line_errors():
        refuse_output(output)
        rows, notes = search.load_questions(
            sources,
            question_key=question_key,
            answer_key=answer_key,
            split=split,
            data_source=data_source,
            drop_missing=drop_missing,
            drop_repeated=drop_repeated,
            per_source=per_source,
            shuffle_seed=shuffle,
            limit=limit,
        )
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        written = write_rows(rows, output, schema=search.SEARCH_SCHEMA)
    typer.echo(f"wrote {len(rows)} prompts to {written}")


@data_app.command("passages")
def passages_command(
    sources: Annotated[
        list[str],
        typer.Argument(help=".json/.jsonl/.parquet file whose rows carry paragraphs, as HotpotQA's; one or more."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSONL file to write.")],
) -> None:
    """The paragraphs of question files as a corpus for `verl-drmas retriever index`, each once."""
    with one_line_errors():
        refuse_output(output, ".jsonl")
        passages, paragraphs, questions = load_passages(sources)
        written = write_passages(passages, output)
    typer.echo(f"wrote {len(passages)} passages ({paragraphs} paragraphs of {questions} questions) to {written}")


@data_app.command("world")
def world_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for corpus, train and test files.")],
    people: Annotated[int, typer.Option(help="How many people, hence passages.")] = 40,
    relations: Annotated[int, typer.Option(help="Relations that each of them has, hence facts in a passage.")] = 3,
    hops: Annotated[
        list[int] | None,
        typer.Option(
            help="Searches a question takes, 1 to 4; may be repeated. A workflow needs max_turns of hops + 1."
        ),
    ] = None,
    questions: Annotated[int | None, typer.Option(help="Questions in all; default all there are.")] = None,
    held_out: Annotated[int, typer.Option(help="Questions kept for test.parquet.")] = 64,
    seed: Annotated[int, typer.Option(help="Fixes facts, questions, split and order.")] = 0,
) -> None:
    """A small world to search: corpus.jsonl, train.parquet and test.parquet with questions over several hops."""
    with one_line_errors():
        world = World.build(people=people, relations=relations, seed=seed)
        train, test = world_rows(world, hops=hops or [2], count=questions, held_out=held_out, seed=seed)
        written = write_passages(world.passages(), output / "corpus.jsonl")
        typer.echo(f"wrote {people} passages to {written}")
        for name, rows in (("train", train), ("test", test)):
            written = write_rows(rows, output / f"{name}.parquet", schema=search.SEARCH_SCHEMA)
            typer.echo(f"wrote {len(rows)} prompts to {written}")


@data_app.command("arithmetic")
def arithmetic_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for train.parquet and test.parquet.")],
    seed: Annotated[int, typer.Option(help="Fixes split and order.")] = 0,
    max_operand: Annotated[int, typer.Option(help="Largest operand.")] = 9,
    held_out: Annotated[int, typer.Option(help="Problems kept for test.parquet.")] = 16,
) -> None:
    """Small additions (`3+4`) for the CPU job, some problems held out."""
    with one_line_errors():
        train, test = arithmetic_rows(max_operand=max_operand, held_out=held_out, seed=seed)
        for name, rows in (("train", train), ("test", test)):
            written = write_rows(rows, output / f"{name}.parquet")
            typer.echo(f"wrote {len(rows)} prompts to {written}")


data_app.command("filter")(filter_command)
data_app.command("gaia")(gaia_command)
data_app.command("xbench")(xbench_command)
data_app.command("webwalker")(webwalker_command)


def _check_golds(golds: list[str]) -> list[str]:
    from concurrent.futures import ThreadPoolExecutor

    from rich.progress import track

    from verl_drmas.rewards.math import math_score

    def itself(gold: str) -> str | None:
        score = math_score(rf"\boxed{{{gold}}}", gold, exact=False)
        return None if score.correct else f"{gold!r} ({score.reason})"

    with ThreadPoolExecutor(2) as threads:  # as many as the reward has child processes
        outcomes = list(track(threads.map(itself, golds), "checking golds", total=len(golds)))
    return [failure for failure in outcomes if failure]
