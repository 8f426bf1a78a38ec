"""A console that may go away: a closed terminal, or the end of a pipe such as `| head`."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any


@contextmanager
def outlive_console() -> Iterator[None]:
    """Let what is printed in the block get lost once nobody can read it: the run goes on, and its
    folder has it all."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(_Console(sys.stdout)))  # type: ignore[type-var]
        stack.enter_context(redirect_stderr(_Console(sys.stderr)))  # type: ignore[type-var]
        yield


class _Console:
    """A text stream whose write and flush do not fail."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        """What the stream still holds, and what follows, goes nowhere; also at the process's end,
        where Python flushes once more."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
