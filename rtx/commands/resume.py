"""`rtx resume RUN [overrides]`: go on exactly where a run stopped."""

from rtx.cli.request import Request
from rtx.commands.train import run


def main(request: Request) -> int:
    """Go on with the run that a command line names, and return the exit code."""
    return run(request.config, request.run, reason=request.state)
