"""The Megatron model against transformers' Qwen3, in every tensor- and pipeline-parallel layout."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.layouts import Layout
from tests.tiny_model import VOCAB_SIZE
from tests.workers import build_config, run_logits, run_round_trip, run_save

pytestmark = pytest.mark.distributed

LAYOUTS = [
    # tp, pp, sequence parallel
    (1, 1, False),
    (2, 1, False),
    (2, 1, True),
    (4, 1, False),
    (4, 1, True),
    (1, 2, False),
    (1, 4, False),
    (2, 2, False),
    (2, 2, True),
]
SEQUENCES = [  # 40 tokens, so that sequence parallelism can cut them by 4
    [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(n)] for n in (17, 1, 22)
]


def layout_config(path, layout, **changes):
    tp_size, pp_size, sequence_parallel = layout
    return build_config(
        path,
        parallel__tensor_model_parallel_size=tp_size,
        parallel__pipeline_model_parallel_size=pp_size,
        parallel__sequence_parallel=sequence_parallel,
        **changes,
    )


@pytest.fixture(scope="module")
def transformers_logits(tiny_models):
    from transformers import AutoModelForCausalLM

    def compute(path):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            return [model(torch.tensor([s])).logits[0] for s in SEQUENCES]

    return {name: compute(tiny_models[name]) for name in ("tied", "untied")}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("embedding", ["tied", "untied"])
def test_logits_equal_transformers(rank_pool, tiny_models, transformers_logits, embedding, layout):
    config = layout_config(tiny_models[embedding], layout)
    results = rank_pool.run(run_logits, config.parallel.world_size, config, SEQUENCES)
    logits = next(r for r in results if r is not None)
    for ours, theirs in zip(logits, transformers_logits[embedding], strict=True):
        # The logits are of size 10: 1e-5 of that.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


ROUND_TRIPS = [
    Layout(),
    Layout(model="untied", tp=4),
    Layout(tp=2, sp=True, pp=2),
    Layout(model="untied", pp=4),
    Layout(pp=2, vpp=2, cp=2),
    Layout(model="untied", pp=2, first=3, dp=2),
    Layout(model="experts", dp=4, ep=4),
    Layout(model="experts", tp=2, sp=True, pp=2, vpp=2, ep=2),
    Layout(model="experts", tp=2, sp=True, dp=2, ep=4),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ROUND_TRIPS, ids=str)
def test_round_trip_is_bit_equal(rank_pool, tiny_models, layout, dtype):
    config = layout.build_config(tiny_models[layout.model], model__dtype=dtype)
    ours = rank_pool.run(run_round_trip, config.parallel.world_size, config)[0]
    theirs = load_file(tiny_models[layout.model] / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.to(getattr(torch, dtype))), name


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2)], ids=str)
def test_a_saved_model_loads_in_the_dtype_that_it_trained_in(
    rank_pool, tiny_models, layout, tmp_path
):
    from transformers import AutoModelForCausalLM

    source = tiny_models[layout.model]
    config = layout.build_config(source, model__dtype="bfloat16")
    rank_pool.run(run_save, config.parallel.world_size, config, tmp_path / "out")
    theirs = load_file(source / "model.safetensors")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.bfloat16()), name
    model_json = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        **model_json,
        "dtype": "bfloat16",
    }
