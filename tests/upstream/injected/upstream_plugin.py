"""A pytest plugin: leaves out what the exclusions name, and writes one line of JSON for each test.

    {"test": node id, "outcome": "passed" | "failed" | "skipped", "stage3": whether a config of stage 3 was parsed,
     "seconds": ..., "text": the failure or the reason}

SLIDE_UPSTREAM_OUT is the file. SLIDE_UPSTREAM_ONLY names a file of node ids: nothing else runs then. Tests that have
a line in SLIDE_UPSTREAM_OUT already do not run again, so that a run that was ended goes on where it was.
"""

import fnmatch
import json
import multiprocessing
import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def exclusions():
    """[(pattern, reason)] of `exclusions.txt`: a pattern of node ids, two spaces or more, the reason."""
    lines = (HERE.parent / "exclusions.txt").read_text().splitlines()
    rows = [line.split(None, 1) for line in lines if line.strip() and not line.startswith("#")]
    return [(pattern, reason.strip()) for pattern, reason in rows]


def lines_of(path):
    return Path(path).read_text().splitlines() if path and Path(path).exists() else []


def pytest_configure(config):
    multiprocessing.set_forkserver_preload(["upstream_preload"])
    config.upstream_text = {}


def pytest_collection_modifyitems(config, items):
    done = {json.loads(line)["test"] for line in lines_of(os.environ["SLIDE_UPSTREAM_OUT"])}
    only = set(lines_of(os.environ.get("SLIDE_UPSTREAM_ONLY")))
    rows = exclusions()
    chosen, left = [], []
    for item in items:
        excluded = any(matches(item.nodeid, pattern) for pattern, _ in rows)
        wanted = not (excluded or other_stage(item) or item.nodeid in done) and (not only or item.nodeid in only)
        (chosen if wanted else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = chosen


def other_stage(item):
    """Whether the test's parameters say that it is about another stage than 3."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    stages = [value for name, value in parameters.items() if name in ("stage", "zero_stage", "zero_opt_stage")]
    return bool(stages) and 3 not in stages


def matches(node_id, pattern):
    """`*` matches anything; brackets, which node ids have, stand for themselves."""
    return fnmatch.fnmatchcase(node_id, pattern.replace("[", "[[]"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    seen = Path(os.environ["SLIDE_UPSTREAM_SEEN"])
    before = seen.stat().st_size if seen.exists() else 0
    item.upstream_reports = []
    try:
        result = yield
    except pytest.exit.Exception as error:  # a rank did not come back; DeepSpeed's tests give up there
        write(item.nodeid, "failed", True, 0.0, f"Failed: hung: {error}")
        Path(os.environ["SLIDE_UPSTREAM_AGAIN"]).touch()
        raise
    reports = item.upstream_reports
    worst = next((r for r in reports if r.failed), None) or next((r for r in reports if r.skipped), None) or reports[-1]
    stage3 = seen.exists() and seen.stat().st_size > before
    seconds = sum(report.duration for report in reports)
    write(item.nodeid, worst.outcome, stage3, seconds, "" if worst.passed else str(worst.longrepr))
    return result


def write(test, outcome, stage3, seconds, text):
    line = {"test": test, "outcome": outcome, "stage3": stage3, "seconds": round(seconds, 1), "text": text}
    with open(os.environ["SLIDE_UPSTREAM_OUT"], "a") as out:
        out.write(json.dumps(line) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.upstream_reports.append(report)
    return report
