"""The disk's ceiling."""

from __future__ import annotations

import pytest
import ssd


def test_a_file_too_short_for_bursts_is_refused_and_not_made(tmp_path):
    with pytest.raises(SystemExit, match=r"too short .* at least 134217728 bytes"), ssd.full_file(tmp_path, 127 << 20):
        pass
    assert list(tmp_path.iterdir()) == []
