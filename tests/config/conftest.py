import sys
from pathlib import Path

# The test files of this folder, and those of tests/end_to_end, import `any_values` by this name.
sys.path.insert(0, str(Path(__file__).resolve().parent))
