"""Who sees the lines of the logger "ds_slide"."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds_slide.report.log import Console, log, show, size


@contextmanager
def no_logging_yet() -> Iterator[None]:
    """The loggers as in a script that has not set up logging. In the test itself: pytest adds handlers before it."""
    before = [(logger, logger.handlers, logger.level) for logger in (logging.getLogger(), log)]
    for logger, level in ((logging.getLogger(), logging.WARNING), (log, logging.NOTSET)):
        logger.handlers = []
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, handlers, level in before:
            logger.handlers = handlers
            logger.setLevel(level)


@no_logging_yet()
def test_info_is_shown_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    show()
    show()
    log.info("a line")
    logging.getLogger("ds_slide.store.ssd.store").warning("and another")
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first.endswith("[INFO] [ds_slide] a line")
    assert second.endswith("[WARNING] [ds_slide.store.ssd.store] and another")


@no_logging_yet()
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_script_with_handlers_gets_each_line_once(capsys: pytest.CaptureFixture[str], before: bool) -> None:
    if not before:
        show()
    logging.basicConfig(format="mine: %(message)s", level=logging.INFO)
    if before:
        show()
    log.info("a line")
    assert capsys.readouterr().err == "mine: a line\n"


@no_logging_yet()
def test_handlers_without_a_level_get_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logging.basicConfig(format="mine: %(message)s")  # also what logging.warning() of any library does
    show()
    log.info("a line")
    assert capsys.readouterr().err == "mine: a line\n"


@no_logging_yet()
@pytest.mark.parametrize("who", ["root", "ds_slide"])
def test_a_level_that_the_script_has_set_counts(capsys: pytest.CaptureFixture[str], who: str) -> None:
    logging.getLogger(None if who == "root" else who).setLevel(logging.ERROR)
    show()
    log.info("a line")
    log.warning("a warning")
    log.error("an error")
    assert [line.split("] ")[-1] for line in capsys.readouterr().err.splitlines()] == ["an error"]


@no_logging_yet()
def test_a_handler_of_the_logger_itself_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    show()
    log.info("a line")
    assert (lines, capsys.readouterr().err) == (["a line"], "")
    assert sum(isinstance(handler, Console) for handler in log.handlers) == 1


def test_sizes() -> None:
    assert [size(nbytes) for nbytes in (0, 1, 999, 1500, 2_000_000, 37_084_000_000, -601_657_651)] == [
        "0 bytes",
        "1 byte",
        "999 bytes",
        "1,500 bytes",
        "2.0 MB",
        "37.1 GB",
        "-601.7 MB",
    ]
