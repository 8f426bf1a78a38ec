from pathlib import Path

import pytest

from megatron_stapo.observability.timeline import compute_overlap, draw_timeline


def build_step(step: int, engines: list[tuple], trainer: list[tuple]) -> dict:
    return {"step": step, "spans": {"engines": engines, "trainer": trainer}}


# Step 2 is sampled from 11 to 16 s. Of these, step 1 scores or trains from 12 to 15, and sends its
# weights from 15: 3 of the 5 s. Step 1 was sampled from 0 to 10 s, beside nothing.
STEPS = [
    build_step(
        1,
        [("rollout", 0.0, 10.0), ("reward", 10.0, 11.0)],
        [("rollout", 0.0, 11.0), ("score", 12.0, 13.0), ("update", 13.0, 15.0), ("sync", 15, 17)],
    ),
    build_step(2, [("rollout", 11.0, 16.0)], [("score", 17.0, 18.0)]),
]


def test_overlap_is_the_share_of_sampling_in_which_the_trainer_works() -> None:
    assert compute_overlap(STEPS) == pytest.approx(3 / 15)
    assert compute_overlap(STEPS[:1]) == 0
    assert compute_overlap([{"step": 1}, {"event": "x"}]) is None


def test_the_picture_shows_steps_and_takes_none(tmp_path: Path) -> None:
    from matplotlib.image import imread

    colors = []
    for records in (STEPS, []):
        draw_timeline(records, tmp_path / "timeline.png")
        image = imread(tmp_path / "timeline.png")
        assert image.shape[:2] == (300, 1500)
        colors.append({tuple(pixel) for row in image[40:250:4, 100:1400:4] for pixel in row})
    assert len(colors[0]) > len(colors[1])
