"""The vLLM engine against real servers, and their answers against transformers.

The tests run in order: the last ones leave the servers broken or dead.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from megatron_stapo.rollout import EngineDiedError
from megatron_stapo.rollout.pool import EnginePool
from megatron_stapo.rollout.vllm_engine import VllmEngine
from megatron_stapo.rollout.vllm_server import build_server_arguments, build_server_environment
from megatron_stapo.rollout.weight_transfer import hash_tensor
from megatron_stapo.types import Prompt, Sampling
from tests.single_trainer import SingleTrainer
from tests.workers import build_config

pytestmark = pytest.mark.vllm

VOCAB_SIZE = 96
STOP_TOKEN_IDS = [3, 50]
TEMPERATURE = 0.7
MAX_TOKENS = 24
SAMPLING = Sampling(temperature=TEMPERATURE, top_p=1.0, max_response_tokens=MAX_TOKENS)
DEADLINE_S = 60
"""After which a dead engine must have become an error."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A tied random Qwen3 with the smallest head that vLLM's attention takes on a CPU."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            initializer_range=0.15,
        )
    )
    # Defaults of the folder that would change every sample if they were heeded.
    model.generation_config = GenerationConfig(do_sample=True, top_k=2, repetition_penalty=2.0)
    model.generation_config.eos_token_id = list(range(10, 40))
    model.save_pretrained(path)
    return path


class Server:
    """A server process and what it started."""

    def __init__(self, config, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, *build_server_arguments(config, "127.0.0.1", port)],
            env={**os.environ, **build_server_environment(config)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill_engine_core(self):
        """Kill the process that holds the model, not the one that answers."""
        (engine_core,) = (
            child
            for child in psutil.Process(self.process.pid).children()
            if "EngineCore" in child.name() or "EngineCore" in "".join(child.cmdline())
        )
        engine_core.kill()

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def config(model_path):
    return build_config(
        model_path,
        data__max_prompt_tokens=100,
        data__max_microbatch_tokens=1000,
        rollout__max_response_tokens=900,
        rollout__max_num_seqs=256,
        rollout__kv_cache_bytes=64 << 20,
        rollout__start_timeout_s=240,
    )


@pytest.fixture(scope="module")
def servers(config, tmp_path_factory):
    """Two, started together, because two tests kill theirs."""
    folder = tmp_path_factory.mktemp("logs")
    servers = [Server(config, folder / f"{i}.log") for i in range(2)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def engine(config, servers):
    # A server that dies here has no host to start it again, so that waiting for it is in vain.
    impatient = replace(config, rollout=replace(config.rollout, start_timeout_s=5))
    engine = EnginePool(impatient, [VllmEngine(config, servers[0].url, STOP_TOKEN_IDS)])
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def weights(model_path):
    return load_file(model_path / "model.safetensors")


@pytest.fixture(scope="module")
def trainer(config):
    return SingleTrainer(config)


def perturb(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + 0.3 * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
    }


def build_prompts(num_prompts=6):
    # Prompts of several blocks, so that the prefix cache holds them.
    return [
        Prompt(
            prompt_id=prompt_id,
            problem="",
            answer="",
            token_ids=[(7 * i * i + 5 * prompt_id) % VOCAB_SIZE for i in range(90 - prompt_id)],
        )
        for prompt_id in range(num_prompts)
    ]


def generate(engine):
    return engine.generate(build_prompts(), 8, SAMPLING)


def list_samples(groups):
    return [
        (rollout.token_ids, rollout.rollout_logprobs)
        for group in groups
        for rollout in group.rollouts
    ]


def measure_gap(groups, model_path, weights):
    """Largest difference in nats between the rollouts' log-probabilities and transformers'."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    gap = 0.0
    for group in groups:
        prompt = group.prompt.token_ids
        for rollout in group.rollouts:
            with torch.no_grad():
                logits_TV = model(torch.tensor([prompt + rollout.token_ids])).logits[0]
            logprobs_TV = (logits_TV / TEMPERATURE).log_softmax(-1)[len(prompt) - 1 : -1]
            expected_T = logprobs_TV.gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
            gap = max(gap, (torch.tensor(rollout.rollout_logprobs) - expected_T).abs().max().item())
    return gap


def test_logprobs_are_those_of_transformers(engine, model_path, weights):
    groups = generate(engine)
    assert measure_gap(groups, model_path, weights) < 1e-4
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    assert {rollout.policy_version for rollout in rollouts} == {0}


def test_samples_are_equal_to_the_last_bit_in_every_batch(engine):
    expected = list_samples(generate(engine))
    assert list_samples(generate(engine)) == expected
    prompts = build_prompts()
    reverse = engine.generate(prompts[::-1], 8, SAMPLING)
    assert list_samples(reverse[::-1]) == expected
    alone = engine.generate(prompts[2:3], 3, SAMPLING)
    assert list_samples(alone) == expected[16:19]


def test_samples_follow_the_softmax(engine, model_path):
    # The same prompt under 32 ids: 8192 draws of the first token, the same ones in every run.
    token_ids = build_prompts()[0].token_ids
    prompts = [
        Prompt(prompt_id=i, problem="", answer="", token_ids=token_ids) for i in range(100, 132)
    ]
    groups = engine.generate(prompts, 256, replace(SAMPLING, max_response_tokens=1))
    drawn = torch.tensor([rollout.token_ids[0] for group in groups for rollout in group.rollouts])
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        probs_V = (model(torch.tensor([token_ids])).logits[0, -1] / TEMPERATURE).softmax(-1)
    expected_V = probs_V * len(drawn)
    counts_V = torch.bincount(drawn, minlength=VOCAB_SIZE)
    frequent_V = expected_V >= 5
    chi_square = ((counts_V - expected_V) ** 2 / expected_V)[frequent_V].sum().item()
    degrees = int(frequent_V.sum()) - 1
    assert degrees >= 10
    # Three standard deviations above the mean of the distribution.
    assert chi_square < degrees + 3 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("policy_version", [1, 2])
def test_new_weights_are_sampled_from(engine, trainer, model_path, weights, policy_version):
    old = weights if policy_version == 1 else perturb(weights, policy_version - 1)
    new = perturb(weights, policy_version)
    update = trainer.update(new, policy_version)
    engine.update_weights(update)
    assert update.hashes == [{name: hash_tensor(tensor) for name, tensor in new.items()}]
    groups = generate(engine)
    assert measure_gap(groups, model_path, new) < 1e-4
    # So far apart that a skipped or a partial update would show.
    assert measure_gap(groups, model_path, old) > 1
    assert {r.policy_version for group in groups for r in group.rollouts} == {policy_version}


def transpose(part):
    return part._replace(shape=part.shape[::-1])


def rename(part):
    return part._replace(name=part.name.replace("_proj", ""))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (transpose, r"weight model.layers.1.mlp.up_proj.weight: the trainer sends .*\(64, 96\)"),
        (rename, "weight model.layers.1.mlp.up.weight: .*this engine's rank takes None; 2 tensors"),
        # The last one, after which the engine takes no further update.
        (None, r"weight model.layers.1.mlp.up_proj.weight: the trainer sends None"),
    ],
)
def test_an_update_that_is_not_the_model_is_refused_before_it_begins(
    engine, config, weights, change, message
):
    trainer = SingleTrainer(config)
    for module in trainer.parts[0]:
        for index, part in enumerate(module):
            if part.name == "model.layers.1.mlp.up_proj.weight":
                module[index : index + 1] = [change(part)] if change else []
    weights = weights | {"model.layers.1.mlp.up.weight": torch.zeros(96, 64)}
    # No link yet, so that the schedule is looked at.
    engine._members[0].engine.close()
    update = trainer.update(weights, 3)
    update.send = None  # would fail another way
    with pytest.raises(RuntimeError, match=f"during update_weights: .*{message}"):
        engine.update_weights(update)


def test_a_server_that_dies_under_generate_is_an_error(engine, servers):
    # The refused update left the server paused, so that the requests are there when it dies.
    timer = threading.Timer(1, servers[0].process.kill)
    timer.start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"no engine has come back .* answer"):
        generate(engine)
    assert 1 <= time.monotonic() - start < DEADLINE_S
    timer.join()


def test_an_engine_that_dies_under_an_update_is_an_error(config, servers, weights):
    engine = EnginePool(config, [VllmEngine(config, servers[1].url, STOP_TOKEN_IDS)])
    trainer = SingleTrainer(config, bucket_bytes=40_000)
    engine.update_weights(trainer.update(weights, 1))

    def kill(number):
        if number == 2:
            servers[1].kill_engine_core()

    start = time.monotonic()
    with pytest.raises(EngineDiedError):
        engine.update_weights(trainer.update(weights, 2, kill))
    assert time.monotonic() - start < DEADLINE_S
    assert not engine.is_serving
    engine.close()
