"""From a config to processes: what a run starts, who watches it, and how it ends."""

from megatron_stapo.launch.supervisor import Ending, launch
from megatron_stapo.launch.tasks import Task, build_tasks

__all__ = ["Ending", "Task", "build_tasks", "launch"]
