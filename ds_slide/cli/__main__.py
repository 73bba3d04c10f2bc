"""`python -m ds_slide.cli`."""

from ds_slide.cli.main import main

main()
