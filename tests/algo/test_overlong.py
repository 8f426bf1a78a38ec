import pytest

from megatron_stapo.algo.overlong import compute_overlong_penalty


# DAPO's own numbers: limit 20480 tokens, buffer 4096.
@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [
        (0, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (17408, -0.25),
        (18432, -0.5),
        (20480, -1.0),
        (30000, -1.0),
    ],
)
def test_penalty_worked_by_hand(num_tokens, penalty):
    assert compute_overlong_penalty(num_tokens, 20480, 4096) == penalty


@pytest.mark.parametrize("num_tokens", [0, 10, 11])
def test_without_a_buffer_there_is_no_penalty(num_tokens):
    assert compute_overlong_penalty(num_tokens, 10, 0) == 0
