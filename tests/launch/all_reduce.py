"""What every trainer rank of a stand-in run on several hosts does: one all-reduce over gloo.

Arguments as `megatron_stapo.train` takes them. The run's name says what follows: succeed, raise
(on rank 1), lose_engine (a step, then the wish to stop is waited for) or wait. Every rank leaves
ready_RANK, with what it has seen, in the run folder.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist


def main() -> None:
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    what = json.loads((run_dir / "config.json").read_text())["name"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    value = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(value)
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    addresses = [entry.address for entry in psutil.net_if_addrs()[interface]]
    seen = {"sum": int(value), "host": int(os.environ["GROUP_RANK"]), "addresses": addresses}
    path = run_dir / f"ready_{dist.get_rank()}"
    path.with_suffix(".tmp").write_text(json.dumps(seen))
    path.with_suffix(".tmp").rename(path)
    if what == "raise" and dist.get_rank() == 1:
        raise ArithmeticError("the stand-in fails")
    if what == "lose_engine":
        if dist.get_rank() == 0:
            record = {"step": 1, "time": time.time(), "metrics": {}, "seconds": {}}
            (run_dir / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        while not (run_dir / "stop").exists():
            time.sleep(0.05)
        dist.barrier()  # as the ranks do when they save
        (run_dir / f"saved_{dist.get_rank()}").touch()
    elif what != "succeed":
        time.sleep(600)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
