"""Which tokens are silenced: S2T and its relatives, one rule each.

A rule says which tokens may be silenced (its gate), by what number they are compared (its key), and
over which tokens the threshold of that number is the q-quantile (its population). A token of the
gate is silenced iff its key is strictly below the threshold. In the trainer's order:

    check_finite(...)                                           log-probabilities and entropies
    gate_T = select_tokens(rule.gate, ...)
    keys_T = compute_keys(rule.key, entropy_T, uniforms_T)
    population_T = select_tokens(rule.population, ...)
    threshold = compute_quantile(keys_T[population_T], q, group)    over the mini-batch, all ranks
    token_mask_T = compute_token_mask(gate_T, keys_T, threshold)
"""

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_stapo.algo.s2t import check_shapes, select_candidates

Tokens = Literal["candidates", "responses"]
"""candidates: rare tokens of responses with positive advantage. responses: every sampled token."""
Key = Literal["entropy", "negative_entropy", "random"]


@dataclass(frozen=True)
class TokenMaskRule:
    """What a mask compares."""

    gate: Tokens
    """The tokens that may be silenced."""
    population: Tokens
    """The tokens whose q-quantile is the threshold."""
    key: Key
    """The number that is compared; the lower is silenced first."""


TOKEN_MASK_RULES: dict[str, TokenMaskRule] = {
    "s2t": TokenMaskRule("candidates", "candidates", "entropy"),
    "s2t_v1": TokenMaskRule("candidates", "responses", "entropy"),
    "rare": TokenMaskRule("candidates", "candidates", "entropy"),
    "high_entropy": TokenMaskRule("candidates", "candidates", "negative_entropy"),
    "random": TokenMaskRule("candidates", "candidates", "random"),
    "top_entropy": TokenMaskRule("responses", "responses", "entropy"),
}
"""By the name that `config.AlgorithmConfig.token_mask` gives, except "none".

s2t: STAPO, arXiv:2602.15620 v5. s2t_v1: its first version. rare: its ablation JustRL-FullMask,
every candidate; the threshold is +inf in place of the quantile. high_entropy, random: its ablations
of masking strategies, as many candidates as s2t silences. top_entropy: arXiv:2506.01939, where
q = 0.8 keeps a fifth of the tokens.
"""


def select_tokens(
    which: Tokens,
    logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    response_mask_T: torch.Tensor,
    prob_threshold: float,
) -> torch.Tensor:
    """Mark a rule's gate or its population.

    Args:
        which: the gate or the population of a `TokenMaskRule`.
        logprobs_T: [T] fp32, nats. Of the current policy.
        advantages_T: [T] fp32. Constant within a response.
        response_mask_T: [T] bool. True on tokens that the policy sampled.
        prob_threshold: tau_p; a candidate's probability is strictly below it.

    Returns:
        [T] bool; never True outside responses.

    Raises:
        ValueError: the streams have different shapes.
    """
    candidate_mask_T = select_candidates(logprobs_T, advantages_T, response_mask_T, prob_threshold)
    return candidate_mask_T if which == "candidates" else response_mask_T


def compute_keys(key: Key, entropy_T: torch.Tensor, uniforms_T: torch.Tensor) -> torch.Tensor:
    """The number by which a rule compares tokens.

    Args:
        key: of a `TokenMaskRule`.
        entropy_T: [T] fp32, nats.
        uniforms_T: [T] fp32, from `compute_uniforms`.

    Returns:
        [T] fp32.

    Raises:
        ValueError: the streams have different shapes.
    """
    check_shapes(entropy_T, uniforms_T)
    return {"entropy": entropy_T, "negative_entropy": -entropy_T, "random": uniforms_T}[key]


def compute_token_mask(
    gate_T: torch.Tensor, keys_T: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Mark the tokens that a rule keeps.

    Args:
        gate_T: [T] bool, from `select_tokens`.
        keys_T: [T] fp32, from `compute_keys`.
        threshold: in the keys' unit, float64. Strict: a token at the threshold is kept. -inf, the
            quantile of nothing, keeps every token; +inf silences the whole gate.

    Returns:
        [T] bool. False on the silenced tokens alone; padding and prompts are True here.

    Raises:
        ValueError: the streams have different shapes.
    """
    check_shapes(gate_T, keys_T)
    # float64, since an interpolated threshold lies between two float32 keys.
    return ~(gate_T & (keys_T.double() < threshold))


def check_finite(
    name: str,
    values_T: torch.Tensor,
    mask_T: torch.Tensor,
    sequence_ids_T: torch.Tensor,
    position_ids_T: torch.Tensor,
) -> None:
    """Refuse a stream with NaN or infinity: compared with a threshold, NaN would pass in silence.

    Args:
        name: what the values are, for the message.
        values_T: [T] fp32.
        mask_T: [T] bool. Tokens that are looked at.
        sequence_ids_T: [T] int64.
        position_ids_T: [T] int64. Within the sequence.

    Raises:
        ValueError: names the first tokens. Raised on the rank that holds them; the caller sees to
            it that the other ranks stop too.
    """
    check_shapes(values_T, mask_T, sequence_ids_T, position_ids_T)
    broken_T = mask_T & ~values_T.isfinite()
    if not broken_T.any():
        return
    columns = (values_T, sequence_ids_T, position_ids_T)
    first = zip(*(column[broken_T][:3].tolist() for column in columns), strict=True)
    tokens = "; ".join(
        f"{value} at sequence {sequence}, position {position}"
        for value, sequence, position in first
    )
    raise ValueError(
        f"{name} of {int(broken_T.sum())} tokens is not finite: {tokens}. The model's logits have "
        "overflowed; lower optimizer.lr."
    )


def compute_uniforms(
    seed: int, update: int, sequence_ids_T: torch.Tensor, position_ids_T: torch.Tensor
) -> torch.Tensor:
    """Draw one number per token from the token's coordinates alone, whatever its place in a pack.

    Args:
        seed: of the run.
        update: optimizer updates before this one.
        sequence_ids_T: [T] int64. Of the sequence within the mini-batch.
        position_ids_T: [T] int64. Within the sequence.

    Returns:
        [T] fp32, uniform over the multiples of 2^-24 in [0, 1); the same for the same coordinates.

    Raises:
        ValueError: the streams have different shapes.

    Source: a chain of splitmix64, Steele et al., OOPSLA 2014: each coordinate n replaces the state
        by the n-th output of the generator that starts there.
    """
    check_shapes(sequence_ids_T, position_ids_T)
    state = torch.zeros((), dtype=torch.int64, device=sequence_ids_T.device)
    gamma = state.new_tensor(_GOLDEN_GAMMA)  # a tensor, so that every product wraps around
    for coordinate in (seed, update, sequence_ids_T, position_ids_T):
        state = _mix(state + (coordinate + 1) * gamma)
    return _shift_right(state, 40).float() * 2**-24


def _as_int64(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


_GOLDEN_GAMMA = _as_int64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _as_int64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _as_int64(0x94D049BB133111EB)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64. Products of int64 tensors wrap around modulo 2^64."""
    z = (z ^ _shift_right(z, 30)) * _MULTIPLIER_1
    z = (z ^ _shift_right(z, 27)) * _MULTIPLIER_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift as unsigned: torch's own shift repeats the sign bit."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
