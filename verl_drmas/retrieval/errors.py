"""What can go wrong in a search, told apart by whose fault it is."""

from __future__ import annotations


class IndexProblem(ValueError):
    """A corpus or an index that can't be used; one line that names file, value and fix."""


class QueryRejected(ValueError):
    """The query itself is at fault (empty, too long): the agent that wrote it answers for it, and asking again is no
    use.
    """


class RetrievalOutage(RuntimeError):
    """No answer to a proper query: the server is down, overloaded, too slow or answers nonsense. Nobody's action is at
    fault, so nothing may be scored by it.
    """
