"""The disk's ceiling."""

from __future__ import annotations

import disk
import pytest


def test_a_file_too_short_is_refused_and_not_made(tmp_path):
    with pytest.raises(SystemExit, match=r"too short .* at least 134217728 bytes"), disk.full_file(tmp_path, 127 << 20):
        pass
    assert list(tmp_path.iterdir()) == []
