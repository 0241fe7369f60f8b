"""How a session ends without an outcome. A failed session is counted by its reason and never trained on."""


class SessionFailed(RuntimeError):
    """A session could not be carried to its end.

    Args:
        reason: One word that names the counter, for example `timeout` or `server`.
        detail: What happened, for the log.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail

    def __reduce__(self):
        return SessionFailed, (self.reason, self.detail)  # subclasses differ in nothing that another process needs


class PromptTooLong(SessionFailed):
    """A prompt doesn't fit although everything that may be cut was cut."""

    def __init__(self, detail: str):
        super().__init__("prompt_too_long", detail)
