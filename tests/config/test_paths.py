"""Directories as they are written in the JSON. Texts that can name none: test_schema.py."""

import os
import re
from pathlib import Path

import pytest

from ds_slide.config import expanded_directory
from ds_slide.errors import SlideConfigError


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("SCRATCH", "/scratch/job 7")
    monkeypatch.setenv("NOTHING", "")
    monkeypatch.delenv("UNSET", raising=False)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/disk", "/disk"),
        ("/disk/../other/", "/other"),
        ("~", "/home/someone"),
        ("~/states", "/home/someone/states"),
        ("~root/states", "/root/states"),
        ("$HOME/x", "/home/someone/x"),
        ("${SCRATCH}/$HOME", "/scratch/job 7/home/someone"),
        ("/odd/~name", "/odd/~name"),
        ("/five$", "/five$"),
        ("/a:b//c", "/a:b/c"),
        ("states", os.path.join(os.getcwd(), "states")),
    ],
)
def test_what_a_shell_would_make_of_it(text, path):
    assert expanded_directory(text, "x") == Path(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "~nosuchuser/x",
            'ds_slide.nvme_path is "~nosuchuser/x", but there is no home directory of "nosuchuser"; write',
        ),
        (
            "$UNSET/x",
            'ds_slide.nvme_path is "$UNSET/x", but the environment variable "UNSET" is not set in this process',
        ),
        ("/a/${NOTHING}", 'ds_slide.nvme_path is "/a/${NOTHING}", but the environment variable "NOTHING" is not set'),
        ("/a/${}", 'ds_slide.nvme_path is "/a/${}", but the environment variable "" is not set'),
        ("/a\0", "which has a NUL character"),
    ],
)
def test_what_names_no_directory(text, message):
    with pytest.raises(SlideConfigError, match=re.escape(message)):
        expanded_directory(text, "ds_slide.nvme_path")


def test_a_variable_may_hold_what_no_path_may(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/" + "s" * 300)
    with pytest.raises(SlideConfigError, match="longer than a path may be"):
        expanded_directory("$SCRATCH", "ds_slide.nvme_path")
