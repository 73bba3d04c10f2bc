"""DS-Slide: an alternative ZeRO-3 offload engine for DeepSpeed, switched on by ``"ds_slide": {"enabled": true}``."""

from ds_slide._autoload import install_hook

__version__ = "0.1.0"

# Whoever imports the package wants it active; imports neither torch nor DeepSpeed.
install_hook()
