"""How a SlideError ends a process: what it prints, by processes that do nothing else."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SENTENCE = 'ds_slide.gpu_memory is "24G"; write 24GiB (powers of 1024) or 24GB (powers of 1000)'
# `parse_bytes` stands for any function of the package that refuses.
FAILING = """
    import logging, sys
    from ds_slide.config import parse_bytes
    from ds_slide.errors import end_in_one_sentence

    def prepare():
        try:
            {}["hidden cause"]
        except KeyError:
            logging.Logger.manager.loggerClass  # of the standard library
            return list(map(parse_bytes, ["24G"], ["ds_slide.gpu_memory"]))

    print("on standard output")
    %s
    prepare()
"""
# A hook that sees the frames and what led to the error.
HEARD = (
    "lambda kind, error, trace: print('heard', len(list(__import__('traceback').walk_tb(error.__traceback__))), error, "
    "error.__context__)"
)
# A pipe that nobody reads any more.
BROKEN = "import os; ends = os.pipe(); os.dup2(ends[1], 1); os.close(ends[0]); os.close(ends[1]); print('more')"


@pytest.fixture
def lines(tmp_path):
    """Of a script, both streams in one file, as a launcher's log has them."""

    def run(before="end_in_one_sentence(); end_in_one_sentence()", name="train.py", code=1, **variables):
        script = tmp_path / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(textwrap.dedent(FAILING % before))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DS_SLIDE")} | variables
        environment["PYTHONPATH"] = str(REPOSITORY)
        done = subprocess.run(
            [sys.executable, str(script)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert code in (None, done.returncode), done.stdout
        return done.stdout.splitlines()

    return run


def files(lines):
    return [Path(line.split('"')[1]).name for line in lines if line.startswith('  File "')]


def test_a_refusal_is_the_last_line_under_the_lines_of_the_script(lines):
    found = lines()
    assert found[0] == "on standard output"
    assert found[-1] == f"ds_slide.errors.SlideConfigError: {SENTENCE}"
    assert files(found) == ["train.py", "train.py"]
    assert not [line for line in found if "hidden cause" in line or "During handling" in line]


def test_a_variable_of_the_environment_shows_everything(lines):
    found = lines(DS_SLIDE_TRACEBACK="1")
    assert found[-1] == f"ds_slide.errors.SlideConfigError: {SENTENCE}"
    assert "values.py" in files(found)
    assert [line for line in found if "hidden cause" in line]


def test_without_the_key_nothing_is_installed(lines):
    assert "values.py" in files(lines(before="pass"))


def test_other_errors_are_shown_as_ever(lines):
    found = lines(before='end_in_one_sentence(); __import__("json").loads("{")')
    assert found[-1].startswith("json.decoder.JSONDecodeError: ")
    assert "decoder.py" in files(found)


def test_who_listens_for_errors_still_hears_of_them(lines):
    """All of it, and the sentence stays the last line."""
    found = lines(before=f"sys.excepthook = {HEARD}; end_in_one_sentence()")
    assert found[-2:] == [f"heard 4 {SENTENCE} 'hidden cause'", f"ds_slide.errors.SlideConfigError: {SENTENCE}"]


def test_a_listener_that_prints_by_the_hook_before_it(lines):
    found = lines(before="sys.excepthook = lambda *all: sys.__excepthook__(*all); end_in_one_sentence()")
    assert found[-1] == f"ds_slide.errors.SlideConfigError: {SENTENCE}"
    assert [line for line in found if "hidden cause" in line]


def test_a_listener_that_ends_the_process(lines):
    found = lines(before="sys.excepthook = lambda *all: sys.exit(1); end_in_one_sentence()")
    assert found[-1] == f"ds_slide.errors.SlideConfigError: {SENTENCE}"


def test_a_listener_that_came_later_and_calls_first(lines):
    before = f"end_in_one_sentence(); ours = sys.excepthook; sys.excepthook = lambda *a: (ours(*a), ({HEARD})(*a))"
    assert f"heard 4 {SENTENCE} 'hidden cause'" in lines(before=before)


@pytest.mark.parametrize("stream", ["sys.stdout.close()", "__import__('os').close(1)", "sys.stderr.close()", BROKEN])
def test_streams_that_cannot_be_written_to(lines, stream):
    found = lines(before=f"end_in_one_sentence(); {stream}", code=None, PYTHONUNBUFFERED="")
    assert "Error in sys.excepthook:" not in found
    assert (f"ds_slide.errors.SlideConfigError: {SENTENCE}" in found) == ("stderr" not in stream)


@pytest.mark.parametrize("folder", ["home/.local/lib/python3.11/site-packages", "usr/lib/python3/dist-packages"])
def test_what_is_installed_elsewhere_is_not_of_the_script(lines, folder):
    assert files(lines(name=f"{folder}/tool.py")) == []
