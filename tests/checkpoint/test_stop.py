import time

import pytest

from megatron_stapo.checkpoint.stop import StopCheck, StopRequested, request_stop


def test_what_is_under_way_may_end_within_the_grace(tmp_path):
    at_once, later = StopCheck(tmp_path), StopCheck(tmp_path, grace_s=0.3)
    at_once()
    later()
    request_stop(tmp_path, "SIGTERM")
    with pytest.raises(StopRequested):
        at_once()
    later()
    with pytest.raises(StopRequested):
        later(can_end=False)
    time.sleep(0.35)
    with pytest.raises(StopRequested):
        later()
