"""Work beside the caller's."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def run_in_thread[T](work: Callable[[], T]) -> "Future[T]":
    """Start the work in a thread that does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="background").start()
    return future
