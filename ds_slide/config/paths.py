"""Directories as people write them in JSON: "/local_nvme", "~/scratch", "$SCRATCH/states".

Two steps. `check_directory_text` looks at the text alone, so that a JSON is judged the same everywhere;
`expanded_directory` puts in what this process knows: home directories and environment variables.
"""

import os
import re
from pathlib import Path

from ds_slide.config.shown import shown
from ds_slide.errors import SlideConfigError

_URL = re.compile(r"file:|[A-Za-z][A-Za-z0-9+.-]*://", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)


MOST_PATH_BYTES, MOST_NAME_BYTES = 4096, 255  # Linux's PATH_MAX, with the NUL at its end, and NAME_MAX


def check_directory_text(text: str, name: str) -> None:
    """Raise SlideConfigError for a text that can name no directory. `name`: its JSON path."""
    said = f"{name} is {shown(text)}"
    if not text.strip():
        raise SlideConfigError(f"{said}, which names no directory; name one on a local disk")
    if "\0" in text:
        raise SlideConfigError(f"{said}, which has a NUL character, as no path may; remove it")
    if _URL.match(text):
        raise SlideConfigError(f'{said}, which is a URL; write the directory itself, such as "/local_nvme"')
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        raise SlideConfigError(f"{said}, which has characters that no path may have; write it as UTF-8") from None
    # Told here: the operating system would say it after the directories above the long name have been made.
    if len(encoded) >= MOST_PATH_BYTES or max(map(len, encoded.split(b"/"))) > MOST_NAME_BYTES:
        raise SlideConfigError(
            f"{said}, which is longer than a path may be ({MOST_PATH_BYTES - 1} bytes, {MOST_NAME_BYTES} for each name "
            "in it); name a shorter one"
        )


def expanded_directory(text: str, name: str) -> Path:
    """The directory, absolute: "~" and "~user" at the beginning and "$NAME" or "${NAME}" anywhere mean what they mean
    in a shell. Raises SlideConfigError as `check_directory_text`, and for a user or a variable that does not exist:
    the text itself would be a directory of that odd name below the present one.
    """
    check_directory_text(text, name)
    home = os.path.expanduser(text)
    if home.startswith("~"):
        user = text.split("/", 1)[0]
        raise SlideConfigError(
            f"{name} is {shown(text)}, but there is no home directory of {shown(user[1:])}; write the directory in full"
        )
    for match in _VARIABLE.finditer(text):
        variable = match[1] or match[2] or ""
        if not os.environ.get(variable):
            raise SlideConfigError(
                f"{name} is {shown(text)}, but the environment variable {shown(variable)} is not set in this process; "
                "set it, or write the directory in full"
            )
    found = os.path.abspath(os.path.expandvars(home))
    check_directory_text(found, name)
    return Path(found)
