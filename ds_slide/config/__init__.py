"""The "ds_slide" block of the DeepSpeed JSON."""

from ds_slide.config.schema import CONFIG_KEY, CompressionConfig, DebugConfig, SlideConfig
from ds_slide.config.values import check_directory_text, expanded_directory, format_bytes, parse_bytes, shown

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
