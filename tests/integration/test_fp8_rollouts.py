"""FP8 in a real vLLM server, before and after new weights, against transformers with the weights
that `ops.fp8` makes of them.

On a CPU vLLM quantises weights alone and multiplies in bfloat16; a GPU's activations are in FP8
too.
"""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_stapo.ops.fp8 import dequantize_blocks, quantize_blocks
from megatron_stapo.rollout.pool import EnginePool
from megatron_stapo.rollout.vllm_engine import VllmEngine
from tests.integration.test_vllm_engine import (
    STOP_TOKEN_IDS,
    TEMPERATURE,
    VOCAB_SIZE,
    Server,
    generate,
)
from tests.single_trainer import SingleTrainer
from tests.workers import build_config

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Widths that the CPU's FP8 kernel takes, and multiples of 128 rows: vLLM fuses q, k and v, and
    gate and up, before it cuts blocks."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            initializer_range=0.1,
        )
    )
    model.bfloat16().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(model_path, tmp_path_factory):
    config = build_config(
        model_path,
        model__dtype="bfloat16",
        data__max_prompt_tokens=100,
        data__max_microbatch_tokens=1000,
        rollout__max_response_tokens=900,
        rollout__max_num_seqs=256,
        rollout__kv_cache_bytes=64 << 20,
        rollout__start_timeout_s=240,
        rollout__quantization="fp8",
    )
    server = Server(config, tmp_path_factory.mktemp("logs") / "server.log")
    engine = EnginePool(config, [VllmEngine(config, server.url, STOP_TOKEN_IDS)])
    yield engine, SingleTrainer(config)
    engine.close()
    server.close()


def perturb(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (w + 0.3 * w.std() * torch.randn(w.shape, generator=generator)).bfloat16()
        for name, w in weights.items()
    }


def round_trip(weights):
    """What the engine computes with: the linear layers' weights through FP8."""
    return {
        name: dequantize_blocks(*quantize_blocks(w), dtype=torch.bfloat16) if "proj" in name else w
        for name, w in weights.items()
    }


def measure_mean_gap(groups, model_path, weights):
    """Mean over tokens of the distance in nats to transformers' log-probabilities in float32."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    gaps = []
    for group in groups:
        prompt = group.prompt.token_ids
        for rollout in group.rollouts:
            with torch.no_grad():
                logits_TV = model(torch.tensor([prompt + rollout.token_ids])).logits[0]
            logprobs_TV = (logits_TV / TEMPERATURE).log_softmax(-1)[len(prompt) - 1 : -1]
            expected_T = logprobs_TV.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
            gaps.append((torch.tensor(rollout.rollout_logprobs) - expected_T).abs())
    return torch.cat(gaps).mean().item()


COMPARE = """
import torch
from vllm.utils.deep_gemm import per_block_cast_to_fp8
from megatron_stapo.rollout.fp8_weights import decode, encode
generator = torch.Generator().manual_seed(0)
for scale in (1e-5, 1e-4, 0.02, 10.0):
    weight = (torch.randn(700, 900, generator=generator) * scale).bfloat16()
    received = torch.empty_like(weight)
    decode(encode([weight]), [received])
    assert not torch.equal(received, weight)
    for found, expected in zip(per_block_cast_to_fp8(received), per_block_cast_to_fp8(weight)):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
print("equal")
"""


def test_vllm_quantises_what_arrives_as_it_would_have_what_was_sent():
    done = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True)
    assert done.stdout.endswith("equal\n"), done.stderr


@pytest.mark.parametrize("policy_version", [0, 1, 2])
def test_the_engine_samples_from_the_quantised_weights(engine, model_path, policy_version):
    engine, trainer = engine
    assert any(part.is_fp8 for module in trainer.parts[0] for part in module)
    weights = load_file(model_path / "model.safetensors")
    if policy_version:
        weights = perturb(weights, policy_version)
        engine.update_weights(trainer.update(weights, policy_version))
    groups = generate(engine)
    quantised = measure_mean_gap(groups, model_path, round_trip(weights))
    plain = measure_mean_gap(groups, model_path, weights)
    # 0.012 is bfloat16's part; the weights' FP8 adds 0.12 to what does not share it.
    assert quantised < 0.03
    assert plain > 5 * quantised
