from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_stapo.rollout.shard_tensor import ShardTensor
from megatron_stapo.rollout.weight_transfer import Part, Region

ROWS = Part("w", (8, 6), Region(2, 4, 0, 6))
COLUMNS = Part("w", (8, 6), Region(0, 8, 3, 6))


def build(part):
    held = torch.randn(part.region.num_rows, part.region.num_columns)
    taken = set()
    return ShardTensor(part, held, taken), held, taken


@pytest.mark.parametrize(("part", "cut"), [(ROWS, (0, 2, 2)), (COLUMNS, (1, 3, 3))])
def test_a_loader_gets_the_part_that_it_narrows_to(part, cut):
    shard, held, taken = build(part)
    assert shard.shape == (8, 6) and shard.dtype == held.dtype and shard.ndim == 2
    assert not taken
    parameter = torch.empty(held.shape)
    parameter.copy_(shard.narrow(*cut))
    assert torch.equal(parameter, held)
    assert taken == {"w"}
    assert torch.equal(build(part)[0].narrow(*cut), held) is False  # another draw


def test_a_loader_may_narrow_twice():
    """vLLM's layer-wise reload runs a loader to count what it copies, and again to copy it."""
    shard, held, _ = build(ROWS)
    with torch.enable_grad():
        for _ in range(2):
            assert torch.equal(shard.narrow(0, 2, 2), held)


def test_a_loader_of_experts_stacks_and_unstacks():
    shard, held, taken = build(ROWS)
    with torch.enable_grad():
        for _ in range(2):
            stack = shard.unsqueeze(0)
            assert stack.shape == (1, 8, 6)
            (expert,) = stack.unbind()
            assert expert.shape == (8, 6) and not taken
            assert torch.equal(expert.narrow(0, 2, 2), held)
            taken.clear()
    for other in (lambda: shard.unsqueeze(1), lambda: stack.narrow(1, 2, 2), lambda: stack.clone()):
        with pytest.raises(RuntimeError, match="weight w: the engine's loader wants"):
            other()


@pytest.mark.parametrize("cut", [(0, 0, 2), (0, 2, 3), (0, 2, 1), (1, 2, 4), (0, 0, 8)])
def test_another_part_is_refused(cut):
    shard, _, taken = build(ROWS)
    with pytest.raises(RuntimeError, match=r"weight w: the engine's loader wants .*\[8, 6\]"):
        shard.narrow(*cut)
    assert not taken


@pytest.mark.parametrize(
    "use",
    [torch.Tensor.clone, torch.Tensor.t, lambda t: t + 1, lambda t: torch.empty(8, 6).copy_(t)],
)
def test_the_whole_is_refused(use):
    # torch does not undo what copy_ sets for its thread, where it raises.
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(use, build(ROWS)[0])
        with pytest.raises(RuntimeError, match="weight w: the engine's loader wants"):
            refused.result()


def test_a_part_may_be_empty():
    part = Part("w", (8, 6), Region(8, 8, 0, 6))
    assert ShardTensor(part, torch.empty(0, 6), set()).narrow(0, 8, 0).shape == (0, 6)
