"""A dump gives a run's numbers again; an update that is not finite is left out, and says why."""

import hashlib
import json

import pytest

from megatron_stapo.algorithms import ALGORITHMS
from megatron_stapo.checkpoint.dump import name_dump
from tests.layouts import Layout
from tests.tiny_model import VOCAB_SIZE
from tests.workers import build_config, build_groups, run_command, run_dumped_step

pytestmark = pytest.mark.distributed


def run(rank_pool, tiny_models, layout, folder, poisoned_rank=None, **algorithm):
    changes = {f"algorithm__{name}": value for name, value in algorithm.items()}
    config = layout.build_config(tiny_models[layout.model], **changes)
    groups = build_groups(config, VOCAB_SIZE)
    return rank_pool.run(
        run_dumped_step, config.parallel.world_size, config, groups, folder, poisoned_rank
    )


def replay(rank_pool, folder, number):
    return rank_pool.run(run_command, 1, "replay", str(name_dump(folder, 1, number)))[0]


@pytest.mark.parametrize(
    ("layout", "algorithm"),
    [
        (Layout(), "stapo"),
        (Layout(tp=2, dp=2), "stapo"),
        (Layout(cp=2, pp=2), "gspo"),
        (Layout(dp=2), "clip_cov"),
        (Layout(), "lopti"),
        (Layout(dp=2), "grpo"),
    ],
    ids=str,
)
def test_a_dump_gives_the_recorded_numbers(rank_pool, tiny_models, tmp_path, layout, algorithm):
    settings = vars(ALGORITHMS[algorithm](num_prompts_per_minibatch=2))
    if algorithm == "stapo":
        settings |= {"prob_threshold": 0.05}
    [result, *_] = run(rank_pool, tiny_models, layout, tmp_path, **settings)
    for number, update in enumerate(result["updates"], start=1):
        code, out, _ = replay(rank_pool, tmp_path, number)
        assert code == 0, out
        assert f"recorded {update['loss']:.12g}" in out
        assert "0 masks differ" in out
    if algorithm == "stapo":
        assert "candidates, masked    0, 0" not in out


def test_a_changed_dump_does_not_pass(rank_pool, tiny_models, tmp_path):
    from safetensors.torch import load_file, save_file

    run(rank_pool, tiny_models, Layout(dp=2), tmp_path)
    file = name_dump(tmp_path, 1, 1) / "rank_1.safetensors"
    tensors = load_file(file)
    tensors["0/trained_logprobs_T"] -= 0.01
    save_file(tensors, file)
    record = file.with_name("update.json")
    values = json.loads(record.read_text())
    values["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    record.write_text(json.dumps(values))
    code, out, _ = replay(rank_pool, tmp_path, 1)
    assert code == 1 and "does NOT give" in out
    file.unlink()
    code, _, err = replay(rank_pool, tmp_path, 1)
    assert code == 2 and f"dump {file}: cannot be read (No such file" in err


@pytest.mark.parametrize(("layout", "rank"), [(Layout(tp=2, dp=2), 2), (Layout(pp=2, dp=2), 3)])
def test_an_update_that_is_not_finite_is_left_out_by_every_rank(
    rank_pool, tiny_models, tmp_path, layout, rank
):
    """Both ranks of the tensor-parallel pair have the token; one is poisoned."""
    results = run(rank_pool, tiny_models, layout, tmp_path, poisoned_rank=rank)
    for result in results:
        assert [update["is_skipped"] for update in result["updates"]] == [False, True]
        assert result["unchanged"][1]
        assert result["num_updates"] == 1
    assert not all(result["unchanged"][0] for result in results)
    code, out, _ = replay(rank_pool, tmp_path, 2)
    assert "this update was left out" in out
    if layout.pp == 2:  # there the poisoned rank is one that reports tokens
        assert code == 0, out
        assert "tokens without a finite loss: 1" in out
        assert "advantage nan" in out


def test_a_folder_that_is_no_dump_is_refused(rank_pool, tmp_path):
    [(code, _, err)] = rank_pool.run(run_command, 1, "replay", str(tmp_path))
    assert code == 2 and "give a folder such as" in err


def test_what_is_wrong_with_a_dump_is_named(rank_pool, tiny_models, tmp_path):
    run(rank_pool, tiny_models, Layout(), tmp_path)
    [(code, _, err)] = rank_pool.run(run_command, 1, "replay", str(tmp_path))
    assert code == 2 and f"give one of {name_dump(tmp_path, 1, 1)}, " in err
    tensors, record = (
        name_dump(tmp_path, 1, 1) / name for name in ("rank_0.safetensors", "update.json")
    )
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, _, err = replay(rank_pool, tmp_path, 1)
    assert code == 2 and f"dump {tensors}: is not what the run wrote" in err
    tensors.write_bytes(content)
    record.write_text(record.read_text().replace('"lr"', '"lt"', 1))
    code, _, err = replay(rank_pool, tmp_path, 1)
    assert code == 2 and f"dump {record}: is damaged (has no lr)" in err


def test_the_config_of_a_dump_is_the_runs(rank_pool, tiny_models, tmp_path):
    from megatron_stapo.checkpoint.dump import load_dump
    from megatron_stapo.config import from_dict

    run(rank_pool, tiny_models, Layout(dp=2), tmp_path)
    record, microbatches = load_dump(name_dump(tmp_path, 1, 1))
    config = from_dict(record["config"])
    assert config.parallel.data_parallel_size == 2
    expected = build_config(tiny_models["tied"]).algorithm.num_prompts_per_minibatch
    assert record["num_sequences"] == expected * config.rollout.group_size
    ids = {i for m in microbatches for i in m.sequence_ids_T.tolist()} - {-1}
    assert ids == set(range(record["num_sequences"]))
