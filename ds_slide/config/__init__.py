"""The "ds_slide" block of the DeepSpeed JSON."""

from ds_slide.config.paths import check_directory_text, expanded_directory
from ds_slide.config.schema import CONFIG_KEY, CompressionConfig, DebugConfig, SlideConfig
from ds_slide.config.shown import shown
from ds_slide.config.sizes import format_bytes, parse_bytes

__all__ = [
    "CONFIG_KEY",
    "CompressionConfig",
    "DebugConfig",
    "SlideConfig",
    "check_directory_text",
    "expanded_directory",
    "format_bytes",
    "parse_bytes",
    "shown",
]
