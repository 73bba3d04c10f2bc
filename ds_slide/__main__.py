"""`python -m ds_slide`: the command `ds-slide`; alone it prints the versions and what of the machine is used."""

import sys

from ds_slide.cli.__main__ import main

if __name__ == "__main__":
    main(sys.argv[1:] or ["--version"])
