"""The layouts that the trainer is held to the float64 reference in."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stapo.config import Config
from tests.workers import build_config

BALANCE_COEF = 0.05


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one mini-batch's work is cut."""

    model: str = "tied"
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    first: int | None = None
    last: int | None = None
    cp: int = 1
    dp: int = 1
    ep: int = 1
    recompute: str = "none"
    budget: int = 90
    """Tokens of a microbatch on one rank."""
    reverse: bool = False
    """Take the microbatches in reverse order."""

    def __str__(self) -> str:
        default = Layout()
        parts = [self.model]
        for name, value in vars(self).items():
            if name != "model" and value != getattr(default, name):
                parts.append(name if value is True else f"{name}={value}")
        return " ".join(parts)

    def build_config(self, path: Path, **changes: Any) -> Config:
        """A test's config in this layout; the reference's temperature."""
        if self.model == "experts":
            changes = {"algorithm__router_aux_loss_coef": BALANCE_COEF, **changes}
        return build_config(
            path,
            **{
                "parallel__tensor_model_parallel_size": self.tp,
                "parallel__sequence_parallel": self.sp,
                "parallel__pipeline_model_parallel_size": self.pp,
                "parallel__virtual_pipeline_model_parallel_size": self.vpp,
                "parallel__num_layers_in_first_pipeline_stage": self.first,
                "parallel__num_layers_in_last_pipeline_stage": self.last,
                "parallel__context_parallel_size": self.cp,
                "parallel__data_parallel_size": self.dp,
                "parallel__expert_model_parallel_size": self.ep,
                "parallel__recompute": self.recompute,
                "data__max_microbatch_tokens": self.budget,
                "rollout__temperature": 0.8,
                **changes,
            },
        )


SINGLE = Layout(budget=600)

LAYOUTS = [
    Layout(),
    Layout(budget=60),
    SINGLE,
    Layout(model="untied", reverse=True),
    Layout(recompute="full"),
    Layout(model="untied", recompute="selective"),
    Layout(tp=2),
    Layout(model="untied", tp=2, sp=True, budget=120),
    Layout(tp=2, sp=True, recompute="full"),
    Layout(model="untied", tp=4),
    Layout(tp=4, sp=True),
    Layout(pp=2),
    Layout(model="untied", pp=2, reverse=True),
    Layout(pp=4),
    Layout(pp=2, vpp=2),
    Layout(model="untied", pp=2, vpp=2, recompute="full"),
    Layout(pp=2, first=1),
    Layout(model="untied", pp=2, last=1, recompute="selective"),
    Layout(pp=3, first=2),
    Layout(dp=2),
    Layout(model="untied", dp=3, budget=60),
    Layout(dp=4, reverse=True),
    Layout(cp=2),
    Layout(model="untied", cp=2, budget=30),
    Layout(cp=4),
    Layout(cp=2, recompute="selective"),
    Layout(tp=2, sp=True, pp=2),
    Layout(model="untied", tp=2, pp=2, first=3),
    Layout(tp=2, sp=True, pp=2, vpp=2),
    Layout(tp=2, dp=2, budget=120),
    Layout(tp=2, cp=2),
    Layout(model="untied", tp=2, sp=True, cp=2, reverse=True),
    Layout(tp=2, sp=True, cp=2, recompute="full"),
    Layout(pp=2, dp=2, budget=600),
    Layout(model="untied", pp=2, vpp=2, dp=2),
    Layout(pp=2, cp=2, budget=45),
    Layout(model="untied", pp=2, vpp=2, cp=2),
    Layout(cp=2, dp=2),
    Layout(model="untied", cp=2, dp=2, budget=30, recompute="full"),
    Layout(model="experts"),
    Layout(model="experts", dp=2),
    Layout(model="experts", dp=2, ep=2, budget=60),
    Layout(model="experts", dp=4, ep=4),
    Layout(model="experts", cp=2, ep=2, recompute="full"),
    Layout(model="experts", tp=2, sp=True),
    Layout(model="experts", tp=2, sp=True, ep=2, reverse=True),
    Layout(model="experts", tp=2, sp=True, dp=2, ep=4),
    Layout(model="experts", tp=2, sp=True, cp=2, ep=2),
    Layout(model="experts", pp=2, dp=2, ep=2),
    Layout(model="experts", pp=2, vpp=2, tp=2, sp=True, ep=2),
    Layout(model="experts", cp=2, dp=2, ep=4, recompute="selective"),
]
