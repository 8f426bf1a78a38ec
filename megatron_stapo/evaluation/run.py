"""Entry point of the process that evaluates a model: `python -m megatron_stapo.evaluation.run
--run-dir DIR [--engine-url URL ...]`. The launcher starts it beside the engines.

The run folder lies in the evaluation's folder, which holds the samples and the results.
"""

import argparse
import json
import time
from pathlib import Path

from megatron_stapo import config as config_module
from megatron_stapo.data.prompts import load_stop_token_ids, load_tokenizer
from megatron_stapo.evaluation.evaluate import evaluate_into, load_benchmarks
from megatron_stapo.observability import RunLog
from megatron_stapo.rewards.judge import Judge
from megatron_stapo.rollout.connect import build_engine

_PROGRESS_INTERVAL_S = 10.0


def main() -> None:
    """Evaluate the model of the run folder's config."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--engine-url", action="append", default=[], dest="engine_urls")
    arguments = parser.parse_args()
    config = config_module.from_dict(json.loads((arguments.run_dir / "config.json").read_text()))
    folder = arguments.run_dir.parent
    run_log = RunLog(arguments.run_dir)
    benchmarks = load_benchmarks(config)
    judge = Judge(config.reward, folder)
    run_log.log_event("waiting_for_engine")
    engine = build_engine(
        config,
        arguments.engine_urls,
        load_stop_token_ids(config.model.path),
        log_event=run_log.log_event,
    )
    run_log.log_event("engine_ready")
    last_s = 0.0

    def show(num_done: int, num_all: int) -> None:
        nonlocal last_s
        if num_done == num_all or time.monotonic() > last_s + _PROGRESS_INTERVAL_S:
            last_s = time.monotonic()
            run_log.log_event("evaluating", value=f"{num_done} of {num_all} samples")

    evaluate_into(
        folder,
        config,
        benchmarks,
        engine=engine,
        judge=judge,
        tokenizer=load_tokenizer(config.model.path),
        on_progress=show,
    )
    judge.close()
    engine.close()
    run_log.close()


if __name__ == "__main__":
    main()
