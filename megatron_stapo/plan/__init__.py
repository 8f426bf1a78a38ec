"""What a run will need and how long a step will take, before anything is started.

Formulas alone: no GPU, cluster, model folder or data set, and no torch. `docs/plan.md` has the
formulas, their efficiencies and how far they are from published figures.
"""

from megatron_stapo.plan.plan import Plan, build_plan, format_plan

__all__ = ["Plan", "build_plan", "format_plan"]
