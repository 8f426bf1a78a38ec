"""Samples inside the trainer's rank 0 with transformers: for tests, and where vLLM has no build.

A sample draws from a random stream of its own, so that the batch it is in does not change it. The B
rows of a batch are prompts of unlike lengths, padded on the left.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM

from megatron_stapo.config import Config
from megatron_stapo.rollout import SamplingRequest, compute_request_seed
from megatron_stapo.rollout.weight_transfer import Checklist, WeightUpdate
from megatron_stapo.types import Prompt, Rollout, RolloutGroup, Sampling


class TransformersEngine:
    """A second copy of the model, on the trainer's device."""

    def __init__(
        self,
        config: Config,
        stop_token_ids: Sequence[int],
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Load model.path.

        Args:
            config: of the run.
            stop_token_ids: tokens that end a response.
            on_wait: see `Engine`.
        """
        self._config = config
        self._on_wait = on_wait
        self._device = torch.device(config.parallel.device)
        self._stop_token_ids = torch.tensor(stop_token_ids, device=self._device)
        self.policy_version = 0
        """See `Engine`."""
        self.is_serving = True
        """See `Engine`."""
        self._model = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=getattr(torch, config.model.dtype)
        )
        self._model.to(self._device).eval()

    def take_request(self) -> SamplingRequest | None:
        """See `Engine`."""
        return None

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_group: Callable[[int, RolloutGroup], None] | None = None,
    ) -> list[RolloutGroup]:
        """See `Engine`. At most rollout.max_num_seqs rows are sampled at a time."""
        rows = [
            (
                prompt.token_ids,
                compute_request_seed(self._config.seed, self.policy_version, prompt.prompt_id) + i,
            )
            for prompt in prompts
            for i in range(num_samples)
        ]
        rollouts: list[Rollout] = []
        groups: list[RolloutGroup] = []
        max_num_seqs = self._config.rollout.max_num_seqs
        for start in range(0, len(rows), max_num_seqs):
            rollouts += self._sample(rows[start : start + max_num_seqs], sampling)
            for index in range(len(groups), len(rollouts) // num_samples):
                own = rollouts[index * num_samples : (index + 1) * num_samples]
                groups.append(RolloutGroup(prompt=prompts[index], rollouts=own))
                if on_group is not None:
                    on_group(index, groups[index])
        return groups

    def list_stale(self, policy_version: int) -> list[int]:
        """See `Engine`."""
        return [] if policy_version == self.policy_version else [0]

    def update_weights(self, update: WeightUpdate, engine_index: int = 0) -> None:
        """See `Engine`."""
        # A tied head is no parameter of its own here.
        matrices = {
            name: matrix
            for parameter_name, parameter in self._model.named_parameters()
            for name, matrix in split_experts(parameter_name, parameter.detach()).items()
        }
        checklist = Checklist({name: matrix.shape for name, matrix in matrices.items()})
        for part, tensor in update.receive():
            checklist.take(part.name, tensor.shape)
            matrices[part.name].copy_(tensor)
        checklist.check_complete()
        self.policy_version = update.policy_version

    def close(self) -> None:
        """Nothing is held outside the process."""

    @torch.no_grad()
    def _sample(self, rows: list[tuple[list[int], int]], sampling: Sampling) -> list[Rollout]:
        """Sample one response per (prompt, seed) until every row has ended."""
        num_prompt_tokens = max(len(prompt) for prompt, _ in rows)
        padding = [num_prompt_tokens - len(prompt) for prompt, _ in rows]
        token_ids = torch.tensor(
            [[0] * pad + prompt for pad, (prompt, _) in zip(padding, rows, strict=True)],
            device=self._device,
        )
        attention_mask = torch.tensor(
            [[0] * pad + [1] * (num_prompt_tokens - pad) for pad in padding], device=self._device
        )
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        uniforms = torch.stack(
            [
                torch.rand(
                    sampling.max_response_tokens,
                    dtype=torch.float64,
                    generator=torch.Generator().manual_seed(seed),
                )
                for _, seed in rows
            ]
        ).to(self._device)
        is_open_B = torch.ones(len(rows), dtype=torch.bool, device=self._device)
        cache = None
        steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        while is_open_B.any() and len(steps) < sampling.max_response_tokens:
            self._on_wait()
            output = self._model(
                input_ids=token_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            logits_BV = output.logits[:, -1].float() / sampling.temperature
            logprobs_BV = keep_top_p(logits_BV.log_softmax(-1), sampling.top_p)
            sampled_B = draw_tokens(logprobs_BV, uniforms[:, len(steps)])
            steps.append((sampled_B, logprobs_BV.gather(-1, sampled_B[:, None])[:, 0]))
            is_open_B &= ~torch.isin(sampled_B, self._stop_token_ids)
            token_ids = sampled_B[:, None]
            attention_mask = torch.cat([attention_mask, torch.ones_like(token_ids)], dim=1)
            position_ids = position_ids[:, -1:] + 1
        sampled, logprobs = (torch.stack(stream, dim=1) for stream in zip(*steps, strict=True))
        is_stop = torch.isin(sampled, self._stop_token_ids)
        return [
            self._cut(*row) for row in zip(sampled.tolist(), logprobs.tolist(), is_stop.tolist())
        ]

    def _cut(self, token_ids: list[int], logprobs: list[float], is_stop: list[bool]) -> Rollout:
        """Drop what was sampled after a row's first stop token, while others went on."""
        length = is_stop.index(True) + 1 if any(is_stop) else len(token_ids)
        return Rollout(
            token_ids=token_ids[:length],
            rollout_logprobs=logprobs[:length],
            finish_reason="stop" if any(is_stop) else "length",
            policy_version=self.policy_version,
        )


def split_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name by a Hugging Face folder's names what transformers holds under one.

    Args:
        name: of a parameter of a transformers model, which has all experts of a layer in two.
        tensor: of the parameter's shape.

    Returns:
        Views of the tensor: a matrix per expert and projection, or the tensor under its own name.

    Source: transformers 5.19, models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeExperts.
    """
    layer, separator, matrix = name.partition(".mlp.experts.")
    if not separator:
        return {name: tensor}
    parts = {}
    for number, expert in enumerate(tensor):
        prefix = f"{layer}.mlp.experts.{number}"
        halves = expert.chunk(2) if matrix == "gate_up_proj" else [expert]
        names = ["gate_proj", "up_proj"] if matrix == "gate_up_proj" else [matrix]
        parts |= {f"{prefix}.{n}.weight": half for n, half in zip(names, halves, strict=True)}
    return parts


def keep_top_p(logprobs_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the likeliest tokens whose probabilities reach top_p, at least one, and normalize.

    Args:
        logprobs_BV: [B, V] fp32, nats, normalized.
        top_p: in (0, 1]; 1 keeps all.

    Returns:
        [B, V] fp32, nats; -inf where a token is dropped.
    """
    if top_p == 1:
        return logprobs_BV
    sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
    probs_BV = sorted_BV.exp()
    # Dropped are those that begin where the likelier ones have reached top_p already.
    dropped_BV = probs_BV.cumsum(-1) - probs_BV >= top_p
    dropped_BV[:, 0] = False
    kept_BV = logprobs_BV.masked_fill(
        torch.zeros_like(dropped_BV).scatter(-1, order_BV, dropped_BV), -torch.inf
    )
    return kept_BV.log_softmax(-1)


def draw_tokens(logprobs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Sample by inverting the cumulative distribution.

    Args:
        logprobs_BV: [B, V] fp32, nats, normalized.
        uniform_B: [B] fp64 in [0, 1).

    Returns:
        [B] int64. The first token at which the cumulative probability, summed in fp64 in the order
        of the ids, exceeds the uniform number.
    """
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    # The sum of all is 1 only nearly.
    threshold_B = uniform_B * cumulative_BV[:, -1]
    return torch.searchsorted(cumulative_BV, threshold_B[:, None], right=True)[:, 0]
