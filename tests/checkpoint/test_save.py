"""A checkpoint that cannot be written costs itself alone, until it is the third in a row."""

import pytest

from tests.layouts import Layout
from tests.workers import run_failing_saves

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "full",
    [
        *("__0_0.distcp", "__1_0.distcp", "state.json", ".metadata.tmp", "manifest.json"),
        "tokenizer.json",  # read by rank 0 alone, before the writing
    ],
)
def test_a_full_disk_is_a_failure_of_all_ranks_alike(rank_pool, tiny_models, tmp_path, full):
    config = Layout(dp=2).build_config(tiny_models["tied"], checkpoint__keep_last=3)
    results = rank_pool.run(run_failing_saves, 2, config, tmp_path, full)
    one, three = "step_000001", "step_000003"
    for result in results:
        # The second is given up, the third is written, the fourth to sixth end the run.
        assert result["published"] == [[one], [one], *4 * [[one, three]]]
        assert "3 checkpoints in a row were not written" in result["error"]
        assert f"rank {int(full.startswith('__1'))}" in result["error"]
        assert "No space left on device" in result["error"]
        assert "give the same command to go on" in result["error"]
        assert "No space left on device" in result["finish"]
    names = [event["name"] for event in results[0]["events"]]
    failed = "checkpoint_failed"
    assert names == ["checkpoint", failed, "checkpoint", failed, failed, failed]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_folder_that_cannot_be_made_is_a_failure_of_all(rank_pool, tiny_models, tmp_path):
    config = Layout(dp=2).build_config(tiny_models["tied"])
    (tmp_path / "checkpoints").write_text("in the way")
    results = rank_pool.run(run_failing_saves, 2, config, tmp_path, "")
    for result in results:
        assert "rank 0" in result["error"] and "cannot be made" in result["error"]
