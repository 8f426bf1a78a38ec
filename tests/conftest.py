import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.rank_pool import RankPool

# Before any test imports a hub client.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before any test imports torch: two threads that share cores with other processes spin and starve.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-layout-table", action="store_true", help="write docs/layouts.md")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator["RankPool"]:
    from tests.rank_pool import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random Qwen3 folders, "tied", "untied" and "experts" (8 of them, 2 per token): 4 layers, 8
    heads, 4 KV heads, fp32."""
    from tests.tiny_model import build_tiny_model

    return {
        "tied": build_tiny_model(tmp_path_factory.mktemp("tied"), tied=True),
        "untied": build_tiny_model(tmp_path_factory.mktemp("untied"), tied=False),
        "experts": build_tiny_model(tmp_path_factory.mktemp("experts"), tied=False, num_experts=8),
    }


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level tokenizer with Qwen3's special tokens and chat template, without a model."""
    from tests.tiny_model import build_tokenizer

    return str(build_tokenizer(tmp_path_factory.mktemp("tokenizer")))
