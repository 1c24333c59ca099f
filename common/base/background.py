"""A function in a daemon thread, as a future."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def start(function: Callable, *args: Any) -> Future:
    """Runs a function in a daemon thread.

    Not in an executor, which Python joins at exit: a second Ctrl-C must end the process at once, whatever the function
    is waiting for.

    Args:
        function: what to run.
        *args: its arguments.

    Returns:
        A future for its value or exception.
    """
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # result() raises it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
