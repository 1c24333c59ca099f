"""Records the golden runs of tests/golden/ again and prints what changed; commit the files if the change is intended.

Run: python scripts/dev/golden.py             all cases, about five minutes on two cores
     python scripts/dev/golden.py gspo        cases whose name contains the word

Each case is printed as `as recorded`, `new`, or with the numbers that differ. On a machine family without a recording,
a case that agrees within rounding keeps its numbers and gets one more checksum.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    words = " or ".join(sys.argv[1:]) or "recorded"
    arguments = ["--record", "-n", "0", "-q", "-s", "-m", "", "-k", f"test_a_run_is_the_recorded_one and ({words})"]
    sys.exit(pytest.main([*arguments, str(ROOT / "tests" / "test_golden.py")]))
