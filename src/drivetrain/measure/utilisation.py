"""Samples in the background how busy the device is: by NVML for a GPU, by processor time for a CPU."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import psutil
import torch

from drivetrain.measure.nvml import Gpu
from drivetrain.runtime.hardware import usable_cores

MOST_POINTS = 2000  # of the series kept for plots


class Source(Protocol):
    def read(self) -> float | None:
        """Returns the share of the device in use since the last call, 0 to 1; None where it is not known."""

    def extra(self) -> dict[str, Any]: ...


class UtilisationSampler:
    """`with UtilisationSampler(device) as sampler: ...`, then `sampler.summary()`.

    `failure` is the error that ended the sampling, if any; a run does not end for it.
    """

    def __init__(self, device: torch.device, every_seconds: float = 0.5) -> None:
        self._every = every_seconds
        self._source: Source = _source(device)
        self.failure: Exception | None = None
        self._series: list[tuple[float, float]] = []  # seconds since the start, share
        self._stride = self._seen = 0
        self._busy = self._known = 0.0  # seconds of the device; seconds of which its use is known
        self._reported = (0.0, 0.0)  # seconds busy and known at the last call of `recent`
        self._peak: float | None = None
        self._start = self._last = time.perf_counter()
        self._stop = threading.Event()

    def __enter__(self) -> UtilisationSampler:
        self._start = self._last = time.perf_counter()
        self._read()
        self._thread = threading.Thread(target=self._sample, name="utilisation", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        if not self._seen or time.perf_counter() - self._last > self._every / 2:
            self._take()  # a run shorter than one interval; an interval begun

    def summary(self) -> dict[str, Any]:
        """Returns {"mean", "peak": 0 to 1 or None, "samples", "series": [[seconds, share]], ...}, with more fields for
        a GPU."""
        mean = self._busy / self._known if self._known else None
        series = [[round(at, 2), round(share, 4)] for at, share in self._series]
        return {"mean": mean, "peak": self._peak, "samples": self._seen, "series": series, **self._source.extra()}

    def recent(self) -> float | None:
        """Returns the share of the device in use since the last call, 0 to 1; None if no sample was taken since."""
        now, before = (self._busy, self._known), self._reported
        if now[1] <= before[1]:
            return None
        self._reported = now
        return (now[0] - before[0]) / (now[1] - before[1])

    def _sample(self) -> None:
        while not self._stop.wait(self._every):
            self._take()

    def _take(self) -> None:
        now, share = time.perf_counter(), self._read()
        since, self._last = now - self._last, now
        if share is None:
            return
        self._seen += 1
        self._busy += share * since  # a machine with much to do takes samples late
        self._known += since
        self._peak = max(self._peak or 0.0, share)
        self._stride += 1
        if self._stride >= self._keep_every:
            self._stride = 0
            self._series.append((now - self._start, share))
            if len(self._series) > MOST_POINTS:
                self._series = self._series[::2]

    def _read(self) -> float | None:
        if self.failure is None:
            try:
                return self._source.read()
            except Exception as error:
                self.failure = error
        return None

    @property
    def _keep_every(self) -> int:
        return max(1, 2 * self._seen // MOST_POINTS)


def joined(summaries: Sequence[dict[str, Any]], shared: bool) -> dict[str, Any]:
    """Joins the ranks' summaries. shared: they share one device (a CPU's cores), and their shares add up."""
    if len(summaries) == 1:
        return summaries[0]
    parts = 1 if shared else len(summaries)
    points = zip(*(summary["series"] for summary in summaries), strict=False)  # sampled at the same pace
    series = [[point[0][0], round(min(1.0, sum(share for _, share in point) / parts), 4)] for point in points]
    energies = [summary["energy_joules"] for summary in summaries if summary.get("energy_joules") is not None]
    extra = {key: value for key, value in summaries[0].items() if key == "device_memory_peak_bytes"}
    means = [summary["mean"] for summary in summaries]
    return {
        "mean": None if None in means else min(1.0, sum(means) / parts),
        "peak": max((share for _, share in series), default=None),
        "samples": summaries[0]["samples"],
        "series": series,
        **extra,
        **({"energy_joules": sum(energies)} if energies else {}),
    }


def _source(device: torch.device) -> Source:
    if device.type == "cpu":
        return _Cpu()
    try:
        return Gpu(device)
    except Exception:  # no driver, no permission, a virtual GPU: NVML has an error class for each
        return _Unknown()


class _Unknown:
    """A device whose use cannot be measured: the CPU's is not taken for it."""

    def read(self) -> None:
        return None

    def extra(self) -> dict[str, Any]:
        return {}


class _Cpu:
    """The processor time of this process and its workers over the cores they may use."""

    def __init__(self) -> None:
        self._cores = usable_cores()
        self._at, self._used = time.perf_counter(), self._processor_seconds()

    def read(self) -> float:
        now, used = time.perf_counter(), self._processor_seconds()  # of many workers, reading takes a while
        share = max(0.0, used - self._used) / max(1e-9, now - self._at) / self._cores
        self._at, self._used = now, used
        return min(1.0, share)

    def extra(self) -> dict[str, Any]:
        return {}

    def _processor_seconds(self) -> float:
        # psutil's own search for children reads all of /proc: with the interpreter busy that took half a second
        total = time.process_time()
        for worker in multiprocessing.active_children():
            try:
                times = psutil.Process(worker.pid).cpu_times()
            except psutil.Error:  # it ended just now
                continue
            total += times.user + times.system
        return total
