"""Counters and histograms of a server, in the Prometheus text format."""

import threading
from collections.abc import Sequence

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHARES = tuple(i / 10 for i in range(11))  # for values in [0, 1]
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Counts:
    """Thread-safe counters and histograms."""

    def __init__(self, prefix: str):
        """Starts empty.

        Args:
            prefix: of all names.
        """
        self.prefix = prefix
        self._kinds: dict[str, str] = {}
        self._samples: dict[str, dict[str, float]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float = 1, **labels: str | int) -> None:
        """Increases a counter.

        Args:
            name: of the counter, ending with "_total".
            value: increment, at least 0.
            **labels: must have few different values, since all are kept.
        """
        with self._lock:
            self._kinds[name] = "counter"
            self._increase(name, _labels(labels), value)

    def observe(self, name: str, value: float, bounds: Sequence[float], **labels: str) -> None:
        """Adds a value to a histogram.

        Args:
            name: of the histogram.
            value: finite.
            bounds: upper bounds of its buckets, increasing; always the same for a name.
            **labels: as for `add`.
        """
        with self._lock:
            self._kinds[name] = "histogram"
            for bound in (*bounds, "+Inf"):
                self._increase(name, "_bucket" + _labels({**labels, "le": bound}), value <= float(bound))
            self._increase(name, "_sum" + _labels(labels), value)
            self._increase(name, "_count" + _labels(labels), 1)

    def text(self, gauges: dict[str, float]) -> str:
        """All values, as the body of /metrics.

        Args:
            gauges: current values by name.
        """
        lines = []
        with self._lock:
            for name, kind in self._kinds.items():
                lines.append(f"# TYPE {self.prefix}{name} {kind}")
                lines += [f"{self.prefix}{name}{sample} {value:g}" for sample, value in self._samples[name].items()]
        for name, value in gauges.items():
            lines += [f"# TYPE {self.prefix}{name} gauge", f"{self.prefix}{name} {value:g}"]
        return "\n".join(lines) + "\n"

    def _increase(self, name: str, sample: str, value: float) -> None:
        samples = self._samples.setdefault(name, {})
        samples[sample] = samples.get(sample, 0) + value


def _labels(labels: dict[str, str | int | float]) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""
