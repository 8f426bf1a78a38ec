"""Routes tokens to experts, and balances the experts' load over the whole mini-batch.

Megatron's load-balancing losses are products of two means over a microbatch, so their gradient
depends on how the mini-batch is cut. Here the load is counted over all tokens of the mini-batch in
a pass before the update, as Qwen3 was trained; what is left is linear in the tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from megatron_stapo.parallel.groups import Groups


class BalancedRouter(TopKRouter):
    """Megatron's softmax router with a load-balancing loss of ours.

    The loss of a layer is E sum_e f_e P_e: f_e the share of the mini-batch's assignments that went
    to expert e, a number; P_e the mean over its tokens of the router's probability of e. It is at
    least 1 where both agree, and 1 where all experts are used alike.

    Source: Switch Transformer, arXiv:2101.03961, equation 4; counted over the global batch:
    arXiv:2501.11873; Qwen3, arXiv:2505.09388, section 2.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts_E: torch.Tensor | None = None
        """[E] float64 while a pass counts assignments."""
        self.loss_weights_E: torch.Tensor | None = None
        """[E] fp32: what a token's probability of expert e adds to the summed loss; None adds
        nothing."""

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose each token's experts.

        Args:
            logits: [T, 1, E] fp32.
            padding_mask: [T, 1] bool, True on padding, which adds nothing to load and loss.

        Returns:
            Probabilities and map, both [T, E].
        """
        assert padding_mask is not None
        probs, routing_map = super().routing(logits)
        real_T = ~padding_mask.reshape(-1)
        if self.counts_E is not None:
            self.counts_E += routing_map[real_T].sum(0)
        if self.loss_weights_E is not None and torch.is_grad_enabled():
            scores = logits.view(-1, logits.shape[-1]).softmax(-1, dtype=torch.float32)
            loss = (scores * self.loss_weights_E)[real_T].sum()
            probs = MoEAuxLossAutoScaler.apply(probs, loss)
        return probs, routing_map


def release_graph(chunks: Sequence[torch.nn.Module]) -> None:
    """Let go of the autograd graph of the last microbatch.

    Megatron's dispatcher keeps the probabilities that it dispatched by, and so their graph, whose
    hooks hold the model: a cycle that Python's collector does not see.
    """
    for module in (m for chunk in chunks for m in chunk.modules()):
        if isinstance(module, MoELayer):
            module.token_dispatcher.probs = None


class RouterBalance:
    """The routers of this rank's layers, and the load of a mini-batch."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], coefficient: float, groups: Groups
    ) -> None:
        """Args: coefficient of the loss; layers add up."""
        self._routers = [m for c in chunks for m in c.modules() if isinstance(m, BalancedRouter)]
        self._coefficient = coefficient if self._routers else 0.0
        self._groups = groups

    @property
    def is_on(self) -> bool:
        """Whether there is a load-balancing loss."""
        return self._coefficient > 0

    def start_counting(self) -> None:
        """Count the assignments of the passes that follow."""
        for router in self._routers:
            router.counts_E = torch.zeros(
                router.config.num_moe_experts, dtype=torch.float64, device=self._groups.device
            )

    def stop_counting(self) -> torch.Tensor | None:
        """Return the assignments of all ranks by layer of this stage, [L, E] float64.

        Communicates: an all-reduce of L x E doubles over stage_group.
        """
        if not self._routers:
            return None
        counts_LE = torch.stack([router.counts_E for router in self._routers])
        for router in self._routers:
            router.counts_E = None
        dist.all_reduce(counts_LE, group=self._groups.stage_group)
        return counts_LE

    def set_load(self, counts_LE: torch.Tensor | None, num_trained: int) -> None:
        """Switch the loss on for the update that follows.

        Args:
            counts_LE: of the mini-batch, from `stop_counting`; None switches the loss off.
            num_trained: tokens in the denominator of the policy loss. Megatron divides every
                gradient by it, so the loss is multiplied by it.
        """
        if counts_LE is None:
            for router in self._routers:
                router.loss_weights_E = None
            return
        for router, counts_E in zip(self._routers, counts_LE, strict=True):
            load_E = counts_E / counts_E.sum()
            num_tokens = counts_E.sum() / router.topk
            scale = self._coefficient * len(load_E) * num_trained / num_tokens
            router.loss_weights_E = (load_E * scale).float()
