"""The small problem that a layout is verified on: the recipe's model cut to a few layers, random
rollouts, the recipe's layout and algorithm."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_stapo.algo.advantage import compute_group_advantages
from megatron_stapo.algo.token_mask import compute_uniforms
from megatron_stapo.config import Config, load_model_json
from megatron_stapo.model.hf_folder import find_tensor_files, read_tensor
from megatron_stapo.model.weights import build_weight_table
from megatron_stapo.types import Minibatch, Prompt, Rollout, RolloutGroup
from megatron_stapo.verify.reduce import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS


def write_reduced_model(source: str, out: Path, num_layers: int) -> None:
    """Write the first layers of a Hugging Face model as a folder of its own, in float32."""
    model_json = json.loads((Path(source) / "config.json").read_text())
    model_json["num_hidden_layers"] = num_layers
    if "layer_types" in model_json:
        model_json["layer_types"] = model_json["layer_types"][:num_layers]
    model_json["dtype"] = "float32"
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(model_json, indent=2))
    files = find_tensor_files(source)
    tensors = {
        name: read_tensor(files, source, name, shape).float()
        for pair in build_weight_table(load_model_json(str(out)))
        for name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True)
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for file in Path(source).glob("generation_config.json"):
        shutil.copyfile(file, out / file.name)


def build_rollouts(config: Config, vocab_size: int) -> list[RolloutGroup]:
    """Draw sequences of random tokens and unlike lengths; one response is empty."""
    generator = torch.Generator().manual_seed(config.seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    groups = []
    for prompt_id in range(config.rollout.num_prompts_per_step):
        rewards = torch.tensor([float(i % 2) for i in range(config.rollout.group_size)])
        if prompt_id == 1:
            rewards[:] = 1.0  # a group without advantage: tokens that count and pull nothing
        advantages = compute_group_advantages(
            rewards, divide_by_std=config.algorithm.advantage == "group_std"
        )
        rollouts = []
        for sample, advantage in enumerate(advantages.tolist()):
            length = 0 if prompt_id == sample == 1 else draw(1, MAX_RESPONSE_TOKENS + 1)
            rollouts.append(
                Rollout(
                    token_ids=[draw(0, vocab_size) for _ in range(length)],
                    rollout_logprobs=[0.0] * length,
                    finish_reason="stop",
                    policy_version=0,
                    advantage=advantage,
                )
            )
        tokens = [draw(0, vocab_size) for _ in range(draw(1, MAX_PROMPT_TOKENS + 1))]
        prompt = Prompt(prompt_id=prompt_id, problem="", answer="", token_ids=tokens)
        groups.append(RolloutGroup(prompt=prompt, rollouts=rollouts))
    return groups


def perturb(minibatch: Minibatch) -> None:
    """Move what the update compares with, as if the policy had moved since, by up to 0.4 nats.

    The noise is a function of sequence and position, so that it is the same in every layout.

    Mutates: old_logprobs_T, rollout_logprobs_T and, where set, ref_logprobs_T.
    """
    for m in minibatch.microbatches:
        exact_T = m.old_logprobs_T
        for number, name in enumerate(("old_logprobs_T", "rollout_logprobs_T", "ref_logprobs_T")):
            if hasattr(m, name):
                noise_T = compute_uniforms(1, number, m.sequence_ids_T, m.position_ids_T) - 0.5
                setattr(m, name, exact_T + 0.8 * noise_T)
