"""Work beside the loop."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def start(function: Callable, *args: Any) -> Future:
    """Runs a function in a thread of its own.

    A daemon thread, where an executor's would be waited for: a second Ctrl-C must end the process at once, whatever a
    reward function is waiting for.

    Args:
        function: what to run.
        *args: its arguments.

    Returns:
        `result()` waits and gives its value, or raises what it raised.
    """
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
