"""A small corpus, and an encoder that needs no model."""

import json
import sys
import textwrap

import pytest

# Vectors are counts of hashed words: texts that share words are near, and the same text always gives the same vector.
# STUB_LOG counts the passages it encoded, STUB_PAUSE (seconds) makes each call slow enough to be killed in.
STUB = """
    import os, time
    from hashlib import blake2b
    import numpy as np


    class Stub:
        dim = 24

        def encode_queries(self, texts):
            vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
            for vector, text in zip(vectors, texts):
                for word in text.lower().split():
                    vector[blake2b(word.strip('.?"').encode()).digest()[0] % self.dim] += 1
            return vectors

        def encode_passages(self, texts):
            time.sleep(float(os.environ.get("STUB_PAUSE", 0)))
            if log := os.environ.get("STUB_LOG"):
                with open(log, "a") as file:
                    file.write(f"{len(texts)}\\n")
            return self.encode_queries(texts)


    class Wide(Stub):
        dim = 25


    class Short(Stub):
        def encode_queries(self, texts):
            return super().encode_queries(texts)[:, 1:]


    class Broken(Stub):
        def encode_queries(self, texts):
            return np.full((len(texts), self.dim), np.nan)


    class Nothing:
        pass


    def needs(argument):
        return Stub()
"""

PASSAGES = [
    {"id": "a", "title": "Amsterdam", "text": "Amsterdam is the capital of the Netherlands."},
    {"id": "b", "title": "Berlin", "text": "Berlin is the capital of Germany, on the river Spree."},
    {"id": "c", "contents": '"Canberra"\nCanberra is the capital city of Australia.'},
    {"id": "d", "title": "Rhine", "text": "The Rhine flows through Germany and the Netherlands."},
    {"id": "e", "title": "Kangaroo", "text": "Kangaroos hop across Australia."},
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def corpus_file(tmp_path):
    """Five passages, written in both ways."""
    return write_jsonl(tmp_path / "corpus.jsonl", PASSAGES)


@pytest.fixture
def many_file(tmp_path):
    """600 passages with words of their own."""
    rows = [{"id": f"p{i}", "title": f"Page {i}", "text": f"Thing{i} likes thing{i * 7 % 600}."} for i in range(600)]
    return write_jsonl(tmp_path / "many.jsonl", rows)


@pytest.fixture
def stub_path(tmp_path, monkeypatch):
    """The import path of the stub encoder, whose module lies in tmp_path."""
    (tmp_path / "stub_encoder.py").write_text(textwrap.dedent(STUB))
    monkeypatch.syspath_prepend(tmp_path)
    yield "stub_encoder:Stub"
    sys.modules.pop("stub_encoder", None)
