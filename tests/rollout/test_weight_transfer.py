from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megatron_stapo.rollout.weight_transfer import (
    Checklist,
    broadcast,
    connect,
    iter_buckets,
    unpack,
)


def build_tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 3), (5,), (), (4, 2, 2), (1, 9)]
    tensors = [(f"w{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)]
    return [*tensors, ("transposed", torch.randn(6, 4, generator=generator).T)]


@pytest.mark.parametrize("bucket_bytes", [1, 4 * 21, 4 * 27, 10**6])
def test_buckets_carry_every_bit_in_order(bucket_bytes):
    sent = build_tensors()
    buckets = list(iter_buckets(sent, bucket_bytes))
    received = [pair for info, flat in buckets for pair in unpack(info, flat)]
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (name, ours), (_, theirs) in zip(received, sent, strict=True):
        assert torch.equal(ours, theirs), name
    for info, flat in buckets:
        assert flat.nbytes <= bucket_bytes or len(info.names) == 1
        assert flat.numel() == info.num_elements


def test_a_bucket_has_one_dtype():
    tensors = [(f"w{i}", torch.ones(3, dtype=d)) for i, d in enumerate([torch.float32] * 2)]
    tensors += [("b", torch.ones(2, dtype=torch.bfloat16)), ("c", torch.ones(1))]
    infos = [info for info, _ in iter_buckets(tensors)]
    assert [(info.dtype, info.names) for info in infos] == [
        ("float32", ["w0", "w1"]),
        ("bfloat16", ["b"]),
        ("float32", ["c"]),
    ]


def test_no_more_than_a_bucket_is_taken_ahead():
    taken = []

    def stream():
        for name, tensor in [(f"w{i}", torch.ones(10)) for i in range(9)]:
            taken.append(name)
            yield name, tensor

    buckets = iter_buckets(stream(), bucket_bytes=3 * 40)
    next(buckets)
    # The fourth tensor is what showed that the bucket of three was full.
    assert len(taken) == 4


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("c", (2,), "no such tensor"),
        ("a", (2, 3), "or got it"),
        ("b", (3,), r"got shape \(3,\), the engine's model has \(4,\)"),
    ],
)
def test_a_checklist_refuses_what_is_not_due(name, shape, message):
    checklist = Checklist({"a": (2, 3), "b": [4]})
    checklist.take("a", [2, 3])
    with pytest.raises(RuntimeError, match=message):
        checklist.take(name, shape)


def test_a_checklist_names_what_is_left_out():
    checklist = Checklist({"a": (2, 3), "b": (4,)})
    checklist.take("a", (2, 3))
    with pytest.raises(RuntimeError, match=r"left out \['b'\]"):
        checklist.check_complete()
    checklist.take("b", (4,))
    checklist.check_complete()


def test_a_group_of_its_own_carries_buckets_to_every_worker():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    device = torch.device("cpu")
    buckets = list(iter_buckets(build_tensors(), 4 * 27))

    def receive(rank):
        ours = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        group = connect(ours, rank, 3, device)
        flats = [torch.empty(info.num_elements) for info, _ in buckets]
        for flat in flats:
            broadcast(group, flat).wait()
        return flats

    with ThreadPoolExecutor() as pool:
        received = [pool.submit(receive, rank) for rank in (1, 2)]
        group = connect(store, 0, 3, device)
        for _, flat in buckets:
            broadcast(group, flat).wait()
        for worker in received:
            for ours, (_, theirs) in zip(worker.result(), buckets, strict=True):
                assert torch.equal(ours, theirs)
    assert not dist.is_initialized()
