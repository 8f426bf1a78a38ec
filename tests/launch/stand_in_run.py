"""A run whose engine and trainer are small stand-ins; test_launch.py starts it as a process.

Arguments: the run folder, and what the trainer does: succeed, raise, wait, or save, which waits for
the wish to stop. Every stand-in leaves a file ready_NAME with its process id in the run folder once
it runs.
"""

import sys
from pathlib import Path

from megatron_stapo.config import Config, DataConfig, ModelConfig, ParallelConfig
from megatron_stapo.launch import Ending, Task, launch
from megatron_stapo.observability.summary import format_summary, write_summary

# As vLLM does, the engine has a child that outlives its parent and that no signal but SIGKILL ends.
ENGINE = """
import os, subprocess, sys, time
from pathlib import Path
core = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", core], start_new_session=True)
print("engine is up", flush=True)
Path(sys.argv[1], "ready_engine").write_text(str(os.getpid()))
time.sleep(600)
"""

TRAINER = """
import json, os, sys, time
from pathlib import Path
run_dir, what, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
while not (run_dir / "ready_engine").exists():
    time.sleep(0.05)
if rank == 0:
    with open(run_dir / "metrics.jsonl", "a") as file:
        metrics = {"num_response_tokens": 100, "num_masked": 2, "num_candidates": 3}
        for record in (
            {
                "event": "accuracy",
                "time": time.time(),
                "value": 0.25,
                "standard_error": None,
                "after_steps": 0,
                "benchmarks": {},
            },
            {"step": 1, "time": time.time(), "metrics": metrics, "seconds": {"rollout": 1.5}},
        ):
            file.write(json.dumps(record) + "\\n")
(run_dir / f"ready_{rank}").write_text(str(os.getpid()))
if what == "raise" and rank == 1:
    raise ArithmeticError("the stand-in fails")
while what == "save" and not (run_dir / "stop").exists():
    time.sleep(0.05)
if what == "save":
    (run_dir / f"saved_{rank}").touch()
elif what != "succeed":
    time.sleep(600)
"""


def main() -> int:
    run_dir, what = sys.argv[1:]
    config = Config(
        name="stand_in",
        num_steps=2,
        model=ModelConfig(path="unused"),
        parallel=ParallelConfig(device="cpu", data_parallel_size=2),
        data=DataConfig(source="unused"),
        run_dir=run_dir,
    )
    Path(run_dir).mkdir(exist_ok=True)
    tasks = [
        Task(
            name="engine",
            argv=[sys.executable, "-c", ENGINE, run_dir],
            env={},
            ends_run="never",
        ),
        Task(
            name="trainer",
            argv=[sys.executable, "-c", TRAINER, run_dir, what],
            env={"OMP_NUM_THREADS": "1"},
            num_ranks=config.parallel.world_size,
        ),
    ]

    def report(ending: Ending) -> str:
        return format_summary(
            write_summary(
                run_dir,
                status=ending.status,
                reason=ending.reason,
                num_steps=config.num_steps,
                total_s=ending.total_s,
            )
        )

    return launch(config, tasks, report, stop_timeout_s=60.0 if what == "save" else 0.0)


if __name__ == "__main__":
    sys.exit(main())
