"""The error of a visual scorer."""


class ScorerError(Exception):
    """One poster could not be scored.

    Args:
        code: short snake_case word for counters.
        message: value, rule, remedy.
        retryable: whether a retry may succeed.
    """

    def __init__(self, code: str, message: str = "", retryable: bool = False) -> None:
        super().__init__(message or code)
        self.code, self.retryable = code, retryable

    def __reduce__(self) -> tuple:
        return type(self), (self.code, str(self), self.retryable)
