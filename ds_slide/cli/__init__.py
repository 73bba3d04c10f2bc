"""The console command `ds-slide`; `python -m ds_slide.cli` is the same."""
