"""Search over passages: an index on disk, a server for many rollout workers, and the clients that workflows ask.

Imports neither Ray nor verl, and no index library before one is needed.
"""

from verl_drmas.retrieval.errors import IndexProblem, QueryRejected, RetrievalOutage
from verl_drmas.retrieval.passages import Hit, Passage
from verl_drmas.retrieval.retriever import Retriever, open_retriever
from verl_drmas.retrieval.settings import RetrievalSettings

__all__ = [
    "Hit",
    "IndexProblem",
    "Passage",
    "QueryRejected",
    "RetrievalOutage",
    "RetrievalSettings",
    "Retriever",
    "open_retriever",
]
