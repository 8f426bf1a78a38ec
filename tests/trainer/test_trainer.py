"""What holds of a step in every layout alike: switches, precision, isolation, extreme batches."""

import dataclasses

import pytest
import torch

from tests.layouts import SINGLE, Layout
from tests.tiny_model import VOCAB_SIZE
from tests.workers import build_config, build_groups, run_reference, run_step, run_step_error

pytestmark = pytest.mark.distributed


def by_sequence(ranks, stream):
    """Values of one token stream of the first mini-batch by (sequence, position)."""
    values = {}
    for rank in ranks:
        if rank["tokens"][0] is not None:
            tokens = rank["tokens"][0]
            keys = map(tuple, tokens.keys_N2.tolist())
            values.update(zip(keys, getattr(tokens, stream).tolist(), strict=True))
    return values


@pytest.mark.parametrize("off", [{"entropy_quantile": 0.0}, {"prob_threshold": 0.0}])
def test_s2t_off_gives_the_unmasked_loss_bit_for_bit(rank_pool, tiny_models, off):
    """q = 0 with a population, and tau_p = 0, against a threshold that masks nothing."""
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)
    # Rare beyond fp32: a candidate set that is always empty, through the whole S2T path.
    empty = {"prob_threshold": 1e-44}

    def run(settings):
        changes = {f"algorithm__{name}": value for name, value in settings.items()}
        config = Layout().build_config(tiny_models["tied"], **changes)
        return rank_pool.run(run_step, 1, config, groups, 2)[0]

    ours, unmasked = run(off), run(empty)
    assert unmasked["metrics"]["num_masked"] == ours["metrics"]["num_masked"] == 0
    assert ours["updates"] == unmasked["updates"]
    for name, weight in unmasked["weights"].items():
        assert torch.equal(ours["weights"][name], weight), name


def test_a_step_in_bf16_stays_near_fp32(rank_pool, tiny_models):
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)

    def run(dtype):
        config = Layout(tp=2, sp=True).build_config(tiny_models["tied"], model__dtype=dtype)
        return rank_pool.run(run_step, 2, config, groups, 1)[0]

    bf16, fp32 = run("bfloat16"), run("float32")
    assert bf16["metrics"]["entropy_mean"] == pytest.approx(
        fp32["metrics"]["entropy_mean"], rel=0.02
    )
    assert bf16["updates"][0]["grad_norm"] == pytest.approx(
        fp32["updates"][0]["grad_norm"], rel=0.1
    )


@pytest.mark.parametrize(
    "layout", [SINGLE, Layout(cp=2, budget=300), Layout(tp=2, sp=True, budget=600)], ids=str
)
def test_a_perturbed_sequence_changes_no_other_log_prob_in_its_pack(rank_pool, tiny_models, layout):
    config = layout.build_config(tiny_models["tied"])
    before, after = (build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE) for _ in range(2))
    changed = after[0].rollouts[2]
    changed.token_ids = [(t + 1) % VOCAB_SIZE for t in changed.token_ids]

    def run(groups):
        ranks = rank_pool.run(run_step, config.parallel.world_size, config, groups, 1)
        assert ranks[0]["num_microbatches"] == 1  # all in one pack
        return by_sequence(ranks, "logprobs_N")

    ours, theirs = run(before), run(after)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert (theirs[key] == value) == (key[0] != 2), key


def test_the_kl_reference_is_the_initial_model_after_an_update(rank_pool, tiny_models):
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)
    config = Layout(tp=2, pp=2, vpp=2).build_config(tiny_models["tied"], algorithm__kl_coef=0.1)
    ranks = rank_pool.run(run_reference, config.parallel.world_size, config, groups)
    last_stage = [rank for rank in ranks if rank is not None]
    assert len(last_stage) == 2
    for first, reference, second in last_stage:
        assert torch.equal(reference, first)
        assert not torch.equal(second, first)


def test_the_halves_of_lopti_share_the_tokens_between_them(rank_pool, tiny_models):
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)
    config = SINGLE.build_config(
        tiny_models["tied"], algorithm__lopti_prob_threshold=0.1, algorithm__token_mask="none"
    )
    [rank] = rank_pool.run(run_step, 1, config, groups, 1)
    rare, common = (tokens.loss_mask_N for tokens in rank["tokens"])
    assert rare.any() and common.any()
    assert torch.equal(rare, ~common)
    # By the sampling policy's probability, which is the first half's own.
    assert torch.equal(rare, rank["tokens"][0].logprobs_N.exp() < 0.1)
    assert len(rank["updates"]) == 2


def test_ranks_without_a_token_to_train_take_part(rank_pool, tiny_models):
    """Two sequences on four ranks, one of them without a response."""
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)[:1]
    del groups[0].rollouts[2:]
    empty = groups[0].rollouts[1]
    empty.token_ids, empty.rollout_logprobs = [], []

    def run(layout):
        config = layout.build_config(tiny_models["tied"], algorithm__num_prompts_per_minibatch=1)
        return rank_pool.run(run_step, config.parallel.world_size, config, groups, 1)[0]

    single = run(SINGLE)
    assert single["updates"][0]["grad_norm"] > 0
    for layout in (Layout(dp=4), Layout(dp=2, pp=2, vpp=2), Layout(cp=2, dp=2)):
        other = run(layout)
        assert other["updates"][0] == pytest.approx(single["updates"][0], rel=1e-5)
        assert other["metrics"]["num_masked"] == single["metrics"]["num_masked"]


def test_a_minibatch_without_any_token_changes_no_weight_by_its_gradient(rank_pool, tiny_models):
    """Every response was cut, and cut ones are left out: the gradient is zero, not NaN."""
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)
    for group in groups:
        for rollout in group.rollouts:
            rollout.finish_reason = "length"
    config = Layout(dp=2).build_config(tiny_models["tied"], algorithm__filter_truncated=True)
    [update] = rank_pool.run(run_step, 2, config, groups, 1)[0]["updates"]
    assert update["loss"] == update["grad_norm"] == 0.0


def test_a_broken_weight_stops_every_rank_with_the_token(rank_pool, tiny_models, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in tiny_models["untied"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"][5] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = Layout(model="untied", tp=2, pp=2).build_config(tmp_path)
    groups = build_groups(build_config(tmp_path), VOCAB_SIZE)
    results = rank_pool.run(run_step_error, 4, config, groups)
    assert len(set(results)) == 1
    assert "log-probability of" in results[0] and "nan at sequence" in results[0]


def test_quadrants_add_up_to_the_tokens_with_positive_advantage(rank_pool, tiny_models):
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)

    def run(layout):
        config = dataclasses.replace(layout.build_config(tiny_models["tied"]), log_quadrants=True)
        return rank_pool.run(run_step, config.parallel.world_size, config, groups, 1)[0]["metrics"]

    single, other = run(SINGLE), run(Layout(tp=2, cp=2))
    positive = sum(len(r.token_ids) for g in groups[:2] for r in g.rollouts if r.advantage > 0)
    names = ("rare_certain", "rare_open", "likely_certain", "likely_open")
    assert sum(single.get(f"num_{name}", 0) for name in names) == positive
    assert single["num_rare_certain"] == single["num_masked"]
    for name, value in single.items():
        assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
