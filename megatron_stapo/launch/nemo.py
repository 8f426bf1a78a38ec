"""NeMo-Run, imported without the warnings that packages it brings give at import."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import nemo_run
    from nemo_run.core.execution.base import Executor, import_executor
    from nemo_run.core.execution.docker import DockerContainer

__all__ = ["DockerContainer", "Executor", "import_executor", "nemo_run"]
