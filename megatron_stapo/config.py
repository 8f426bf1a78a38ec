"""The frozen configuration of a run: every setting, its unit, its default and its check.

Never imports torch, so that a recipe is read, checked and refused in milliseconds. A config is
built once by a recipe, checked by `__post_init__`, saved with the run and never changed.

Sources of the defaults: STAPO, arXiv:2602.15620, Table 3, and where the paper is silent the public
launch script of JustRL, the recipe that STAPO extends.
"""

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_stapo.published_models import PUBLISHED

LAG_TIS_MAX_WEIGHT = 2.0
"""The importance correction of a run that samples ahead and names none. Without a correction its
gradient would be that of another policy, in silence; 2 is the cap that truncated importance
sampling between engine and trainer is published with."""


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value}: {rule}")


def _require_options(group: Any, name: str) -> None:
    """Refuse a value that a field with a fixed set of them does not take.

    Args:
        group: of settings, just built.
        name: under which a config has it.
    """
    for f in dataclasses.fields(group):
        if typing.get_origin(f.type) is Literal:
            options, value = typing.get_args(f.type), getattr(group, f.name)
            _require(
                value in options, f"{name}.{f.name}", value, f"must be one of {', '.join(options)}."
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that is trained."""

    path: str
    """Folder in Hugging Face format: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights and activations. With bfloat16 the optimizer keeps float32 main weights."""

    def __post_init__(self) -> None:
        _require(
            self.dtype in ("float32", "bfloat16"),
            "model.dtype",
            self.dtype,
            "must be float32 or bfloat16.",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the trainer's ranks share the work. The number of ranks is the product of the sizes."""

    device: Literal["cpu", "cuda"] = "cuda"
    """cpu runs the same Megatron classes over gloo."""
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks per pipeline stage; above 1 the schedule interleaves them."""
    num_layers_in_first_pipeline_stage: int | None = None
    """None: the stages that are not named share the remaining layers evenly."""
    num_layers_in_last_pipeline_stage: int | None = None
    context_parallel_size: int = 1
    """Ranks that share each sequence, every one an early and a late part of it."""
    data_parallel_size: int = 1
    """Replicas that share the mini-batch; context-parallel ranks are not counted."""
    expert_model_parallel_size: int = 1
    """Ranks that share a layer's experts. They are drawn from the tensor-, context- and
    data-parallel ranks of a stage, so the number of ranks does not grow."""
    sequence_parallel: bool = False
    """Shard activations outside the tensor-parallel regions along the tokens."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward computes again: those of attention, or all but each layer's
    input."""
    timeout_s: float = 1800.0
    """Longest wait in a collective. Must exceed the longest rollout phase: the ranks wait for
    it."""

    def __post_init__(self) -> None:
        _require(
            self.device in ("cpu", "cuda"), "parallel.device", self.device, "must be cpu or cuda."
        )
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "context_parallel_size",
            "data_parallel_size",
            "expert_model_parallel_size",
        ):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"parallel.{name}", value, "must be >= 1.")
        _require(
            not (self.sequence_parallel and self.tensor_model_parallel_size == 1),
            "parallel.sequence_parallel",
            True,
            "has no effect with tensor_model_parallel_size=1; set it to False.",
        )
        if self.pipeline_model_parallel_size == 1:
            for name, neutral in (
                ("virtual_pipeline_model_parallel_size", 1),
                ("num_layers_in_first_pipeline_stage", None),
                ("num_layers_in_last_pipeline_stage", None),
            ):
                _require(
                    getattr(self, name) == neutral,
                    f"parallel.{name}",
                    getattr(self, name),
                    f"has no effect with pipeline_model_parallel_size=1; set it to {neutral}.",
                )
        sharing = self.world_size // self.pipeline_model_parallel_size
        _require(
            sharing % self.expert_model_parallel_size == 0,
            "parallel.expert_model_parallel_size",
            self.expert_model_parallel_size,
            f"must divide the {sharing} ranks of a pipeline stage, tensor_model_parallel_size x "
            "context_parallel_size x data_parallel_size.",
        )
        _require(
            self.recompute in ("none", "selective", "full"),
            "parallel.recompute",
            self.recompute,
            "must be none, selective or full.",
        )
        _require(self.timeout_s > 0, "parallel.timeout_s", self.timeout_s, "must be > 0 seconds.")

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
        )

    @property
    def sequence_multiple(self) -> int:
        """Every sequence is padded to a multiple of it: each context-parallel rank holds two parts
        of equal size."""
        return 1 if self.context_parallel_size == 1 else 2 * self.context_parallel_size

    @property
    def microbatch_multiple(self) -> int:
        """Every microbatch is padded to a multiple of it, so that sequence parallelism divides each
        context-parallel rank's tokens."""
        return self.sequence_multiple * self.num_token_shards // self.context_parallel_size

    @property
    def num_token_shards(self) -> int:
        """Ranks that share the tokens of a microbatch outside the tensor-parallel regions."""
        tp_size = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return self.context_parallel_size * tp_size


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of the trainer below model.dtype, and how far it may be from the engine.

    With model.dtype=bfloat16 main weights, Adam's moments and the sums of gradients over
    microbatches and ranks are float32, and so are the head's logits. `docs/precision.md`.
    """

    fp8: Literal["none", "tensorwise", "blockwise", "mxfp8"] = "none"
    """Format of the matrix products in the layers, forward and backward, through Transformer
    Engine: one scale per tensor; per 128 x 128 block of a weight and 1 x 128 tile of an activation;
    per 1 x 32 tile, on Blackwell alone. Weights stay in bfloat16 and are quantised anew for every
    update; embedding, norms, attention, router and head are never in FP8."""
    num_first_layers_bf16: int = 1
    """With fp8: layers at the start that stay in bfloat16."""
    num_last_layers_bf16: int = 1
    """With fp8: layers at the end that do."""
    match_engine: bool = True
    """Round where vLLM rounds: rope and the activation of the MLP unfused, the router in float32.
    False takes the fused kernels, which keep intermediates in other formats, and a bfloat16
    router."""
    max_logprob_gap: float = 0.05
    """Limit of logprob_gap_mean, nats: the mean of |log p of the trainer - log p of the engine|
    over a step's response tokens. Beyond it FP8 training goes on in bfloat16, and a run without FP8
    warns. At more than ln 1.05 the mean ratio of the two probabilities exceeds 1.05."""

    def __post_init__(self) -> None:
        _require_options(self, "precision")
        for name in ("num_first_layers_bf16", "num_last_layers_bf16"):
            value = getattr(self, name)
            _require(value >= 0, f"precision.{name}", value, "must be >= 0.")
            _require(
                self.fp8 != "none" or value == 1,
                f"precision.{name}",
                value,
                "has no effect with precision.fp8=none; leave it at 1.",
            )
        _require(
            self.max_logprob_gap > 0,
            "precision.max_logprob_gap",
            self.max_logprob_gap,
            "must be > 0 nats.",
        )

    @property
    def token_multiple(self) -> int:
        """Each rank's tokens of a microbatch are padded to a multiple of it: a row of an FP8
        operand's transpose holds whole tiles."""
        return {"none": 1, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}[self.fp8]

    @property
    def weight_multiple(self) -> int:
        """Every rank's part of a weight has a multiple of it of rows and columns: what an FP8
        product takes."""
        return {"none": 1, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}[self.fp8]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The machines. What does not fit on one of them spreads over several."""

    accelerator: Literal["h20", "h20_141", "h100", "h200", "b200"] = "h20"
    """What `stapo plan` computes memory and time for, and which precision.fp8 there is; h20 has
    96 GB, h20_141 has 141."""
    num_gpus_per_node: int = 8
    """Ranks of trainer and engines that a node holds, on CPUs too."""

    def __post_init__(self) -> None:
        _require_options(self, "cluster")
        _require(
            self.num_gpus_per_node >= 1,
            "cluster.num_gpus_per_node",
            self.num_gpus_per_node,
            "must be >= 1.",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The problems, and how rollouts are packed for the trainer."""

    source: str
    """The training problems: PATH of a JSONL or Parquet file or a folder of them, hub:ORG/NAME, or
    gym:TASK for procedural ones, with options such as ?problem=COLUMN&answer=COLUMN; see
    `data/sources.py`."""
    keep_duplicates: bool = False
    """Keep the rows that repeat a problem; they may then share a step. By default the first row of
    each problem trains, and no step holds a problem twice."""
    drop_chinese: bool = False
    """Leave out problems with Chinese characters, of which DAPO-Math-17k has thousands."""
    prompt_suffix: str = (
        "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    """Appended to the problem before the chat template. The default is the paper's instruction."""
    max_prompt_tokens: int = 1024
    """Longest prompt, chat template included. Longer ones are left out, and their number told."""
    max_microbatch_tokens: int = 32768
    """Token budget of a packed microbatch on one rank: the memory of one forward-backward pass."""

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_microbatch_tokens"):
            _require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "must be >= 1.")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled. top-p is 1 and top-k off: the trainer scores the full softmax."""

    engine: Literal["vllm", "transformers"] = "vllm"
    """transformers samples inside the trainer's rank 0: for tests, and where vLLM has no build."""
    num_prompts_per_step: int = 256
    group_size: int = 8
    """Responses per prompt, G. The group's unbiased standard deviation needs at least two."""
    max_response_tokens: int = 15360
    temperature: float = 1.0
    """Divides the logits in the engine and in the trainer alike."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """disaggregated: vLLM engines beside the trainer, each on GPUs of its own. colocated: as many
    as fit into the trainer's ranks, on their GPUs, asleep during the update."""
    num_engines: int = 1
    """Of the disaggregated placement."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer of an engine."""
    pipeline_parallel_size: int = 1
    """Stages of an engine."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: the layers' weights are quantised in blocks of 128 x 128 on their way to the engine.
    Embedding, norms, router and head stay in model.dtype."""
    max_num_seqs: int = 256
    """Sequences that the engine decodes at a time."""
    kv_cache_bytes: int | None = None
    """Size of the engine's KV cache on each of its ranks; None lets vLLM take what the GPU has
    free."""
    start_timeout_s: float = 600.0
    """Longest wait for the engine to load the model and answer."""
    request_timeout_s: float = 1800.0
    """Longest wait for the responses to one prompt, or for one weight update."""
    health_timeout_s: float = 60.0
    """An engine that does not answer for so long counts as dead, and is killed."""
    max_engine_restarts: int = 3
    """A dead engine is started again so many times in a run; the next death ends the run."""
    max_lag_steps: int = 0
    """0: a step is sampled by the weights that it trains. 1: it is sampled while the step before
    trains, by the weights that that one began with."""

    def __post_init__(self) -> None:
        _require_options(self, "rollout")
        _require(
            self.group_size >= 2,
            "rollout.group_size",
            self.group_size,
            "the advantage divides by the group's unbiased standard deviation, which needs at "
            "least 2 responses; the paper uses 8.",
        )
        for name in (
            "num_prompts_per_step",
            "max_response_tokens",
            "num_engines",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "max_num_seqs",
        ):
            _require(
                getattr(self, name) >= 1, f"rollout.{name}", getattr(self, name), "must be >= 1."
            )
        for name in ("temperature", "start_timeout_s", "request_timeout_s", "health_timeout_s"):
            _require(
                getattr(self, name) > 0, f"rollout.{name}", getattr(self, name), "must be > 0."
            )
        _require(
            self.max_engine_restarts >= 0,
            "rollout.max_engine_restarts",
            self.max_engine_restarts,
            "must be >= 0.",
        )
        _require(
            self.max_lag_steps in (0, 1),
            "rollout.max_lag_steps",
            self.max_lag_steps,
            "must be 0 or 1: no more than one step is sampled ahead.",
        )
        _require(
            self.kv_cache_bytes is None or self.kv_cache_bytes > 0,
            "rollout.kv_cache_bytes",
            self.kv_cache_bytes,
            "must be > 0 bytes, or None.",
        )
        if self.placement == "colocated":
            self._check_colocated()
        if self.engine == "transformers":
            for name in ("num_engines", "tensor_parallel_size", "pipeline_parallel_size"):
                _require(
                    getattr(self, name) == 1,
                    f"rollout.{name}",
                    getattr(self, name),
                    "the transformers engine runs in one process; set it to 1.",
                )
            _require(
                self.quantization == "none",
                "rollout.quantization",
                self.quantization,
                "the transformers engine has none; use rollout.engine=vllm.",
            )

    def _check_colocated(self) -> None:
        _require(
            self.engine == "vllm",
            "rollout.placement",
            self.placement,
            f"is vLLM's, and rollout.engine={self.engine}; use rollout.engine=vllm.",
        )
        _require(
            self.num_engines == 1,
            "rollout.num_engines",
            self.num_engines,
            "has no effect with rollout.placement=colocated, whose engines fill the trainer's "
            "ranks; leave it 1, and set rollout.tensor_parallel_size.",
        )
        _require(
            self.max_lag_steps == 0,
            "rollout.max_lag_steps",
            self.max_lag_steps,
            "needs engines that sample while the trainer trains, and with "
            "rollout.placement=colocated they take turns; set it to 0.",
        )
        _require(
            self.kv_cache_bytes is not None,
            "rollout.kv_cache_bytes",
            self.kv_cache_bytes,
            "must be set with rollout.placement=colocated: vLLM would take what the GPU has free "
            "before the trainer has allocated anything. `stapo plan` says what fits.",
        )

    @property
    def has_servers(self) -> bool:
        """Whether the engines of a training run are processes beside the trainer."""
        return self.engine == "vllm" and self.placement == "disaggregated"

    @property
    def num_engine_ranks(self) -> int:
        """Processes that hold a part of an engine's model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True)
class ReshardConfig:
    """The way of new weights from the trainer's ranks to the engines'. `docs/reshard.md`."""

    bucket_bytes: int = 512 << 20
    """Most memory that a rank takes for weights on their way, beside those it has. A set of weights
    that vLLM loads as one and is larger by itself passes alone."""
    probe_interval_steps: int = 100
    """After every so many steps, and after the first exchange with each engine, what its ranks
    have received is compared with the trainer's weights, by a hash of every tensor."""
    delta: bool = False
    """Send an engine only the elements that changed since its last update. For that every rank of
    the trainer keeps a copy of its weights in the host's memory, and every rank of an engine of its
    part."""

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "probe_interval_steps"):
            _require(
                getattr(self, name) >= 1, f"reshard.{name}", getattr(self, name), "must be >= 1."
            )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Which tokens train, on which loss, over which denominator.

    The defaults are STAPO's. `megatron_stapo/algorithms` names the others, a file each.
    """

    num_prompts_per_minibatch: int = 64
    """Prompts whose groups share one optimizer step, and one entropy threshold."""

    advantage: Literal["group_std", "group_mean"] = "group_std"
    """(reward - group mean) / group std, or the numerator alone."""
    advantage_reweighting: float = 0.0
    """alpha: an advantage is multiplied by 1 - alpha (1 - p), p under the policy that sampled; 0
    turns it off."""
    overlong_buffer_tokens: int = 0
    """The reward falls by up to 1 over the last so many tokens before max_response_tokens; 0 turns
    it off."""
    filter_truncated: bool = False
    """Leave responses that were cut at max_response_tokens out of the loss."""
    dynamic_sampling: bool = False
    """Draw prompts until the step is full of groups whose rewards differ."""
    max_sampling_rounds: int = 10
    """With dynamic_sampling: rounds of num_prompts_per_step prompts before the run gives up."""

    token_mask: Literal[
        "none", "s2t", "s2t_v1", "rare", "high_entropy", "random", "top_entropy"
    ] = "s2t"
    """Which tokens are silenced. A candidate is rare (prob_threshold) and has a positive advantage.
    s2t: candidates of low entropy. s2t_v1: likewise, but the quantile is over all response tokens.
    rare: every candidate. high_entropy, random: as many candidates as s2t, others. top_entropy: all
    response tokens of low entropy."""
    prob_threshold: float = 0.002
    """tau_p: below this probability a token is rare. 0 turns the mask off, except top_entropy."""
    entropy_quantile: float = 0.75
    """q: the silenced share, lowest entropy first, of the candidates (s2t_v1, top_entropy: of all
    response tokens). 0 turns the mask off, except rare."""

    policy_loss: Literal["clip", "gspo", "cispo", "clip_cov"] = "clip"
    """clip: the ratio of a token is clipped. gspo: the ratio of the sequence is. cispo: the clipped
    ratio is a weight without gradient. clip_cov: clip, and a few tokens of high covariance between
    log-probability and advantage lose their gradient."""
    clip_low: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    """Upper bound of the ratio where the advantage is negative; None leaves it unbounded."""
    clip_cov_frac: float = 2e-4
    """With clip_cov: the share of the mini-batch's tokens that lose their gradient."""
    clip_cov_min: float = 1.0
    """With clip_cov: they are drawn from those whose covariance lies between these bounds."""
    clip_cov_max: float = 5.0
    kl_coef: float = 0.0
    """Weight of the KL divergence to the model of model.path; needs a copy of its weights."""

    aggregation: Literal[
        "token_mean", "prompt_mean", "sequence_mean", "fixed_length", "verl_microbatch_mean"
    ] = "token_mean"
    """What the loss is the mean of, after the masks: the tokens of the mini-batch; the token means
    of its prompts' groups; those of its sequences. fixed_length: sum over tokens / (sequences x
    max_response_tokens). verl_microbatch_mean: mean of the microbatches' token means, as verl
    before it counted tokens globally; it alone depends on the layout."""

    lopti_prob_threshold: float | None = None
    """eta: a mini-batch makes two updates, first on the tokens below this probability, then on the
    others; None makes one."""

    tis_max_weight: float | None = None
    """Weight each token's loss by min(p of the trainer / p of the engine, this). None does not,
    but with rollout.max_lag_steps, where it stands for LAG_TIS_MAX_WEIGHT."""
    sequence_mask_min: float | None = None
    """Leave out sequences whose mean ratio of trainer to engine, the geometric mean over the
    tokens, is below this; None keeps them."""
    sequence_mask_max: float | None = None
    """Likewise above this."""

    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts."""

    def __post_init__(self) -> None:
        for name in ("num_prompts_per_minibatch", "max_sampling_rounds"):
            self._require(name, getattr(self, name) >= 1, "must be >= 1.")
        for name in ("overlong_buffer_tokens", "kl_coef", "router_aux_loss_coef"):
            self._require(name, getattr(self, name) >= 0, "must be >= 0.")
        _require_options(self, "algorithm")
        self._require("clip_low", 0 < self.clip_low <= 1, "must be in (0, 1].")
        self._require("clip_high", self.clip_high > 0, "must be > 0.")
        self._require(
            "dual_clip",
            self.dual_clip is None or self.dual_clip > 1 + self.clip_high,
            "must exceed 1 + clip_high, or be None.",
        )
        self._require(
            "dual_clip",
            self.dual_clip is None or self.policy_loss in ("clip", "clip_cov"),
            f"has no effect with policy_loss={self.policy_loss}; set it to None.",
        )
        self._require(
            "prob_threshold",
            0 <= self.prob_threshold <= 1,
            "is a probability in [0, 1]; the paper uses 0.002.",
        )
        self._require(
            "entropy_quantile",
            0 <= self.entropy_quantile <= 1,
            "must be in [0, 1]; the paper uses 0.75.",
        )
        for name in ("advantage_reweighting", "clip_cov_frac"):
            self._require(name, 0 <= getattr(self, name) <= 1, "must be in [0, 1].")
        self._require(
            "clip_cov_max", self.clip_cov_max > self.clip_cov_min, "must exceed clip_cov_min."
        )
        self._require(
            "lopti_prob_threshold",
            self.lopti_prob_threshold is None or 0 < self.lopti_prob_threshold < 1,
            "must be in (0, 1), or None.",
        )
        for name in ("tis_max_weight", "sequence_mask_min", "sequence_mask_max"):
            value = getattr(self, name)
            self._require(name, value is None or value > 0, "must be > 0, or None.")
        if self.sequence_mask_min is not None and self.sequence_mask_max is not None:
            self._require(
                "sequence_mask_max",
                self.sequence_mask_max > self.sequence_mask_min,
                f"must exceed sequence_mask_min={self.sequence_mask_min}.",
            )

    def _require(self, field_name: str, holds: bool, rule: str) -> None:
        _require(holds, f"algorithm.{field_name}", getattr(self, field_name), rule)

    @property
    def masks_tokens(self) -> bool:
        """Whether the token mask can silence anything."""
        if self.token_mask == "none":
            return False
        if self.token_mask == "top_entropy":
            return self.entropy_quantile > 0
        return self.prob_threshold > 0 and (self.entropy_quantile > 0 or self.token_mask == "rare")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW at a constant learning rate after a linear warm-up."""

    lr: float = 1e-6
    num_warmup_steps: int = 10
    """Optimizer steps over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Global norm to which the gradient is clipped."""
    max_skipped_in_a_row: int = 3
    """An update whose loss or gradient is not finite is left out. So many in a row end the run."""

    def __post_init__(self) -> None:
        _require(
            self.max_skipped_in_a_row >= 1,
            "optimizer.max_skipped_in_a_row",
            self.max_skipped_in_a_row,
            "must be >= 1.",
        )
        for name in ("lr", "eps", "max_grad_norm"):
            _require(
                getattr(self, name) > 0, f"optimizer.{name}", getattr(self, name), "must be > 0."
            )
        for name in ("num_warmup_steps", "weight_decay"):
            _require(
                getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "must be >= 0."
            )
        for name in ("beta1", "beta2"):
            _require(
                0 <= getattr(self, name) < 1,
                f"optimizer.{name}",
                getattr(self, name),
                "must be in [0, 1).",
            )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How a response becomes a reward. `docs/rewards.md` says what each rule accepts."""

    rule: Literal["math_verify", "dapo", "exact_box"] = "math_verify"
    """math_verify: the last box is mathematically equivalent to the ground truth. dapo: DAPO's, the
    line after `Answer:`, normalised. exact_box: JustRL's, the last box is the same string."""
    wrong_reward: float = -1.0
    """Reward of a wrong response, -1 or 0; a right one has 1."""
    truncated: Literal["judge", "wrong"] = "judge"
    """What a response cut at its length limit counts as; algorithm.filter_truncated takes it out of
    the loss."""
    num_workers: int = 2
    """Processes that judge, beside rank 0."""
    timeout_s: float = 5.0
    """Longest that one response may be judged; then it is wrong, and counted."""
    verifier_url: str | None = None
    """OpenAI-compatible server of a CompassVerifier, http://host:port, asked about what the rule
    calls wrong; None asks nobody."""
    verifier_model: str = "opencompass/CompassVerifier-3B"
    """The name under which the server knows the model."""
    verifier_prompt: str | None = None
    """File with another prompt for it, such as the published one, with {question}, {gold_answer}
    and {llm_response}; None takes that of `rewards/compass.py`."""
    verify_training: bool = False
    """Ask the model verifier about training responses, too, and not in evaluations alone."""

    def __post_init__(self) -> None:
        _require_options(self, "reward")
        _require(
            self.wrong_reward in (-1, 0),
            "reward.wrong_reward",
            self.wrong_reward,
            "must be -1 or 0.",
        )
        _require(self.num_workers >= 1, "reward.num_workers", self.num_workers, "must be >= 1.")
        _require(self.timeout_s > 0, "reward.timeout_s", self.timeout_s, "must be > 0 seconds.")
        _require(
            self.verifier_url is None or self.verifier_url.startswith(("http://", "https://")),
            "reward.verifier_url",
            self.verifier_url,
            "must be http://host:port, or None.",
        )
        _require(
            not (self.verify_training and self.verifier_url is None),
            "reward.verify_training",
            self.verify_training,
            "has no effect without reward.verifier_url.",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The accuracy on benchmarks, measured before the first and after the last step."""

    benchmarks: tuple[str, ...] = ()
    """Names of `data/benchmarks.py`, such as aime24, or NAME=SOURCE, or sources as data.source
    takes them. Empty: nothing is measured."""
    interval_steps: int | None = None
    """Measure after every so many steps, too. Paper: 20."""
    num_problems: int | None = None
    """Problems taken from the head of each benchmark; None takes all."""
    num_samples: int | None = None
    """Responses per problem, n of avg@n; None takes the paper's: 32 of aime24, aime25 and amc23, 4
    of the others."""
    temperature: float = 1.0
    top_p: float = 1.0
    """The paper's two settings are temperature 1.0 with top_p 1.0, and 0.7 with 0.9."""
    max_response_tokens: int | None = None
    """None: rollout.max_response_tokens. Paper: 20,480."""

    def __post_init__(self) -> None:
        for name in ("interval_steps", "num_problems", "num_samples", "max_response_tokens"):
            value = getattr(self, name)
            _require(
                value is None or value >= 1, f"evaluation.{name}", value, "must be >= 1, or None."
            )
        _require(self.temperature > 0, "evaluation.temperature", self.temperature, "must be > 0.")
        _require(0 < self.top_p <= 1, "evaluation.top_p", self.top_p, "must be in (0, 1].")
        _require(
            self.interval_steps is None or bool(self.benchmarks),
            "evaluation.interval_steps",
            self.interval_steps,
            "has no effect without evaluation.benchmarks.",
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What of a run survives its end, and when it is written."""

    interval_steps: int = 10
    """A checkpoint after every so many steps, after the last one, and before a run that is stopped
    ends. It takes 12 bytes per parameter: float32 weights and Adam's two moments."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_best: int = 1
    """Checkpoints of the highest evaluated accuracy that are kept beside them."""
    stop_timeout_s: float = 60.0
    """After SIGTERM, Ctrl-C or an engine's last death: longest wait for the step to end and its
    checkpoint to be written. Sampling is abandoned at once, with rollout.max_lag_steps after half
    of it: what is sampled ahead cannot be sampled again. Give less than the cluster leaves between
    warning and kill."""
    dump_interval_steps: int | None = None
    """Dump every so many steps for `stapo replay`. An update that is left out is always dumped."""

    def __post_init__(self) -> None:
        for name in ("interval_steps", "keep_last", "dump_interval_steps"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"checkpoint.{name}", value, "must be >= 1.")
        _require(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "must be >= 0.")
        _require(
            self.stop_timeout_s > 0,
            "checkpoint.stop_timeout_s",
            self.stop_timeout_s,
            "must be > 0 seconds.",
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. A recipe is a function that returns one."""

    name: str
    num_steps: int
    """Rollout steps. Each makes num_prompts_per_step / num_prompts_per_minibatch updates."""
    model: ModelConfig
    parallel: ParallelConfig
    data: DataConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    seed: int = 0
    """Of the prompt order, of every sampled response, and of masks that draw tokens."""
    log_quadrants: bool = False
    """Log the gradient norms of tokens with positive advantage by low and high probability and
    entropy. Costs a row in the head's reduction, and a scoring pass before every update."""
    run_dir: str = ""
    """Folder for everything the run writes; empty means runs/<name>."""

    def __post_init__(self) -> None:
        _require(self.num_steps >= 1, "num_steps", self.num_steps, "must be >= 1.")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "must be in [0, 2^63).")
        if not self.run_dir:
            object.__setattr__(self, "run_dir", f"runs/{self.name}")
        if self.rollout.max_lag_steps and self.algorithm.tis_max_weight is None:
            corrected = dataclasses.replace(self.algorithm, tis_max_weight=LAG_TIS_MAX_WEIGHT)
            object.__setattr__(self, "algorithm", corrected)
        _require(
            self.rollout.num_prompts_per_step % self.algorithm.num_prompts_per_minibatch == 0,
            "algorithm.num_prompts_per_minibatch",
            self.algorithm.num_prompts_per_minibatch,
            f"must divide rollout.num_prompts_per_step={self.rollout.num_prompts_per_step}.",
        )
        _require(
            self.rollout.engine != "vllm" or self.rollout.group_size <= self.rollout.max_num_seqs,
            "rollout.group_size",
            self.rollout.group_size,
            f"exceeds rollout.max_num_seqs={self.rollout.max_num_seqs}, and vLLM samples a "
            "prompt's responses together; raise the latter.",
        )
        _require(
            not self.log_quadrants
            or (
                self.algorithm.token_mask in ("s2t", "s2t_v1")
                and self.algorithm.masks_tokens
                and self.algorithm.policy_loss == "clip"
            ),
            "log_quadrants",
            self.log_quadrants,
            "needs algorithm.token_mask=s2t or s2t_v1 switched on, whose threshold splits the "
            "entropies, and policy_loss=clip, whose gradient is measured.",
        )
        if self.rollout.placement == "colocated":
            world_size, num_ranks = self.parallel.world_size, self.rollout.num_engine_ranks
            fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
            _require(
                world_size % num_ranks == 0,
                "rollout.tensor_parallel_size",
                self.rollout.tensor_parallel_size,
                f"with pipeline_parallel_size={self.rollout.pipeline_parallel_size}: colocated "
                f"engines of {num_ranks} ranks do not fill the trainer's {world_size}; the "
                f"product must be one of {fitting}.",
            )
        self._check_precision()
        longest = self.max_sequence_tokens
        longest += -longest % self.parallel.sequence_multiple
        _require(
            self.max_pack_tokens >= longest,
            "data.max_microbatch_tokens",
            self.data.max_microbatch_tokens,
            "must hold a rank's part of the longest sequence, (data.max_prompt_tokens + "
            f"rollout.max_response_tokens) / context_parallel_size, that is "
            f"{-(-longest // self.parallel.context_parallel_size)}.",
        )
        _require(
            self.algorithm.overlong_buffer_tokens <= self.rollout.max_response_tokens,
            "algorithm.overlong_buffer_tokens",
            self.algorithm.overlong_buffer_tokens,
            f"exceeds rollout.max_response_tokens={self.rollout.max_response_tokens}; set a part "
            "of it, DAPO a fifth, or 0 for no length penalty.",
        )

    def _check_precision(self) -> None:
        fp8, cpu = self.precision.fp8, self.parallel.device == "cpu"
        _require(
            fp8 == "none" or not cpu,
            "precision.fp8",
            fp8,
            "Transformer Engine needs a GPU, and with parallel.device=cpu nothing would be "
            "quantised; set it to none.",
        )
        _require(
            fp8 == "none" or self.model.dtype == "bfloat16",
            "precision.fp8",
            fp8,
            f"needs model.dtype=bfloat16, not {self.model.dtype}.",
        )
        accelerator = self.cluster.accelerator
        _require(
            fp8 != "mxfp8" or accelerator in _HAVE_MXFP8,
            "precision.fp8",
            fp8,
            f"cluster.accelerator={accelerator} has no MXFP8, which came with Blackwell "
            f"({', '.join(_HAVE_MXFP8)}); use blockwise or tensorwise.",
        )
        _require(
            self.precision.match_engine or not cpu,
            "precision.match_engine",
            self.precision.match_engine,
            "has no effect with parallel.device=cpu, which has no fused kernels; leave it True.",
        )
        _require(
            self.rollout.quantization == "none" or self.model.dtype == "bfloat16",
            "rollout.quantization",
            self.rollout.quantization,
            f"needs model.dtype=bfloat16, not {self.model.dtype}.",
        )
        _require(
            self.rollout.has_servers or not self.reshard.delta,
            "reshard.delta",
            self.reshard.delta,
            "is for engines in processes of their own; with rollout.engine="
            f"{self.rollout.engine} and rollout.placement={self.rollout.placement} leave it False.",
        )

    @property
    def num_engines(self) -> int:
        """vLLM engines that the trainer samples from."""
        if self.rollout.placement == "colocated":
            return self.parallel.world_size // self.rollout.num_engine_ranks
        return self.rollout.num_engines

    @property
    def max_pack_tokens(self) -> int:
        """Token budget of a packed microbatch over its context-parallel ranks."""
        return self.data.max_microbatch_tokens * self.parallel.context_parallel_size

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus longest response that trains, in tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_evaluation_response_tokens(self) -> int:
        """Longest response of an evaluation."""
        return self.evaluation.max_response_tokens or self.rollout.max_response_tokens

    @property
    def max_engine_tokens(self) -> int:
        """Longest sequence that the engine samples, in training or in evaluations."""
        longest = self.rollout.max_response_tokens
        if self.evaluation.benchmarks:
            longest = max(longest, self.max_evaluation_response_tokens)
        return self.data.max_prompt_tokens + longest


_HAVE_MXFP8 = ("b200",)
"""Accelerators whose matrix units take MXFP8: compute capability 10."""


def load_model_json(path: str) -> dict[str, Any]:
    """Read the model folder's config.json.

    Raises:
        ValueError: no such file, or not a Qwen3 dense model.
    """
    file = Path(path) / "config.json"
    _require(
        file.is_file(),
        "model.path",
        path,
        "has no config.json; give a folder in Hugging Face format. `make base` builds the tiny "
        "model of the demo.",
    )
    try:
        model_json: dict[str, Any] = dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"model.path={path}: its config.json is damaged ({error}).") from error
    _require(
        model_json.get("model_type") in ("qwen3", "qwen3_moe"),
        "model.path",
        path,
        f"holds model_type={model_json.get('model_type')!r}; only qwen3 and qwen3_moe are "
        "supported.",
    )
    if "num_local_experts" in model_json:  # transformers 5 writes it so, published folders do not
        model_json["num_experts"] = model_json["num_local_experts"]
    for key in (*_TP_EXTENTS, "intermediate_size", "hidden_size", "num_hidden_layers"):
        _require(key in model_json, "model.path", path, f"its config.json has no {key}.")
    return model_json


def find_model_json(path: str) -> dict[str, Any]:
    """As `load_model_json`; without the folder, what is published of the model of its last name.

    For plans and dry runs, which need the model's shape alone.

    Raises:
        ValueError: neither a folder nor the name of a published model; or as `load_model_json`.
    """
    if Path(path).exists():
        return load_model_json(path)
    name = Path(path).name
    _require(
        name in PUBLISHED,
        "model.path",
        path,
        "is no folder here, and its last part is no published model; give a folder in Hugging Face "
        f"format, or one of {', '.join(PUBLISHED)}.",
    )
    return dict(PUBLISHED[name])


def check_model_layout(config: Config, model_json: dict[str, Any] | None = None) -> None:
    """Refuse a layout that does not divide the model, before any process starts.

    Args:
        model_json: the model's shape; None reads the folder of model.path, which must exist.

    Raises:
        ValueError: names the field, its value, the rule and the values that would do.
    """
    model_json = model_json or load_model_json(config.model.path)
    # The trainer does not cut an expert by tensor parallelism.
    _require_divides(
        "parallel.tensor_model_parallel_size",
        config.parallel.tensor_model_parallel_size,
        _TP_EXTENTS | ({} if "num_experts" in model_json else _MLP_EXTENT),
        model_json,
    )
    _check_engine(config, model_json)
    _check_experts(config, model_json)
    list_stage_layers(config.parallel, model_json["num_hidden_layers"])
    _check_fp8(config, model_json)
    _check_length(
        config,
        model_json["max_position_embeddings"],
        "rollout.max_response_tokens",
        config.rollout.max_response_tokens,
    )
    if config.evaluation.benchmarks:
        _check_evaluation_length(config, model_json["max_position_embeddings"])


def check_engine_layout(config: Config) -> None:
    """What `check_model_layout` checks of the engine, for an evaluation without a trainer.

    Raises:
        ValueError: as there.
    """
    model_json = load_model_json(config.model.path)
    _check_engine(config, model_json)
    _check_evaluation_length(config, model_json["max_position_embeddings"])


def _check_engine(config: Config, model_json: dict[str, Any]) -> None:
    if config.rollout.engine == "vllm":
        _require_divides(
            "rollout.tensor_parallel_size",
            config.rollout.tensor_parallel_size,
            _TP_EXTENTS | (_EXPERT_EXTENT if "num_experts" in model_json else _MLP_EXTENT),
            model_json,
        )
    size = config.rollout.pipeline_parallel_size
    _require(
        size == 1 or config.parallel.device == "cuda",
        "rollout.pipeline_parallel_size",
        size,
        "the workers of vLLM 0.32's CPU build die of the first request to a second stage; use 1 "
        "with parallel.device=cpu.",
    )


def _check_evaluation_length(config: Config, limit: int) -> None:
    value = config.max_evaluation_response_tokens
    _check_length(config, limit, "evaluation.max_response_tokens", value)


def _check_length(config: Config, limit: int, name: str, value: int) -> None:
    num_prompt_tokens = config.data.max_prompt_tokens
    rest = limit - num_prompt_tokens
    _require(
        value <= rest,
        name,
        value,
        f"with data.max_prompt_tokens={num_prompt_tokens} exceeds the model's "
        f"max_position_embeddings={limit}; "
        + (f"use at most {rest}." if rest > 0 else "lower data.max_prompt_tokens first."),
    )


_TP_EXTENTS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "KV heads",
    "vocab_size": "vocabulary entries",
}
"""What tensor parallelism cuts, in the trainer and in the engine."""
_MLP_EXTENT = {"intermediate_size": "MLP columns"}
_EXPERT_EXTENT = {"moe_intermediate_size": "columns of an expert"}


def _require_divides(
    name: str, value: int, keys: dict[str, str], model_json: dict[str, Any]
) -> None:
    """keys: of the sizes in model_json that value must divide, and what each counts."""
    extents = {what: model_json[key] for key, what in keys.items()}
    sizes = range(1, min(extents.values()) + 1)
    valid = [n for n in sizes if all(extent % n == 0 for extent in extents.values())]
    for what, extent in extents.items():
        _require(
            extent % value == 0,
            name,
            value,
            f"does not divide the model's {extent} {what}; use one of {valid}.",
        )


def _check_experts(config: Config, model_json: dict[str, Any]) -> None:
    parallel = config.parallel
    if "num_experts" not in model_json:
        for name, value, neutral in (
            ("parallel.expert_model_parallel_size", parallel.expert_model_parallel_size, 1),
            ("algorithm.router_aux_loss_coef", config.algorithm.router_aux_loss_coef, 0.0),
        ):
            _require(
                value == neutral,
                name,
                value,
                f"has no effect: the model has no experts; set it to {neutral}.",
            )
        return
    _require_divides(
        "parallel.expert_model_parallel_size",
        parallel.expert_model_parallel_size,
        {"num_experts": "experts"},
        model_json,
    )
    _require(
        parallel.tensor_model_parallel_size == 1 or parallel.sequence_parallel,
        "parallel.sequence_parallel",
        parallel.sequence_parallel,
        "experts under tensor parallelism need it; set it to True.",
    )


def list_stage_layers(parallel: ParallelConfig, num_layers: int) -> list[int]:
    """Number of layers of each pipeline stage.

    Raises:
        ValueError: the stages, or the chunks of a stage, cannot share the layers.
    """
    size, chunks = (
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    first = parallel.num_layers_in_first_pipeline_stage
    last = parallel.num_layers_in_last_pipeline_stage
    named = [n for n in (first, last) if n is not None]
    num_even = size - len(named)
    remaining = num_layers - sum(named)
    if not named:
        valid = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        _require(
            num_layers % size == 0,
            "parallel.pipeline_model_parallel_size",
            size,
            f"does not divide the model's {num_layers} layers; use one of {valid}, or give "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage.",
        )
    elif num_even:
        _require(
            remaining >= num_even and remaining % num_even == 0,
            "parallel.pipeline_model_parallel_size",
            size,
            f"{remaining} of {num_layers} layers remain for {num_even} stages beside the named "
            "ones; the number must be a positive multiple.",
        )
    else:
        _require(
            remaining == 0,
            "parallel.num_layers_in_last_pipeline_stage",
            last,
            f"with num_layers_in_first_pipeline_stage={first} makes {sum(named)} layers; the model "
            f"has {num_layers}.",
        )
    even = remaining // num_even if num_even else 0
    stages = [even] * size
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    for count in stages:
        _require(
            count % chunks == 0,
            "parallel.virtual_pipeline_model_parallel_size",
            chunks,
            f"does not divide the {count} layers of a stage; the stages have {stages}.",
        )
    return stages


def _check_fp8(config: Config, model_json: dict[str, Any]) -> None:
    """Refuse FP8 where no layer would be in it, or where its products do not take a weight."""
    precision, parallel = config.precision, config.parallel
    if precision.fp8 == "none":
        return
    num_layers = model_json["num_hidden_layers"]
    first, last = precision.num_first_layers_bf16, precision.num_last_layers_bf16
    _require(
        first + last < num_layers,
        "precision.num_first_layers_bf16",
        first,
        f"with num_last_layers_bf16={last} leaves none of {num_layers} layers in FP8.",
    )
    limit = num_layers // parallel.pipeline_model_parallel_size
    for name, value in (("num_first_layers_bf16", first), ("num_last_layers_bf16", last)):
        _require(
            value <= limit,
            f"precision.{name}",
            value,
            f"Megatron takes at most num_hidden_layers / pipeline_model_parallel_size={limit}.",
        )
    tp_size, multiple = parallel.tensor_model_parallel_size, precision.weight_multiple
    extents = {
        "hidden_size": model_json["hidden_size"],
        "num_attention_heads x head_dim / tensor_model_parallel_size": model_json[
            "num_attention_heads"
        ]
        * model_json["head_dim"]
        // tp_size,
        "num_key_value_heads x head_dim / tensor_model_parallel_size": model_json[
            "num_key_value_heads"
        ]
        * model_json["head_dim"]
        // tp_size,
    }
    if "num_experts" in model_json:  # tensor parallelism does not cut an expert
        extents["moe_intermediate_size"] = model_json["moe_intermediate_size"]
    else:
        extents["intermediate_size / tensor_model_parallel_size"] = (
            model_json["intermediate_size"] // tp_size
        )
    for what, extent in extents.items():
        _require(
            extent % multiple == 0,
            "precision.fp8",
            precision.fp8,
            f"needs a multiple of {multiple}, and {what}={extent} is none; use a smaller "
            "parallel.tensor_model_parallel_size, or none.",
        )


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain nested dicts, for config.json in the run folder."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """Rebuild a config from `to_dict`, with every check."""
    groups: dict[str, Any] = {
        f.name: f.type for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)
    }
    arguments: dict[str, Any] = {
        # JSON has lists for tuples.
        name: groups[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
        if name in groups
        else value
        for name, value in values.items()
    }
    return Config(**arguments)


_FREE_TO_CHANGE = (
    "name",
    "num_steps",
    "run_dir",
    "parallel",
    "data.max_microbatch_tokens",
    "precision.max_logprob_gap",
    "cluster",
    "rollout.engine",
    "rollout.placement",
    "rollout.num_engines",
    "rollout.tensor_parallel_size",
    "rollout.pipeline_parallel_size",
    "rollout.max_num_seqs",
    "rollout.kv_cache_bytes",
    "rollout.start_timeout_s",
    "rollout.request_timeout_s",
    "rollout.health_timeout_s",
    "rollout.max_engine_restarts",
    "reshard",
    "reward.num_workers",
    "optimizer.max_skipped_in_a_row",
    "evaluation",
    "checkpoint",
    "log_quadrants",
)
"""What a resumed run may set anew: it changes how the run goes, and not what it learns."""


def list_changes(old: Config, new: Config) -> list[str]:
    """What would make a resumed run another experiment, as `field: old -> new`."""
    before, after = _flatten(old), _flatten(new)
    return [
        f"{name}: {before.get(name)} -> {value}"
        for name, value in after.items()
        if before.get(name) != value
        and name not in _FREE_TO_CHANGE
        and name.partition(".")[0] not in _FREE_TO_CHANGE
    ]


def _flatten(config: Config) -> dict[str, Any]:
    """Every field by the name that an override gives it."""
    flat: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{field}": item for field, item in value.items()}
        else:
            flat[name] = value
    return flat
