"""Questions for search teams: the paper's sets by name, files, and Hugging Face data sets.

Names, source and sizes follow Dr. MAS (arXiv 2602.08847), search experiments, which takes Search-R1's files.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_drmas.data.hub import (
    Loaded,
    MissingCell,
    arrange,
    fetch_hub_file,
    find_key,
    flat,
    is_file,
    load_hub,
    missing_cell_error,
    question_text,
    refuse_unknown,
)
from verl_drmas.data.parquet import SCHEMA, read_rows
from verl_drmas.rewards.qa import MAX_ANSWER_CHARS, gold_text

HUB = "PeterJinGo/nq_hotpotqa_train"  # train.parquet and test.parquet
TRAIN_SIZE = 169_615  # NQ's 79,168 and HotpotQA's 90,447

# The seven test sets and their sizes in the paper.
SOURCES = {
    "nq": 3610,
    "triviaqa": 11313,
    "popqa": 14267,
    "hotpotqa": 7405,
    "2wikimultihopqa": 12576,
    "musique": 2417,
    "bamboogle": 125,
}

# The paper's three files: (the hub's file, how many of each set's first rows).
FILES: dict[str, tuple[str, int | None]] = {
    "paper-train": ("train", None),
    "paper-test": ("test", None),
    "paper-test-sampled": ("test", 30),
}

QUESTION_KEYS = ("question", "Question", "query", "problem", "input", "prompt")
ANSWER_KEYS = (
    *("golden_answers", "answers", "answer", "Answer", "possible_answers", "gold", "target", "ground_truth"),
    "reward_model",
)
ALIAS_KEYS = ("answer_aliases", "aliases")  # further golds beside the answer's column
# The paragraphs that some sets carry with each question; `data passages` reads them.
_PAGES = ("context", "docs", "metadata.context")

SEARCH_SCHEMA = pa.schema(
    [
        *(SCHEMA.field(name) for name in ("data_source", "prompt", "ability")),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.list_(pa.string()))])),
        (
            "extra_info",
            pa.struct(
                [
                    *(("split", pa.string()), ("index", pa.int64()), ("question", pa.string())),
                    *(("type", pa.string()), ("level", pa.string()), ("support_titles", pa.list_(pa.string()))),
                    ("facts", pa.list_(pa.string())),
                ]
            ),
        ),
    ]
)


def question_row(
    question: str,
    golds: Sequence[str],
    *,
    data_source: str,
    split: str,
    index: int,
    type: str | None = None,
    level: str | None = None,
    support_titles: Sequence[str] = (),
    facts: Sequence[str] = (),
) -> dict[str, Any]:
    """One prompt with several golds, as `SEARCH_SCHEMA` has it.

    Args:
        question: the user message.
        golds: answers of which each is right; `rewards.qa.golds_of` reads them back.
        data_source: name that scores are reported under.
        split: noted in the row.
        index: unique within the file the row is written to; request seeds are hashed from it.
        type: kind of question, such as HotpotQA's `bridge`.
        level: its difficulty.
        support_titles: titles of the pages that the answer follows from.
        facts: what has to be found out on the way, the answer too; rule-based judges look for them.
    """
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "question-answering",
        "reward_model": {"style": "rule", "ground_truth": list(golds)},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "type": type,
            "level": level,
            "support_titles": list(support_titles),
            "facts": list(facts),
        },
    }


def load_questions(
    sources: Sequence[str],
    *,
    question_key: str | None = None,
    answer_key: str | None = None,
    split: str | None = None,
    data_source: str | None = None,
    drop_missing: bool = False,
    drop_repeated: bool = False,
    per_source: int | None = None,
    shuffle_seed: int | None = None,
    limit: int | None = None,
) -> Loaded:
    """Questions of all sources, one after the other, in verl's RLHF format.

    Args:
        sources: each a name of `FILES` or `SOURCES`, a .json/.jsonl/.parquet file, or a Hugging Face data set id.
        question_key: column of the question; None looks for one of `QUESTION_KEYS`.
        answer_key: column of the golds; None looks for one of `ANSWER_KEYS` and adds the aliases of `ALIAS_KEYS`.
        split: split to read from the hub, and the split written into the rows; None means `train`. Sets known by name
            have their own.
        data_source: name validation scores are reported under; None means the row's own `data_source`, else the set's
            name or the file's stem.
        drop_missing: leave out rows without question or gold (counted in the notes) instead of refusing them.
        drop_repeated: keep only the first row of those with the same question (counted in the notes).
        per_source: keep the first rows of each data source.
        shuffle_seed: None keeps the order. Comes after `per_source`.
        limit: keep the first rows of the (shuffled) whole.

    Raises:
        ValueError: one line that names source, row (counted from 0), key and fix.
    """
    if per_source is not None and per_source < 1:
        raise ValueError(f"--per-source is {per_source}: give at least 1")
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    asked = {"question_key": question_key, "answer_key": answer_key, "drop_missing": drop_missing}
    for source in sources:
        refuse_unknown(source, [*FILES, *SOURCES])
        if source in FILES or source in SOURCES:
            loaded = _load_known(source, data_source=data_source, **asked)
        else:
            loaded = _load_other(source, data_source=data_source, split=split or "train", **asked)
        rows += loaded.rows
        notes += loaded.notes
    if drop_repeated:
        first: dict[str, dict[str, Any]] = {}
        for row in rows:
            first.setdefault(" ".join(row["extra_info"]["question"].split()), row)
        if len(first) < len(rows):
            notes.append(f"dropped {len(rows) - len(first)} of {len(rows)} rows whose question came before")
        rows = list(first.values())
    if per_source is not None:
        rows = _first_of_each(rows, per_source)
    return Loaded(arrange(rows, shuffle_seed=shuffle_seed, limit=limit), notes)


def convert_rows(
    raw: Iterable[dict[str, Any]],
    *,
    file: str,
    name: str,
    split: str,
    data_source: str | None = None,
    question_key: str | None = None,
    answer_key: str | None = None,
    drop_missing: bool = False,
) -> Loaded:
    """Rows as they were published, in verl's RLHF format, indexed from 0. See `load_questions` for the arguments.

    Golds are a text or number, a list of them (or one in JSON, as in PopQA), or the usual structs around them
    (Search-R1's `target`, TriviaQA's `value` and `aliases`, SQuAD's `text`); each is kept once.
    """
    raw = [flat(row) for row in raw]
    if not raw:
        raise ValueError(f"{file}: no rows")
    question_key = find_key(raw, question_key, QUESTION_KEYS, file, "question")
    aliases = () if answer_key else ALIAS_KEYS
    answer_key = find_key(raw, answer_key, ANSWER_KEYS, file, "answer")
    rows, dropped, shortened = [], 0, 0
    for number, row in enumerate(raw):
        where = f"{file}: row {number}"
        try:
            question = question_text(row.get(question_key), f"{where}: {question_key}")
            golds = _golds(row.get(answer_key), f"{where}: {answer_key}")
        except MissingCell as missing:
            if not drop_missing:
                raise missing_cell_error(missing) from None
            dropped += 1
            continue
        golds += [gold for key in aliases for gold in _texts(row.get(key), f"{where}: {key}")]
        short = [gold for gold in dict.fromkeys(golds) if len(gold) <= MAX_ANSWER_CHARS]
        if not short:
            raise ValueError(
                f"{where}: {answer_key} has more than {MAX_ANSWER_CHARS} characters: a whole text? "
                "name the golds' column (--answer-key)"
            )
        shortened += len(short) < len(dict.fromkeys(golds))
        rows.append(
            question_row(
                question,
                short,
                data_source=data_source or str(row.get("data_source") or name),
                split=split,
                index=len(rows),
                **_about(row),
            )
        )
    if not rows:
        raise ValueError(f"{file}: none of {len(raw)} rows has both {question_key} and {answer_key}")
    notes = [f"{file}: dropped {dropped} of {len(raw)} rows without question or gold"] if dropped else []
    if shortened:
        notes.append(f"{file}: {shortened} rows lost golds of more than {MAX_ANSWER_CHARS} characters")
    return Loaded(rows, notes)


def _load_known(source: str, *, data_source: str | None, **asked: Any) -> Loaded:
    use, first = FILES.get(source, ("test", None))
    raw = read_rows(fetch_hub_file(HUB, f"{use}.parquet"), leave_out=_PAGES)
    for row in raw:  # verl's own script writes searchR1_nq
        row["data_source"] = str(row.get("data_source") or "unknown").removeprefix("searchR1_")
    counts = Counter(row["data_source"] for row in raw)
    if use == "train":
        differ = {} if len(raw) == TRAIN_SIZE else {source: (len(raw), TRAIN_SIZE)}
    else:
        sizes = {source: SOURCES[source]} if source in SOURCES else SOURCES
        raw = [row for row in raw if row["data_source"] in sizes]
        if not raw:
            raise ValueError(
                f"{source}: {HUB} has none of {', '.join(sizes)}; its data sources are {', '.join(counts)}"
            )
        differ = {name: (counts[name], size) for name, size in sizes.items() if counts[name] != size}
    if first is not None:  # before --data-source gives all sets one name
        raw = _first_of_each(raw, first)
    rows, told = convert_rows(raw, file=source, name=source, split=use, data_source=data_source, **asked)
    notes = [f"{name}: {HUB} has {found} rows, expected were {size}" for name, (found, size) in differ.items()]
    return Loaded(rows, told + notes)


def _load_other(source: str, *, data_source: str | None, split: str, **asked: Any) -> Loaded:
    if is_file(source):
        raw, name = read_rows(source, leave_out=_PAGES), Path(source).stem
    else:
        raw, name = load_hub(source, split, leave_out=_PAGES), source
    return convert_rows(raw, file=source, name=name, split=split, data_source=data_source, **asked)


def _first_of_each(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    seen: Counter[str] = Counter()
    kept = []
    for row in rows:
        seen[row["data_source"]] += 1
        if seen[row["data_source"]] <= count:
            kept.append(row)
    return kept


def _golds(value: Any, where: str) -> list[str]:
    golds = list(_texts(value, where))
    if not golds:
        raise MissingCell(where)
    return golds


def _texts(value: Any, where: str) -> Iterator[str]:
    """The texts in a cell, stripped, blank ones passed over."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        try:
            listed = json.loads(value)
        except json.JSONDecodeError:
            listed = value  # an answer in brackets
        value = listed
    if isinstance(value, list):
        for inner in value:
            yield from _texts(inner, where)
    elif isinstance(value, dict):
        known = [key for key in ("ground_truth", "target", "value", "aliases", "text") if key in value]
        if not known:
            raise ValueError(f"{where} holds {', '.join(value)}: name the golds' column (--answer-key)")
        for key in known:
            yield from _texts(value[key], f"{where}.{key}")
    else:
        try:
            text = gold_text(value)
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from None
        if text:
            yield text


def _about(row: dict[str, Any]) -> dict[str, Any]:
    """What a row tells of its question: type, level, and the titles it is supported by, each once."""
    pages = row.get("paragraphs")
    supporting = [page for page in pages if isinstance(page, dict) and page.get("is_supporting")] if pages else []
    given = (row.get("support_titles"), row.get("supporting_facts"), supporting)
    titles = next((titles for titles in map(_titles, given) if titles), [])
    told = {key: None if row.get(key) is None else str(row[key]) for key in ("type", "level")}
    return {**told, "support_titles": titles}


def _titles(facts: Any) -> list[str]:
    """Each title once, of a list of titles, of `[title, sentence]` pairs or of structs with a `title`."""
    if isinstance(facts, dict):  # as Hugging Face stores lists of structs
        facts = facts.get("title")
    if not isinstance(facts, list):
        return []
    titles = [fact.get("title") if isinstance(fact, dict) else fact for fact in facts]
    titles = [title[0] if isinstance(title, list) and title else title for title in titles]
    return list(dict.fromkeys(str(title) for title in titles if title))
