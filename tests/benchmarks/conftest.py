"""Scripts of benchmarks/ are imported by their names, as they import each other."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end: a script there that is named like a module of the standard library must not take its place.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
