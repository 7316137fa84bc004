"""Words for the person at the terminal, and for the shell."""
import sys


class Stopped(Exception):
    """A run was asked to stop, by this signal, and did, behind a checkpoint: the command ends as the signal's."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


def say(text: str) -> None:
    """A line on stdout, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
