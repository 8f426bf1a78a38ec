"""`stapo verify`: it passes what is right, in every algorithm, and fails what is broken."""

import math

import pytest

from megatron_stapo.algorithms import ALGORITHMS
from tests.layouts import Layout
from tests.workers import BREAKAGES, run_verify

pytestmark = pytest.mark.distributed


def verify(rank_pool, layout, path, run_dir, algorithm=None, breakage=""):
    """The table's rows by quantity, and what was compared."""
    config = layout.build_config(path)
    rows, details = rank_pool.run(
        run_verify, config.parallel.world_size, config, algorithm, run_dir, breakage
    )[0]
    assert len(rows) == 9
    return rows, details


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_computes_the_dense_update(rank_pool, tiny_models, tmp_path, name):
    algorithm = ALGORITHMS[name](num_prompts_per_minibatch=2, overlong_buffer_tokens=0)
    layout = Layout(tp=2, cp=2) if name < "g" else Layout(cp=2, dp=2)
    rows, details = verify(rank_pool, layout, tiny_models["tied"], tmp_path, algorithm)
    assert all(passed for _, passed in rows.values()), rows
    if algorithm.masks_tokens:
        assert 0 < details["num_masked"] < details["num_tokens"]


@pytest.mark.parametrize("aggregation", ["prompt_mean", "sequence_mean", "fixed_length"])
def test_every_aggregation_and_correction_computes_the_dense_update(
    rank_pool, tiny_models, tmp_path, aggregation
):
    algorithm = ALGORITHMS["stapo"](
        num_prompts_per_minibatch=2,
        aggregation=aggregation,
        prob_threshold=0.02,
        tis_max_weight=1.1,
        sequence_mask_min=0.99,
        sequence_mask_max=1.05,
    )
    rows, details = verify(
        rank_pool, Layout(cp=2, pp=2, vpp=2), tiny_models["untied"], tmp_path, algorithm
    )
    assert all(passed for _, passed in rows.values()), rows
    # Sequences left out, besides what S2T takes.
    assert details["num_masked"] > 0.75 * details["num_candidates"] + 10


@pytest.mark.parametrize(
    "layout",
    [
        Layout(model="experts", tp=2, sp=True, dp=2, ep=4),
        Layout(model="untied", pp=3, first=2),
        Layout(model="untied", pp=2, first=1, last=3, dp=2),
    ],
    ids=str,
)
def test_layouts_pass(rank_pool, tiny_models, tmp_path, layout):
    rows, details = verify(rank_pool, layout, tiny_models[layout.model], tmp_path)
    assert all(passed for _, passed in rows.values()), rows
    assert details["num_candidates"] > 10


def test_an_update_that_trains_nothing_is_not_called_right(rank_pool, tiny_models, tmp_path):
    algorithm = ALGORITHMS["stapo"](num_prompts_per_minibatch=2, sequence_mask_min=1.9)
    rows, _ = verify(rank_pool, Layout(dp=2), tiny_models["tied"], tmp_path, algorithm)
    failed = {quantity for quantity, (_, passed) in rows.items() if not passed}
    assert failed == {"nothing trains (1: the masks leave no token)"}


def test_the_padding_token_may_be_sampled(rank_pool, tiny_models, tmp_path):
    """transformers withholds its embedding's gradient, which is no fault of the layout."""
    path = tmp_path / "padded"
    path.mkdir()
    for file in tiny_models["tied"].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    text = (path / "config.json").read_text()
    # Nearly every token of the vocabulary is drawn; 0 is drawn in prompts and responses.
    (path / "config.json").write_text(text.replace('"pad_token_id": null', '"pad_token_id": 0'))
    rows, _ = verify(rank_pool, Layout(), path, tmp_path)
    assert all(passed for _, passed in rows.values()), rows


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_what_is_broken_fails(rank_pool, tiny_models, tmp_path, breakage):
    rows, _ = verify(rank_pool, Layout(cp=2, dp=2), tiny_models["untied"], tmp_path, None, breakage)
    failed = {quantity for quantity, (_, passed) in rows.items() if not passed}
    expected = {
        "factor of cp_size": {"loss", "gradient norm, before clipping (relative)"},
        "mean instead of sum": {"loss", "gradient norm, before clipping (relative)"},
        "quantile of each rank": {"loss mask (tokens that differ)"},
        "unshifted positions": {"log-probability (nats)"},
        "every replica has every token": {"tokens missing or doubled (number)"},
        "one replica moved": {"weights of replicas, after the update (parts that differ)"},
        "NaN on one rank": {"loss"},
    }[breakage]
    assert expected <= failed
    assert all(not math.isnan(value) or not passed for value, passed in rows.values())
