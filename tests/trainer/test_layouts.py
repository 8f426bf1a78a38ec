"""Statistics, mask, loss and gradient of a step against the float64 reference, in every layout.

`pytest tests/trainer/test_layouts.py --write-layout-table` writes docs/layouts.md from the run.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.layouts import BALANCE_COEF, LAYOUTS, SINGLE, Layout
from tests.reference import ReferenceQwen3, Sequence, StepResult, reference_step
from tests.tiny_model import VOCAB_SIZE
from tests.workers import build_config, build_groups, compute_noise, run_step

pytestmark = pytest.mark.distributed

TOLERANCES = {
    "log-prob": (2e-5, "nats, largest over tokens"),
    "entropy": (2e-5, "nats, largest over tokens"),
    "loss": (1e-5, "relative, of the largest token's loss"),
    "gradient": (1e-5, "largest entry of any parameter, of the gradient's norm"),
    "norm": (1e-5, "relative, before clipping"),
    "clipped norm": (1e-5, "relative"),
}
MAX_GRAD_NORM = 0.5
TABLE = Path(__file__).parents[2] / "docs/layouts.md"


def to_sequences(groups):
    return [
        Sequence(group.prompt.token_ids, rollout.token_ids, rollout.advantage)
        for group in groups
        for rollout in group.rollouts
    ]


@pytest.fixture(scope="module")
def references(tiny_models):
    """First mini-batch of `build_groups`, by model."""

    def compute(name):
        config = build_config(tiny_models[name])
        groups = build_groups(config, VOCAB_SIZE)
        sequences = to_sequences(groups[: config.algorithm.num_prompts_per_minibatch])
        model = ReferenceQwen3(tiny_models[name])
        with torch.no_grad():
            old_logprobs = [
                model.score(s, 0.8)[0]
                + compute_noise(torch.tensor(i), len(s.prompt) - 1 + torch.arange(len(s.response)))
                for i, s in enumerate(sequences)
            ]
        result = reference_step(
            model,
            sequences,
            old_logprobs,
            0.02,
            0.75,
            temperature=0.8,
            balance_coef=BALANCE_COEF if name == "experts" else 0.0,
        )
        assert result.num_candidates > 10  # or the mask would not be tested
        assert result.grad_norm > MAX_GRAD_NORM  # or clipping would not be
        return groups, sequences, result

    return {name: compute(name) for name in tiny_models}


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[Layout, dict[str, float]]]:
    """Errors by layout; written to docs/ at the end if asked for."""
    errors: dict[Layout, dict[str, float]] = {}
    yield errors
    if request.config.getoption("--write-layout-table"):
        assert len(errors) == len(LAYOUTS), "every layout must have passed"
        TABLE.write_text(format_table(errors))


def format_table(errors: dict[Layout, dict[str, float]]) -> str:
    header = ["layout", "ranks", "microbatches", "masks", *TOLERANCES]
    rows = [header, ["---"] * len(header)]
    for layout, row in errors.items():
        cells = [f"{row[name]:.1e}" for name in TOLERANCES]
        rows.append([str(layout), str(row["ranks"]), str(row["microbatches"]), "identical", *cells])
    worst = [f"{max(row[name] for row in errors.values()):.1e}" for name in TOLERANCES]
    rows.append(["**worst seen**", "", "", "", *worst])
    rows.append(["**tolerance**", "", "", "", *(f"{t:.0e}" for t, _ in TOLERANCES.values())])
    lines = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    units = "\n".join(f"- {name}: {what}" for name, (_, what) in TOLERANCES.items())
    return f"""# Layouts

One STAPO update of a tiny Qwen3 in float32 on CPUs over gloo, held to a float64 reference that
shares no code with the package: one process, one sequence at a time, full softmax. The old
log-probabilities differ from the current ones by up to 0.4 nats, so that ratios are clipped.
`pytest tests/trainer/test_layouts.py --write-layout-table` writes the table and fails on any mask
that differs by one token and on any error above its tolerance.

`tied` and `untied` are dense, by whether the head is the embedding; `experts` has 8 experts, 2 per
token, and a load-balancing loss. tp, sp, pp, vpp, cp, dp, ep are tensor, sequence, pipeline,
interleaved, context, data and expert parallelism; first and last are the layers of an uneven
stage; budget is the tokens of a microbatch on one rank; reverse takes the microbatches backwards.

{units}

{lines}
"""


def measure_errors(ranks, sequences, expected: StepResult, tp_size: int) -> dict[str, float]:
    """Largest deviations of a run's last update, clipped, from the reference; fails where a mask
    differs, or where a token is not on tp_size ranks exactly."""
    errors = dict.fromkeys(TOLERANCES, 0.0)
    seen: Counter[tuple[int, int]] = Counter()
    for rank in ranks:
        tokens = rank["tokens"][-1]
        if tokens is None:
            continue
        for (sequence, position), logprob, entropy, mask in zip(
            tokens.keys_N2.tolist(),
            tokens.logprobs_N.double(),
            tokens.entropy_N.double(),
            tokens.loss_mask_N,
            strict=True,
        ):
            t = position - (len(sequences[sequence].prompt) - 1)
            seen[sequence, t] += 1
            error = abs(logprob - expected.logprobs[sequence][t])
            errors["log-prob"] = max(errors["log-prob"], float(error))
            error = abs(entropy - expected.entropies[sequence][t])
            errors["entropy"] = max(errors["entropy"], float(error))
            assert mask == expected.masks[sequence][t], f"mask of token {t} of {sequence}"
    expected_tokens = {(i, t) for i, s in enumerate(sequences) for t in range(len(s.response))}
    assert seen == dict.fromkeys(expected_tokens, tp_size)

    update, gradients = ranks[0]["updates"][-1], ranks[0]["gradients"]
    largest = max(abs(s.advantage) for s in sequences)
    errors["loss"] = abs(update["loss"] - expected.loss) / largest
    errors["norm"] = abs(update["grad_norm"] / expected.grad_norm - 1)
    clip = MAX_GRAD_NORM / expected.grad_norm
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        error = (gradients[name].double() - clip * gradient).abs().max() / MAX_GRAD_NORM
        errors["gradient"] = max(errors["gradient"], float(error))
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    errors["clipped norm"] = abs(norm / MAX_GRAD_NORM - 1)
    return errors


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_equals_the_float64_reference(rank_pool, tiny_models, references, table, layout):
    groups, sequences, expected = references[layout.model]
    config = layout.build_config(tiny_models[layout.model], optimizer__max_grad_norm=MAX_GRAD_NORM)
    ranks = rank_pool.run(
        run_step, config.parallel.world_size, config, groups, 1, layout.reverse, True
    )
    errors = measure_errors(ranks, sequences, expected, layout.tp)
    for name, (tolerance, _) in TOLERANCES.items():
        assert errors[name] <= tolerance, name
    metrics = ranks[0]["metrics"]
    assert metrics["num_masked"] == sum(int((~m).sum()) for m in expected.masks)
    assert metrics["num_candidates"] == expected.num_candidates
    assert metrics["entropy_threshold"] == pytest.approx(expected.threshold, rel=1e-5)
    for rank in ranks:
        assert rank["updates"] == ranks[0]["updates"]
        assert rank["metrics"] == ranks[0]["metrics"]
    table[layout] = {
        **errors,
        "ranks": config.parallel.world_size,
        "microbatches": ranks[0]["num_microbatches"],
    }


AGREEING = [
    Layout(tp=2, sp=True, pp=2, reverse=True),
    Layout(pp=2, vpp=2, dp=2),
    Layout(tp=2, cp=2),
    Layout(dp=4, budget=60),
    Layout(cp=2, dp=2, recompute="full"),
    Layout(reverse=True),
]


def test_three_updates_agree_between_layouts(rank_pool, tiny_models):
    """Updates after the first are off-policy, and masked under the weights that the last made."""
    path = tiny_models["tied"]
    changes = {"algorithm__num_prompts_per_minibatch": 1, "rollout__num_prompts_per_step": 3}
    groups = build_groups(build_config(path, **changes), VOCAB_SIZE)

    def run(layout):
        config = layout.build_config(path, **changes)
        world_size = config.parallel.world_size
        return rank_pool.run(run_step, world_size, config, groups, 3, layout.reverse)[0]

    single = run(SINGLE)
    assert single["metrics"]["ratio_max"] > 1.01
    for layout in AGREEING:
        other = run(layout)
        for ours, theirs in zip(other["updates"], single["updates"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        for name in ("num_masked", "num_candidates", "num_response_tokens"):
            assert other["metrics"][name] == single["metrics"][name]
        for name, weight in single["weights"].items():
            # Adam's first steps move a weight by lr whatever its gradient's size, so that rounding
            # shows where a gradient is all but zero.
            torch.testing.assert_close(other["weights"][name], weight, rtol=0, atol=3e-4)
            assert (other["weights"][name] - weight).abs().mean() < 1e-6


@pytest.mark.parametrize("layout", [SINGLE, Layout(tp=2, pp=2), Layout(cp=2, dp=2)], ids=str)
def test_the_second_update_is_decided_under_the_weights_of_the_first(
    rank_pool, tiny_models, tmp_path, layout
):
    """Masks, loss and gradient of an off-policy update, from the weights as they then are."""
    path = tiny_models["tied"]
    config = layout.build_config(path, optimizer__max_grad_norm=MAX_GRAD_NORM)
    groups = build_groups(config, VOCAB_SIZE)
    size = config.algorithm.num_prompts_per_minibatch
    sequences = to_sequences(groups[size : 2 * size])

    def run(num_updates):
        return rank_pool.run(run_step, config.parallel.world_size, config, groups, num_updates)

    save_file(run(1)[0]["weights"], tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    before = ReferenceQwen3(path)
    with torch.no_grad():
        old_logprobs = [before.score(s, 0.8)[0] for s in sequences]
    settings = (sequences, old_logprobs, 0.02, 0.75)
    expected = reference_step(ReferenceQwen3(tmp_path), *settings, temperature=0.8)
    stale = reference_step(before, *settings, temperature=0.8)
    # A mask from the weights before the first update would be another one.
    assert any(not torch.equal(a, b) for a, b in zip(expected.masks, stale.masks, strict=True))
    assert expected.grad_norm > MAX_GRAD_NORM
    errors = measure_errors(run(2), sequences, expected, layout.tp)
    for name, (tolerance, _) in TOLERANCES.items():
        assert errors[name] <= tolerance, name


def test_the_reference_has_the_logits_of_transformers(tiny_models):
    from transformers import AutoModelForCausalLM

    for path in tiny_models.values():
        # transformers' grouped products of experts have no float64.
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, experts_implementation="eager"
        )
        token_ids = list(range(1, 40))
        with torch.no_grad():
            expected = model(torch.tensor([token_ids])).logits[0]
            ours = ReferenceQwen3(path).logits(token_ids)
        # transformers normalises and rotates in float32 whatever the dtype.
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
