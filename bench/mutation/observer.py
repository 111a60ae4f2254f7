"""A pytest plugin that writes down each test as it starts and each failure, so that a hang has a name too."""

from __future__ import annotations

import json
import os

import pytest

VARIABLE = "MUTATION_TESTS"


def pytest_runtest_logstart(nodeid: str) -> None:
    _write("started", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _write("failed", report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write("failed", report.nodeid)


def _write(what: str, nodeid: str) -> None:
    with open(os.environ[VARIABLE], "a") as file:
        file.write(json.dumps([what, nodeid]) + "\n")
