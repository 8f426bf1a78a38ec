import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from megatron_stapo.rollout import compute_request_seed
from megatron_stapo.rollout.transformers_engine import TransformersEngine, draw_tokens, keep_top_p
from megatron_stapo.rollout.weight_transfer import Part, Region
from megatron_stapo.types import Prompt, Sampling
from tests.tiny_model import VOCAB_SIZE
from tests.workers import build_config

MAX_TOKENS = 12
TEMPERATURE = 0.7
SAMPLING = Sampling(temperature=TEMPERATURE, top_p=1.0, max_response_tokens=MAX_TOKENS)
STOP_TOKEN_IDS = [3, 50]


def build_engine(path, **changes):
    return TransformersEngine(build_config(path, **changes), STOP_TOKEN_IDS)


@pytest.fixture(scope="module")
def engine(tiny_models):
    return build_engine(tiny_models["untied"])


def build_prompts(lengths=(5, 1, 17)):
    return [
        Prompt(
            prompt_id=prompt_id,
            problem="",
            answer="",
            token_ids=[(11 * i + 5 * prompt_id) % VOCAB_SIZE for i in range(length)],
        )
        for prompt_id, length in enumerate(lengths)
    ]


def compute_logprobs(engine, token_ids):
    """[T, V] of one sequence, in one pass without cache or padding."""
    with torch.no_grad():
        logits = engine._model(torch.tensor([token_ids])).logits[0]
    return (logits / TEMPERATURE).log_softmax(-1)


def list_rollouts(groups):
    return [
        (group.prompt.prompt_id, i, rollout.token_ids, rollout.finish_reason)
        for group in groups
        for i, rollout in enumerate(group.rollouts)
    ]


def test_samples_are_those_of_a_pass_per_token(engine):
    for group in engine.generate(build_prompts(), 3, SAMPLING):
        seed = compute_request_seed(0, 0, group.prompt.prompt_id)
        for i, rollout in enumerate(group.rollouts):
            generator = torch.Generator().manual_seed(seed + i)
            token_ids = list(group.prompt.token_ids)
            response = []
            while len(response) < MAX_TOKENS and not set(response[-1:]) & set(STOP_TOKEN_IDS):
                probs = compute_logprobs(engine, token_ids)[-1].double().exp()
                threshold = torch.rand((), dtype=torch.float64, generator=generator) * probs.sum()
                response.append(int((probs.cumsum(-1) <= threshold).sum()))
                token_ids.append(response[-1])
            assert rollout.token_ids == response


def test_logprobs_are_those_of_a_full_pass(engine):
    for group in engine.generate(build_prompts(), 4, SAMPLING):
        prompt = group.prompt.token_ids
        for rollout in group.rollouts:
            logprobs_TV = compute_logprobs(engine, prompt + rollout.token_ids)[len(prompt) - 1 : -1]
            expected_T = logprobs_TV.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(rollout.rollout_logprobs), expected_T, rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("max_num_seqs", [1, 5, 256])
def test_samples_do_not_depend_on_the_batch(engine, tiny_models, max_num_seqs):
    expected = list_rollouts(engine.generate(build_prompts(), 4, SAMPLING))
    other = build_engine(
        tiny_models["untied"], rollout__engine="transformers", rollout__max_num_seqs=max_num_seqs
    )
    prompts = build_prompts()
    assert list_rollouts(other.generate(prompts, 4, SAMPLING)) == expected
    reverse = list_rollouts(other.generate(prompts[::-1], 4, SAMPLING))
    assert sorted(reverse) == sorted(expected)
    alone = list_rollouts(other.generate(prompts[1:2], 2, SAMPLING))
    assert alone == [row for row in expected if row[0] == 1 and row[1] < 2]


def test_a_response_ends_at_its_first_stop_token_or_at_the_limit(engine):
    groups = engine.generate(build_prompts(), 32, SAMPLING)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert len(rollout.token_ids) == len(rollout.rollout_logprobs)
        assert not set(rollout.token_ids[:-1]) & set(STOP_TOKEN_IDS)
        if rollout.finish_reason == "stop":
            assert rollout.token_ids[-1] in STOP_TOKEN_IDS
        else:
            assert len(rollout.token_ids) == MAX_TOKENS
            assert rollout.token_ids[-1] not in STOP_TOKEN_IDS


@pytest.mark.parametrize("max_num_seqs", [1, 5, 256])
def test_each_group_is_told_once_it_is_complete(tiny_models, max_num_seqs):
    engine = build_engine(
        tiny_models["untied"], rollout__engine="transformers", rollout__max_num_seqs=max_num_seqs
    )
    told = []
    groups = engine.generate(build_prompts(), 3, SAMPLING, lambda *item: told.append(item))
    assert [index for index, _ in told] == [0, 1, 2]
    assert all(group is groups[index] for index, group in told)


def test_top_p_keeps_the_likeliest_tokens_that_reach_it():
    logprobs_BV = torch.tensor([[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01]]).log()
    kept = keep_top_p(logprobs_BV, 0.7).exp()
    torch.testing.assert_close(kept, torch.tensor([[0, 2 / 3, 0, 1 / 3], [1.0, 0, 0, 0]]))
    # 0.5 + 0.25 reaches 0.75 exactly; a little more needs one more.
    assert (keep_top_p(logprobs_BV, 0.76)[0] > -torch.inf).tolist() == [False, True, True, True]
    assert torch.equal(keep_top_p(logprobs_BV, 1.0), logprobs_BV)


def test_top_p_bounds_what_is_sampled(engine):
    groups = engine.generate(build_prompts(), 8, replace(SAMPLING, top_p=0.5))
    for group in groups:
        prompt = group.prompt.token_ids
        for rollout in group.rollouts:
            logprobs_TV = compute_logprobs(engine, prompt + rollout.token_ids)[len(prompt) - 1 : -1]
            kept_TV = keep_top_p(logprobs_TV, 0.5)
            expected_T = kept_TV.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(rollout.rollout_logprobs), expected_T, rtol=0, atol=1e-5
            )


def test_drawn_tokens_follow_the_probabilities():
    logprobs_V = torch.tensor([0.5, 0.0, 0.2, 0.3]).log()
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = draw_tokens(logprobs_V.expand(1000, 4), uniforms)
    assert torch.bincount(drawn, minlength=4).tolist() == [500, 0, 200, 300]


@pytest.mark.parametrize("uniform", [0.0, math.nextafter(1.0, 0.0)])
def test_the_ends_of_the_interval_draw_a_token_that_can_occur(uniform):
    logprobs_BV = torch.tensor([[0.0, 0.4, 0.6, 0.0]]).log()
    drawn = draw_tokens(logprobs_BV, torch.tensor([uniform], dtype=torch.float64))
    assert drawn.item() in (1, 2)


def build_update(named_tensors, policy_version):
    """Whole tensors, lazily."""
    parts = (
        (Part(name, tuple(tensor.shape), Region.whole(tensor.shape)), tensor)
        for name, tensor in named_tensors
    )
    return SimpleNamespace(policy_version=policy_version, receive=lambda: parts)


@pytest.mark.parametrize("model", ["tied", "untied", "experts"])
def test_new_weights_are_sampled_from(tiny_models, tmp_path, model):
    engine = build_engine(tiny_models[model])
    before = list_rollouts(engine.generate(build_prompts(), 2, SAMPLING))
    weights = load_file(tiny_models[model] / "model.safetensors")
    engine.update_weights(build_update(((name, 1.1 * w) for name, w in weights.items()), 5))
    engine._model.save_pretrained(tmp_path)
    now = load_file(tmp_path / "model.safetensors")
    assert now.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(now[name], 1.1 * weight), name
    groups = engine.generate(build_prompts(), 2, SAMPLING)
    assert list_rollouts(groups) != before
    assert {rollout.policy_version for group in groups for rollout in group.rollouts} == {5}


def drop(weights):
    del weights["model.layers.2.mlp.up_proj.weight"]


def add(weights):
    weights["model.layers.4.mlp.up_proj.weight"] = weights["model.layers.3.mlp.up_proj.weight"]


def transpose(weights):
    weights["model.layers.2.mlp.up_proj.weight"] = weights["model.layers.2.mlp.up_proj.weight"].T


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"left out \['model.layers.2.mlp.up_proj.weight'\]"),
        (add, r"weight model.layers.4.mlp.up_proj.weight: .*no such tensor"),
        (transpose, r"weight model.layers.2.mlp.up_proj.weight: got shape \(48, 80\)"),
    ],
)
def test_an_update_that_is_not_the_model_is_refused(tiny_models, change, message):
    engine = build_engine(tiny_models["untied"])
    weights = load_file(tiny_models["untied"] / "model.safetensors")
    change(weights)
    with pytest.raises(RuntimeError, match=message):
        engine.update_weights(build_update(weights.items(), 1))


def test_an_update_with_a_repeated_tensor_is_refused(tiny_models):
    engine = build_engine(tiny_models["untied"])
    weights = list(load_file(tiny_models["untied"] / "model.safetensors").items())
    with pytest.raises(RuntimeError, match="or got it"):
        engine.update_weights(build_update([*weights, weights[0]], 1))
