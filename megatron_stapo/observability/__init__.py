"""What a run records while it trains, and what people see of it: live, at its end, as curves."""

from megatron_stapo.observability.run_log import RunLog

__all__ = ["RunLog"]
