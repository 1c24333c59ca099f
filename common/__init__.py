"""What has one right answer and is imported by all scripts, in rooms (sub-packages).

From the ground up: base and maths; tasks; model; generation and training; run, distill and planning; loop. A room
imports only rooms below it (tests/test_rooms.py). The `__init__.py` of each says what lives there and where to start.
"""

from pathlib import Path


def __getattr__(name: str) -> None:
    """Says where a module has gone, for scripts that were copied before there were rooms."""
    for path in Path(__file__).parent.glob(f"*/{name}.py"):
        raise ImportError(
            f"common.{name} is now common.{path.parent.name}.{name}: this script was copied from an earlier version. "
            "Move your reward, loss and options into a fresh copy of the script (CHANGELOG.md says how)"
        )
    raise AttributeError(f"module 'common' has no attribute {name!r}")
