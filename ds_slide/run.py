"""`deepspeed --module ds_slide.run train.py ...`: run a script with DS-Slide installed first, whatever the environment.

Not needed where the package is installed with its metadata (see _autoload.py); this way in works without. It takes a
script or `-m package.module`, and hands every argument on, `--local_rank` of the launcher included.
"""

import os
import runpy
import sys

from ds_slide._autoload import install_hook

USAGE = "usage: deepspeed --module ds_slide.run [train.py | -m package.module] [arguments ...]"


def main() -> None:
    install_hook()
    launcher_arguments, rest = _split(sys.argv[1:])
    if not rest or rest == ["-m"]:
        sys.exit(USAGE)
    if rest[0] == "-m":
        name, arguments = rest[1], rest[2:]
        sys.argv = [name, *launcher_arguments, *arguments]
        # run_module replaces sys.argv[0] by the file it finds, as `python -m` does.
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    script, arguments = rest[0], rest[1:]
    if not os.path.exists(script):
        sys.exit(f"ds_slide.run: there is no file {script!r}; name the training script first, then its arguments")
    sys.argv = [script, *launcher_arguments, *arguments]
    # `python train.py` puts the script's folder first on sys.path where `python -m` put the working directory.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(what the launcher put before the script, the script and the rest).

    The launcher writes `--local_rank=N` in front of everything that follows the module's name.
    """
    count = 0
    while count < len(arguments) and arguments[count].startswith(("--local_rank=", "--local-rank=")):
        count += 1
    return arguments[:count], arguments[count:]


if __name__ == "__main__":
    main()
