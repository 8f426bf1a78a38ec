"""The plan against published figures; `pytest -s` prints the table that docs/plan.md has."""

import random
from pathlib import Path

import pytest

from megatron_stapo.config import ParallelConfig
from megatron_stapo.plan import accelerators
from megatron_stapo.plan.workload import sample_response_lengths
from tests.plan.published import compute_figures, compute_verl_235b_memory

DOCS = Path(__file__).parents[2] / "docs/plan.md"


def test_errors_against_published_figures_are_bounded_and_documented():
    figures = compute_figures()
    print()
    for figure in figures:
        print(figure.row)
    held = [figure for figure in figures if figure.bound is not None]
    assert len(held) >= 8
    for figure in held:
        assert abs(figure.error) <= figure.bound, figure.row
    documented = DOCS.read_text()
    for figure in figures:
        assert figure.row in documented


def test_235b_fits_the_128_h20_that_verl_trains_it_on():
    assert 0.5 < compute_verl_235b_memory(128) < 0.9


NAMES = [
    name for name in vars(accelerators) if name.isupper() and name not in ("GIB", "ACCELERATORS")
]


@pytest.mark.parametrize("name", NAMES)
def test_every_assumption_is_documented_with_its_value(name):
    value = getattr(accelerators, name)
    shown = f"{value // accelerators.GIB} GiB" if name.endswith("_BYTES") else f"{value:g}"
    assert f"| `{name}` | {shown} |" in DOCS.read_text()


@pytest.mark.parametrize("name", accelerators.ACCELERATORS)
def test_every_accelerator_is_documented_with_its_rates(name):
    a = accelerators.ACCELERATORS[name]
    row = (
        f"| `{name}` | {a.memory_bytes // accelerators.GIB} | {a.bf16_flops / 1e12:.0f} | "
        f"{a.fp8_flops / 1e12:.0f} | "
        f"{a.hbm_bytes_per_s / 1e12:g} | {a.nvlink_bytes_per_s / 1e9:.0f} | "
        f"{a.network_bytes_per_s / 1e9:.0f} | {a.gemm_efficiency:g} | {a.fp8_efficiency:g} | "
        f"{a.expert_efficiency:g} |"
    )
    assert row in DOCS.read_text()


@pytest.mark.parametrize(("dp", "budget"), [(5, 16384), (8, 16384), (10, 16384), (10, 32768)])
def test_packing_fills_and_balances_as_assumed(dp, budget):
    from megatron_stapo.data.packing import pack
    from megatron_stapo.types import Prompt, Rollout, RolloutGroup

    scale = 64  # shorter sequences in a smaller budget pack alike
    lengths = sample_response_lengths(7680, 15360)
    drawn = random.Random(0)

    def sample():
        num_tokens = drawn.choice(lengths) // scale
        return Rollout(
            token_ids=[0] * num_tokens,
            rollout_logprobs=[0.0] * num_tokens,
            finish_reason="stop",
            policy_version=0,
            advantage=1.0,
        )

    prompt = Prompt(prompt_id=0, problem="", answer="", token_ids=[0, 0])
    groups = [RolloutGroup(prompt=prompt, rollouts=[sample() for _ in range(8)]) for _ in range(64)]
    ranks = pack(groups, 64, budget // scale, ParallelConfig(data_parallel_size=dp))
    tokens = [sum(len(m.token_ids_T) for m in rank[0].microbatches) for rank in ranks]
    count = len(ranks[0][0].microbatches)
    fill = sum(tokens) / dp / count / (budget // scale)
    assert fill == pytest.approx(accelerators.MICROBATCH_FILL, abs=0.05)
    assert max(tokens) / (sum(tokens) / dp) <= accelerators.DP_IMBALANCE
