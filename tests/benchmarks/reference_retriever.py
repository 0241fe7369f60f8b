"""What the search server is measured against, and the encoder that stands for a GPU. Run as a program, it serves.

The protocol of Dr. MAS' reference: one query a call, a synchronous handler, no batches. A lock stands around encoder
and search, for one GPU would serialise them.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time

import numpy as np
from pydantic import BaseModel

STUB_SECONDS = 0.010  # a call, whatever the batch
DIM = 64


class StubEncoder:
    """A text's vector follows from its first line, so that a query finds the passage with that title."""

    dim = DIM

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        time.sleep(STUB_SECONDS)
        return self.encode_passages(texts)

    def encode_passages(self, texts: list[str]) -> np.ndarray:
        return np.stack([self._vector(text) for text in texts])

    @staticmethod
    def _vector(text: str) -> np.ndarray:
        digest = hashlib.sha512(text.partition("\n")[0].strip('"').encode()).digest()
        return np.frombuffer(digest, dtype=np.uint8).astype(np.float32) - 127.5


class Body(BaseModel):
    query: str
    topk: int = 3
    return_scores: bool = False


def serve(folder: str, encoder: str) -> None:
    import uvicorn
    from fastapi import FastAPI

    from verl_drmas.retrieval.index import open_index
    from verl_drmas.retrieval.serve_command import bind

    given = {"device": "cpu", "encoder": encoder} if encoder else {}
    index, lock, app = open_index(folder, **given), threading.Lock(), FastAPI()

    @app.post("/retrieve")
    def retrieve(body: Body):
        with lock:
            (hits,) = index.search([body.query], body.topk)
        documents = [{"id": hit.passage.id, "contents": hit.passage.contents} for hit in hits]
        if not body.return_scores:
            return {"result": [documents]}
        return {"result": [[{"document": d, "score": hit.score} for d, hit in zip(documents, hits, strict=True)]]}

    bound = bind("127.0.0.1", 0)
    bound.listen()
    print(f"serving on http://127.0.0.1:{bound.getsockname()[1]}/retrieve", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[bound])


if __name__ == "__main__":
    serve(*sys.argv[1:])
