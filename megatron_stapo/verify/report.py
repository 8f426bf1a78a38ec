"""Compares what the ranks computed with the dense step, number by number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_stapo.verify.dense import DenseStep
from megatron_stapo.verify.snapshot import TokenSnapshot

TOLERANCE = 1e-4
"""Of every number but the masks, which must be identical: float32 round-off through a few layers
stays ten times below it, and a wrong factor is a hundred times above."""


@dataclass(kw_only=True)
class RankResult:
    """One rank's numbers of the update."""

    name: str
    """Rank and coordinates."""
    tokens: TokenSnapshot | None
    """None before the last pipeline stage."""
    loss: float
    grad_norm: float
    weight_digests: dict[str, str]
    """Of every parameter that the rank holds whole or in part, after the update."""


@dataclass(kw_only=True)
class Row:
    """A line of the table."""

    quantity: str
    difference: float
    """The worst; its unit is named with the quantity."""
    tolerance: float
    where: str
    """What it was seen at."""

    @property
    def passed(self) -> bool:
        """False for NaN, too."""
        return self.difference <= self.tolerance


def compare(
    ranks: Sequence[RankResult],
    gradients: dict[str, torch.Tensor],
    dense: DenseStep,
    tp_size: int,
) -> list[Row]:
    """Compare every rank's numbers with the dense step's.

    Args:
        gradients: gathered from all ranks, after clipping.
        tp_size: ranks that hold each token.
    """
    rows = _compare_tokens(ranks, dense.tokens, tp_size)
    is_vacuous = not dense.tokens.loss_mask_N.any()
    rows.append(
        Row(
            quantity="nothing trains (1: the masks leave no token)",
            difference=float(is_vacuous),
            tolerance=0.0,
            where="",
        )
    )
    for name, expected, scale in (
        ("loss", dense.loss, max(abs(dense.loss), 1.0)),
        ("grad_norm", dense.grad_norm, max(dense.grad_norm, 1e-12)),
    ):
        errors = [(abs(getattr(rank, name) - expected) / scale, rank.name) for rank in ranks]
        label = "loss" if name == "loss" else "gradient norm, before clipping (relative)"
        rows.append(_worst_row(label, errors))
    clipped_norm = math.sqrt(sum(float(g.square().sum()) for g in dense.gradients.values()))
    errors = []
    assert gradients.keys() == dense.gradients.keys()
    for name, gradient in dense.gradients.items():
        difference = (gradients[name].double() - gradient).abs().max()
        errors.append((float(difference) / max(clipped_norm, 1e-12), name))
    rows.append(_worst_row("gradients, after clipping (largest entry / norm)", errors))
    rows.append(_compare_replicas(ranks))
    return rows


def _compare_tokens(
    ranks: Sequence[RankResult], expected: TokenSnapshot, tp_size: int
) -> list[Row]:
    index = {tuple(key): i for i, key in enumerate(expected.keys_N2.tolist())}
    last_stage = [(rank, rank.tokens) for rank in ranks if rank.tokens is not None]
    errors: dict[str, list[tuple[float, str]]] = {"log-probability": [], "entropy": [], "mask": []}
    times_seen = torch.zeros(len(index))
    for rank, tokens in last_stage:
        order = [index[tuple(key)] for key in tokens.keys_N2.tolist()]
        times_seen += torch.bincount(torch.tensor(order, dtype=torch.int64), minlength=len(index))
        if not order:
            continue
        for what, ours, theirs in (
            ("log-probability", tokens.logprobs_N, expected.logprobs_N),
            ("entropy", tokens.entropy_N, expected.entropy_N),
        ):
            difference = (ours.double() - theirs[order].double()).abs()
            at = int(difference.nan_to_num(math.inf).argmax())
            sequence, position = tokens.keys_N2[at].tolist()
            where = f"{rank.name}, sequence {sequence}, position {position}"
            errors[what].append((float(difference[at]), where))
        differing = int((tokens.loss_mask_N != expected.loss_mask_N[order]).sum())
        errors["mask"].append((float(differing), rank.name))
    # Each token is on every tensor-parallel rank of one cell.
    uneven = int((times_seen != tp_size).sum())
    return [
        Row(
            quantity="tokens missing or doubled (number)",
            difference=float(uneven),
            tolerance=0.0,
            where=f"of {len(index)}",
        ),
        _worst_row("log-probability (nats)", errors["log-probability"]),
        _worst_row("entropy (nats)", errors["entropy"]),
        _worst_row("loss mask (tokens that differ)", errors["mask"], tolerance=0.0),
    ]


def _compare_replicas(ranks: Sequence[RankResult]) -> Row:
    """Ranks that hold the same part of a parameter hold the same bits."""
    digests: dict[str, str] = {}
    differing = []
    for rank in ranks:
        for part, digest in rank.weight_digests.items():
            if digests.setdefault(part, digest) != digest:
                differing.append(f"{rank.name}, {part}")
    return Row(
        quantity="weights of replicas, after the update (parts that differ)",
        difference=float(len(differing)),
        tolerance=0.0,
        where=differing[0] if differing else "",
    )


def _worst_row(
    quantity: str, errors: Sequence[tuple[float, str]], tolerance: float = TOLERANCE
) -> Row:
    worst, where = max(errors, key=lambda error: math.inf if math.isnan(error[0]) else error[0])
    return Row(quantity=quantity, difference=worst, tolerance=tolerance, where=where)
