"""The line on an error of W&B, which ends no command."""

GOES_ON = "going on with metrics.jsonl alone"
NOTHING_ADDED = "nothing is added there"
"""The ends of the line: of a run, and of a later command."""


def trouble(error: Exception, consequence: str = GOES_ON) -> str:
    """Return the line on an error of W&B."""
    message = str(error).strip() or type(error).__name__
    return f"W&B: {message.splitlines()[0]}; {consequence}"
