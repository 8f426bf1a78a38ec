import math

import pytest

from tests.layouts import Layout
from tests.tiny_model import VOCAB_SIZE
from tests.workers import build_config, build_groups, run_fp8_fallback, run_precision

LIMIT = 0.05


@pytest.mark.filterwarnings("ignore")  # Megatron's, at import
@pytest.mark.parametrize(
    ("gap", "in_fp8", "has_warned", "verdict"),
    [
        (0.01, True, False, "keep"),
        (LIMIT, True, False, "keep"),
        (0.051, True, False, "leave_fp8"),
        (math.inf, True, True, "leave_fp8"),
        (math.nan, True, False, "keep"),
        (0.051, False, False, "warn"),
        (0.051, False, True, "keep"),
        (0.01, False, False, "keep"),
        (math.nan, False, False, "keep"),
    ],
)
def test_a_gap_is_judged_by_the_limit_and_by_what_can_be_done(gap, in_fp8, has_warned, verdict):
    from megatron_stapo.trainer.precision import judge_gap

    assert judge_gap(gap, LIMIT, in_fp8=in_fp8, has_warned=has_warned) == verdict


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(pp=2, vpp=2, dp=2), Layout(model="experts", ep=2, dp=2)],
    ids=str,
)
def test_gradients_are_summed_in_fp32(rank_pool, tiny_models, layout):
    config = layout.build_config(tiny_models[layout.model], model__dtype="bfloat16")
    groups = build_groups(build_config(tiny_models[layout.model]), VOCAB_SIZE)
    for rank in rank_pool.run(run_precision, config.parallel.world_size, config, groups):
        assert rank["param_dtypes"] == {"torch.bfloat16"}
        assert rank["grad_dtypes"] == rank["main_dtypes"] == {"torch.float32"}
        # The sum of several microbatches' gradients in bfloat16 would have bfloat16's 8 bits.
        assert rank["beyond_bf16_frac"] > 0.5


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(model="experts", ep=2, dp=2)], ids=str)
def test_every_rank_leaves_fp8_for_good_and_through_a_resume(
    rank_pool, tiny_models, tmp_path, layout
):
    config = layout.build_config(tiny_models[layout.model], model__dtype="bfloat16")
    groups = build_groups(build_config(tiny_models[layout.model]), VOCAB_SIZE)
    results = rank_pool.run(run_fp8_fallback, 2, config, groups, tmp_path)
    for rank in results:
        within, left, warned, silent = rank["said"]
        assert within is silent is None
        assert "0.1 nats on average in step 2; from step 3 on this run trains in bfloat16" in left
        # In bfloat16 the gap is another's fault, and once is enough.
        assert "the trainer is not in FP8" in warned
        # Copies of the config, such as single experts keep, included.
        assert (rank["before"], rank["after"]) == ({"e4m3"}, {None})
        assert rank["resumed"] == {1: ({"e4m3"}, None), 2: ({None}, 2)}
    assert results[0]["said"] == results[1]["said"]
