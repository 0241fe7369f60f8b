"""Search by words: BM25 over stems, scored when the index is built (bm25s)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_drmas.retrieval.errors import IndexProblem
from verl_drmas.retrieval.fusion import Ranking, ranked

FOLDER = "words"
_TOKENS = "tokens.int32"
_TICK_EVERY = 4096  # passages
# A digit or letter alone is a word, too ("Apollo 8", "Henry V"), but for initials ("J. K.", "v.") and what an
# apostrophe cuts off ("Ada's", "don't"): they cost more than they tell.
PATTERN = r"(?u)\b\w\w+\b|(?<!\w['’])\b(?:\d|\w(?!\.))\b"


@dataclass(frozen=True)
class WordsSettings:
    """How words are found and scored (Lucene's variant of BM25).

    Text that is written without spaces between its words (Chinese, Japanese, Thai) gives no words to search for: index
    it with dense vectors.

    Attributes:
        k1: How much a word that is repeated counts.
        b: How much long passages are held back, 0 to 1.
        stopwords: Language whose most frequent words are left out; None keeps all.
        stemmer: Snowball language that brings words to their stems; None takes them as they are.
        pattern: Regular expression that matches a word, in small letters.
    """

    k1: float = 1.5
    b: float = 0.75
    stopwords: str | None = "english"
    stemmer: str | None = "english"
    pattern: str = PATTERN

    def __post_init__(self):
        if not self.k1 >= 0:
            raise IndexProblem(f"words.k1 is {self.k1}; it must be 0 or more")
        if not 0 <= self.b <= 1:
            raise IndexProblem(f"words.b is {self.b}; it must lie between 0 and 1")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise IndexProblem(f"words.pattern is {self.pattern!r}: no regular expression ({error})") from error


class WordIndex:
    """The word part of an index; its arrays are mapped into memory, its vocabulary is loaded."""

    def __init__(self, bm25, settings: WordsSettings):
        self._bm25 = bm25
        self._settings = settings
        self._stemmer = _stemmer(settings)

    @classmethod
    def open(cls, folder: Path, settings: WordsSettings, passages: int) -> WordIndex:
        """Open what `build_words` wrote.

        Raises:
            IndexProblem: Files are missing or damaged, or belong to another corpus.
        """
        bm25s = _import_bm25s()
        try:
            bm25 = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise IndexProblem(f"{folder}: can't be read ({reason}); build the index again with --force") from error
        if bm25.scores["num_docs"] != passages:
            raise IndexProblem(
                f"{folder}: has {bm25.scores['num_docs']} passages, the corpus {passages}; build again with --force"
            )
        return cls(bm25, settings)

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """The best rows for each query; a passage that shares no word with it is no hit."""
        # bm25s' function, not its Tokenizer: that one remembers every new word it is asked for
        stems = _import_bm25s().tokenize(
            list(queries),
            token_pattern=self._settings.pattern,
            stopwords=self._settings.stopwords,
            stemmer=self._stemmer,
            return_ids=False,
            show_progress=False,
        )
        return [self._search(self._bm25.get_tokens_ids(query), k) for query in stems]

    def _search(self, words: list[int], k: int) -> Ranking:
        if not words:
            return []
        scores = self._bm25.get_scores_from_ids(words)
        rows = np.flatnonzero(scores > 0)
        return ranked(rows, scores[rows], k)


def build_words(
    texts: Iterable[str],
    folder: Path,
    settings: WordsSettings,
    tick: Callable[[int], None] | None = None,
) -> None:
    """Index texts in their order.

    Tokens go through a file, so that memory holds the vocabulary and the sparse matrix (at the peak 20 bytes for each
    different word of each passage: 1.4 GB for a million passages of 100 words), never the corpus.

    Args:
        texts: What is searched, one for each row; read once.
        folder: An existing, empty folder.
        settings: How words are found and scored.
        tick: Called with a growing count that ends at four times the texts: they are read once, and their tokens
            passed over three times.

    Raises:
        IndexProblem: No text has a word, or the language is unknown.
    """
    bm25s = _import_bm25s()
    stemmer = _stemmer(settings)
    try:
        tokenizer = bm25s.tokenization.Tokenizer(
            splitter=settings.pattern, stopwords=settings.stopwords, stemmer=stemmer
        )
    except ValueError as error:
        raise IndexProblem(f"words.stopwords is {settings.stopwords!r}; use a language bm25s knows or None") from error
    counted = _Counter(tick)
    path = folder / _TOKENS
    lengths: list[int] = []
    with path.open("wb") as file:
        for ids in tokenizer.streaming_tokenize(texts, update_vocab=True, allow_empty=False):
            np.asarray(ids, dtype=np.int32).tofile(file)
            lengths.append(len(ids))
            counted.step()
    vocabulary = tokenizer.get_vocab_dict()
    if not vocabulary:
        raise IndexProblem("words: no passage has a word to search for; check the corpus or words.stopwords")
    bm25 = bm25s.BM25(k1=settings.k1, b=settings.b, method="lucene", csc_backend="auto")
    tokens = bm25s.tokenization.Tokenized(_Tokens(path, np.asarray(lengths, dtype=np.int64), counted), vocabulary)
    bm25.index(tokens, create_empty_token=False, show_progress=False)
    bm25.save(folder, show_progress=False)
    path.unlink()


class _Counter:
    def __init__(self, tick: Callable[[int], None] | None):
        self._tick = tick
        self._count = 0

    def step(self) -> None:
        self._count += 1
        if self._tick and self._count % _TICK_EVERY == 0:
            self._tick(self._count)


class _Tokens:
    """The token ids of each passage, as the lists that bm25s expects, made one at a time."""

    def __init__(self, path: Path, lengths: np.ndarray, counted: _Counter):
        self._path = path
        self._lengths = lengths
        self._counted = counted

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[list[int]]:
        ids = np.asarray(np.memmap(self._path, dtype=np.int32, mode="r"))
        start = 0
        for end in np.cumsum(self._lengths).tolist():
            self._counted.step()
            yield ids[start:end].tolist()
            start = end


def _import_bm25s():
    try:
        import bm25s
        import bm25s.tokenization
    except ImportError as error:
        raise IndexProblem(f"search by words needs bm25s ({error}); pip install bm25s PyStemmer") from error
    return bm25s


def _stemmer(settings: WordsSettings):
    if settings.stemmer is None:
        return None
    try:
        import Stemmer

        return Stemmer.Stemmer(settings.stemmer)
    except ImportError as error:
        raise IndexProblem(f"words.stemmer needs PyStemmer ({error}); pip install PyStemmer") from error
    except KeyError as error:
        known = ", ".join(Stemmer.algorithms())
        raise IndexProblem(f"words.stemmer is {settings.stemmer!r}; use one of {known}") from error
