"""Modules that all scripts import, in rooms (sub-packages).

From the ground up: base and maths; tasks; model; generation and training; run, distill and
planning; loop. A room imports only rooms below it (tests/test_rooms.py). Each `__init__.py` says
what lives in its room and where to start reading.
"""

from pathlib import Path


def __getattr__(name: str) -> None:
    """Names the new place of a module, for scripts copied from a version without rooms."""
    for path in Path(__file__).parent.glob(f"*/{name}.py"):
        raise ImportError(
            f"common.{name} is now common.{path.parent.name}.{name}: this script was copied from an earlier version. "
            "Move your reward, loss and options into a fresh copy of the script (CHANGELOG.md says how)"
        )
    raise AttributeError(f"module 'common' has no attribute {name!r}")
