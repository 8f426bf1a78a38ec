"""What each choice of precision makes of Megatron's config, under Megatron's own validation."""

import json

import pytest
from packaging.version import Version

from megatron_stapo.config import PrecisionConfig
from tests.workers import build_config

# Megatron warns at import about what only a GPU has.
pytestmark = pytest.mark.filterwarnings("ignore")

TE_VERSION = "2.17.0"


@pytest.fixture
def with_te(monkeypatch):
    """Megatron's checks with Transformer Engine there, which does not import without a GPU: they
    ask for its version and for its fused rope."""
    from megatron.core import utils
    from megatron.core.models.common.embeddings import rope_utils

    monkeypatch.setattr(utils, "_te_version", Version(TE_VERSION))
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, lambda *args: None)


def build(model_path, layout=None, **precision):
    from megatron_stapo.model.qwen3 import build_transformer_config

    changes = {"parallel__device": "cuda", "model__dtype": "bfloat16", **(layout or {})}
    changes |= {f"precision__{name}": value for name, value in precision.items()}
    config = build_config(model_path, **changes, cluster__accelerator="b200")
    model_json = json.loads((model_path / "config.json").read_text())
    if "num_local_experts" in model_json:
        model_json["num_experts"] = model_json["num_local_experts"]
    return build_transformer_config(config.model, config.parallel, config.precision, model_json)


@pytest.mark.parametrize("model", ["tied", "experts"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("fp8", "number_format"), [("tensorwise", "hybrid"), ("blockwise", "e4m3"), ("mxfp8", "e4m3")]
)
def test_fp8_passes_megatrons_checks(with_te, tiny_models, fp8, number_format, recompute, model):
    layout = {
        "parallel__tensor_model_parallel_size": 2,
        "parallel__sequence_parallel": True,
        "parallel__recompute": recompute,
    }
    config = build(tiny_models[model], layout, fp8=fp8)
    assert (config.fp8, config.fp8_recipe) == (number_format, fp8)
    # The weights that the optimizer and the engine read stay in bfloat16, and so do head and
    # attention.
    assert not (config.fp8_param or config.fp8_output_proj or config.fp8_dot_product_attention)
    assert config.bf16 and config.params_dtype.itemsize == 2


@pytest.mark.parametrize(
    ("first", "last", "in_bf16"), [(1, 1, [0, 3]), (2, 0, [0, 1]), (0, 1, [3]), (0, 0, [])]
)
def test_the_named_layers_stay_in_bf16(with_te, tiny_models, first, last, in_bf16):
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    config = build(
        tiny_models["tied"],
        fp8="blockwise",
        num_first_layers_bf16=first,
        num_last_layers_bf16=last,
    )
    assert [n for n in range(4) if is_first_last_bf16_layer(config, n)] == in_bf16


def test_megatron_refuses_more_bf16_layers_than_a_stage_holds(with_te, tiny_models):
    """`check_model_layout` says the same before any process starts."""
    layout = {"parallel__pipeline_model_parallel_size": 4}
    with pytest.raises(ValueError, match=r"must be between 0 and number of layers per pipeline st"):
        build(tiny_models["tied"], layout, fp8="blockwise", num_first_layers_bf16=2)


def test_without_fp8_nothing_of_it_is_set(tiny_models):
    config = build(tiny_models["tied"])
    assert config.fp8 is None and not config.first_last_layers_bf16


def test_matching_the_engine_unfuses_and_routes_in_fp32(with_te, tiny_models):
    def read(**precision):
        config = build(tiny_models["experts"], **precision)
        return config.apply_rope_fusion, config.bias_activation_fusion, config.moe_router_dtype

    assert read() == (False, False, "fp32")
    assert read(match_engine=False) == (True, True, None)


def test_padding_is_at_least_what_megatron_aligns_to(tiny_models):
    from megatron.core.fp8_utils import get_fp8_align_size

    for fp8 in ("tensorwise", "blockwise", "mxfp8"):
        precision = PrecisionConfig(fp8=fp8)
        align_size = get_fp8_align_size(fp8)
        assert precision.token_multiple % align_size == precision.weight_multiple % align_size == 0
