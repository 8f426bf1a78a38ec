"""The frozen configuration of a run: every setting, its unit, its default and its check.

Never imports torch, so that a recipe is read, checked and refused in milliseconds. A config is
built once by a recipe, checked by `__post_init__`, saved with the run and never changed.

Sources of the defaults: STAPO, arXiv:2602.15620, Table 3, and where the paper is silent the public
launch script of JustRL, the recipe that STAPO extends.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value}: {rule}")


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
    data_parallel_size: int = 1
    sequence_parallel: bool = False
    """Shard activations outside the tensor-parallel regions along the tokens."""
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
            "data_parallel_size",
        ):
            _require(
                getattr(self, name) >= 1, f"parallel.{name}", getattr(self, name), "must be >= 1."
            )
        _require(
            not (self.sequence_parallel and self.tensor_model_parallel_size == 1),
            "parallel.sequence_parallel",
            True,
            "has no effect with tensor_model_parallel_size=1; set it to False.",
        )
        _require(self.timeout_s > 0, "parallel.timeout_s", self.timeout_s, "must be > 0 seconds.")

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.data_parallel_size
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The problems, and how rollouts are packed for the trainer."""

    train_path: str
    """JSONL file; a row holds one problem and its answer."""
    heldout_path: str
    """JSONL file of the evaluation problems."""
    prompt_column: str = "problem"
    answer_column: str = "answer"
    prompt_suffix: str = (
        "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    """Appended to the problem before the chat template. The default is the paper's instruction."""
    max_prompt_tokens: int = 1024
    """Longest prompt, chat template included. A longer one is refused before the run starts."""
    max_microbatch_tokens: int = 32768
    """Token budget of a packed microbatch: the memory of one forward-backward pass."""

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
    tensor_parallel_size: int = 1
    """Ranks of the vLLM engine."""
    max_num_seqs: int = 256
    """Sequences that the engine decodes at a time."""
    kv_cache_bytes: int | None = None
    """Size of the engine's KV cache; None lets vLLM take what the GPU has free."""
    start_timeout_s: float = 600.0
    """Longest wait for the engine to load the model and answer."""
    request_timeout_s: float = 1800.0
    """Longest wait for one batch of rollouts, or for one weight update."""

    def __post_init__(self) -> None:
        _require(
            self.engine in ("vllm", "transformers"),
            "rollout.engine",
            self.engine,
            "must be vllm or transformers.",
        )
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
            "tensor_parallel_size",
            "max_num_seqs",
        ):
            _require(
                getattr(self, name) >= 1, f"rollout.{name}", getattr(self, name), "must be >= 1."
            )
        for name in ("temperature", "start_timeout_s", "request_timeout_s"):
            _require(
                getattr(self, name) > 0, f"rollout.{name}", getattr(self, name), "must be > 0."
            )
        _require(
            self.kv_cache_bytes is None or self.kv_cache_bytes > 0,
            "rollout.kv_cache_bytes",
            self.kv_cache_bytes,
            "must be > 0 bytes, or None.",
        )
        _require(
            not (self.engine == "transformers" and self.tensor_parallel_size > 1),
            "rollout.tensor_parallel_size",
            self.tensor_parallel_size,
            "the transformers engine runs in one process; set it to 1.",
        )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """STAPO: the clipped policy objective over the tokens that S2T keeps."""

    num_prompts_per_minibatch: int = 64
    """Prompts whose groups share one optimizer step, and one entropy threshold."""
    clip_low: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    """Upper bound of the ratio where the advantage is negative; None leaves it unbounded."""
    prob_threshold: float = 0.002
    """tau_p: below this probability a token is rare. 0 turns S2T off."""
    entropy_quantile: float = 0.75
    """q: the share of the rare tokens with positive advantage, lowest entropy first, that is
    silenced. 0 turns S2T off."""

    def __post_init__(self) -> None:
        _require(
            self.num_prompts_per_minibatch >= 1,
            "algorithm.num_prompts_per_minibatch",
            self.num_prompts_per_minibatch,
            "must be >= 1.",
        )
        _require(0 < self.clip_low < 1, "algorithm.clip_low", self.clip_low, "must be in (0, 1).")
        _require(self.clip_high > 0, "algorithm.clip_high", self.clip_high, "must be > 0.")
        _require(
            self.dual_clip is None or self.dual_clip > 1 + self.clip_high,
            "algorithm.dual_clip",
            self.dual_clip,
            "must exceed 1 + clip_high, or be None.",
        )
        _require(
            0 <= self.prob_threshold <= 1,
            "algorithm.prob_threshold",
            self.prob_threshold,
            "is a probability in [0, 1]; the paper uses 0.002.",
        )
        _require(
            0 <= self.entropy_quantile <= 1,
            "algorithm.entropy_quantile",
            self.entropy_quantile,
            "must be in [0, 1]; the paper uses 0.75.",
        )


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

    def __post_init__(self) -> None:
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
class EvaluationConfig:
    """The accuracy on held-out problems, measured before the first and after the last step."""

    num_problems: int = 256
    """Taken from the head of data.heldout_path."""
    num_samples: int = 4
    """Responses per problem; the accuracy is the mean over all of them."""

    def __post_init__(self) -> None:
        for name in ("num_problems", "num_samples"):
            _require(
                getattr(self, name) >= 1, f"evaluation.{name}", getattr(self, name), "must be >= 1."
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
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    seed: int = 0
    """Of the prompt order and of every sampled response."""
    run_dir: str = ""
    """Folder for everything the run writes; empty means runs/<name>."""

    def __post_init__(self) -> None:
        _require(self.num_steps >= 1, "num_steps", self.num_steps, "must be >= 1.")
        _require(self.seed >= 0, "seed", self.seed, "must be >= 0.")
        if not self.run_dir:
            object.__setattr__(self, "run_dir", f"runs/{self.name}")
        _require(
            self.rollout.num_prompts_per_step % self.algorithm.num_prompts_per_minibatch == 0,
            "algorithm.num_prompts_per_minibatch",
            self.algorithm.num_prompts_per_minibatch,
            f"must divide rollout.num_prompts_per_step={self.rollout.num_prompts_per_step}.",
        )
        for name, value in (
            ("rollout.group_size", self.rollout.group_size),
            ("evaluation.num_samples", self.evaluation.num_samples),
        ):
            _require(
                self.rollout.engine != "vllm" or value <= self.rollout.max_num_seqs,
                name,
                value,
                f"exceeds rollout.max_num_seqs={self.rollout.max_num_seqs}, and vLLM samples a "
                "prompt's responses together; raise the latter.",
            )
        _require(
            self.data.max_microbatch_tokens >= self.max_sequence_tokens,
            "data.max_microbatch_tokens",
            self.data.max_microbatch_tokens,
            "must hold the longest sequence, data.max_prompt_tokens + rollout.max_response_tokens "
            f"= {self.max_sequence_tokens}.",
        )

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus longest response, in tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens


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
    model_json: dict[str, Any] = json.loads(file.read_text())
    _require(
        model_json.get("model_type") == "qwen3",
        "model.path",
        path,
        f"holds model_type={model_json.get('model_type')!r}; only qwen3 (dense) is supported.",
    )
    return model_json


def check_model_layout(config: Config) -> None:
    """Refuse a layout that does not divide the model, before any process starts.

    Raises:
        ValueError: names the field, its value, the rule and the values that would do.
    """
    model_json = load_model_json(config.model.path)
    tp_size = config.parallel.tensor_model_parallel_size
    for key, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "KV heads"),
        ("vocab_size", "vocabulary entries"),
        ("intermediate_size", "MLP columns"),
    ):
        _require_divides(
            "parallel.tensor_model_parallel_size", tp_size, model_json[key], what, model_json
        )
    _require_divides(
        "parallel.pipeline_model_parallel_size",
        config.parallel.pipeline_model_parallel_size,
        model_json["num_hidden_layers"],
        "layers",
        model_json,
    )
    for key, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "KV heads"),
        ("vocab_size", "vocabulary entries"),
    ):
        if config.rollout.engine == "vllm":
            _require_divides(
                "rollout.tensor_parallel_size",
                config.rollout.tensor_parallel_size,
                model_json[key],
                what,
                model_json,
            )
    limit = model_json["max_position_embeddings"]
    _require(
        config.max_sequence_tokens <= limit,
        "rollout.max_response_tokens",
        config.rollout.max_response_tokens,
        f"with data.max_prompt_tokens={config.data.max_prompt_tokens} exceeds the model's "
        f"max_position_embeddings={limit}; use at most {limit - config.data.max_prompt_tokens}.",
    )


def _require_divides(
    name: str, value: int, extent: int, what: str, model_json: dict[str, Any]
) -> None:
    keys = ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size")
    extents = (
        [model_json["num_hidden_layers"]] if what == "layers" else [model_json[key] for key in keys]
    )
    valid = [n for n in range(1, min(extents) + 1) if all(e % n == 0 for e in extents)]
    _require(
        extent % value == 0,
        name,
        value,
        f"does not divide the model's {extent} {what}; use one of {valid}.",
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
        name: groups[name](**value) if name in groups else value for name, value in values.items()
    }
    return Config(**arguments)
