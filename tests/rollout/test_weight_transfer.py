from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megatron_stapo.rollout import delta
from megatron_stapo.rollout.weight_transfer import (
    Bucket,
    Checklist,
    ConnectInfo,
    Message,
    Part,
    Receiver,
    Reception,
    Region,
    exchange,
    format_buckets,
    hash_tensor,
    parse_buckets,
)

MATRIX = torch.arange(48.0).view(8, 6)
PART = Part("w", (8, 6), Region(2, 6, 1, 5))
"""Rows 2 to 5 and columns 1 to 4: the upper half comes packed, the lower one by columns."""
VECTOR = Part("v", (5,), Region(0, 5, 0, 1))
BUCKET = Bucket(
    parts=[PART, VECTOR],
    messages=[
        Message(0, [("w", Region(2, 4, 1, 5))], "direct"),
        Message(1, [("v", Region(0, 5, 0, 1)), ("w", Region(4, 6, 1, 3))], "packed"),
        Message(1, [("w", Region(4, 6, 3, 5))], "packed"),
    ],
)
FLATS = [
    MATRIX[2:4, 1:5].contiguous(),
    torch.cat([torch.arange(5.0), MATRIX[4:6, 1:3].reshape(-1)]),
]
FLATS += [MATRIX[4:6, 3:5].reshape(-1)]


@pytest.mark.parametrize(
    ("other", "common"),
    [
        (Region(0, 9, 0, 9), Region(2, 6, 1, 5)),
        (Region(4, 9, 0, 2), Region(4, 6, 1, 2)),
        (Region(3, 4, 2, 3), Region(3, 4, 2, 3)),
    ],
)
def test_regions_intersect(other, common):
    assert PART.region.intersect(other) == other.intersect(PART.region) == common


@pytest.mark.parametrize("other", [Region(6, 8, 1, 5), Region(0, 2, 0, 9), Region(2, 6, 5, 6)])
def test_regions_that_only_touch_have_nothing_in_common(other):
    assert PART.region.intersect(other).num_elements == 0


def test_a_schedule_survives_json():
    assert parse_buckets(format_buckets([BUCKET, BUCKET])) == [BUCKET, BUCKET]


def test_pieces_get_to_their_places():
    reception = Reception(BUCKET, torch.float32, torch.device("cpu"))
    assert [sender for sender, _ in reception.receives] == [0, 1, 1]
    for (_, tensor), flat in zip(reception.receives, FLATS, strict=True):
        assert tensor.is_contiguous()
        tensor.view(-1).copy_(flat.reshape(-1))
    (part, w), (_, v) = reception.unpack()
    assert part == PART
    assert torch.equal(w, MATRIX[2:6, 1:5])
    assert torch.equal(v, torch.arange(5.0))


def test_what_a_rank_sends_itself_is_copied():
    def read(name, region):
        matrix = MATRIX if name == "w" else torch.arange(5.0)[:, None]
        return matrix[region.first_row : region.end_row, region.first_column : region.end_column]

    reception = Reception(BUCKET, torch.float32, torch.device("cpu"), 1, read)
    assert [sender for sender, _ in reception.receives] == [0]
    reception.receives[0][1].copy_(FLATS[0])
    assert torch.equal(reception.unpack()[0][1], MATRIX[2:6, 1:5])


def test_a_bucket_counts_parts_and_what_is_packed():
    assert BUCKET.count_bytes(2, 5) == 2 * (16 + 5 + (5 + 4) + 4)
    assert BUCKET.count_bytes(2, 1) == 2 * (16 + 5)


def test_changes_are_written_into_what_travelled_last():
    messages = [message._replace(form="delta") for message in BUCKET.messages]
    bucket = Bucket(parts=BUCKET.parts, messages=messages)
    old = {"w": MATRIX[2:6, 1:5].clone(), "v": torch.arange(5.0)}
    new = {"w": old["w"].clone(), "v": old["v"].clone()}
    new["w"][0, 3], new["w"][3, 0], new["v"][4] = -1, -2, -3

    def cut(parts, name, region):
        matrix = parts[name] if name == "w" else parts[name][:, None]
        return next(p for p in BUCKET.parts if p.name == name).region.cut(matrix, region)

    reception = Reception(bucket, torch.float32, torch.device("cpu"), base=old)
    encoded = [
        delta.encode(*([cut(parts, *piece) for piece in message.pieces] for parts in (new, old)))
        for message in messages
    ]
    for (_, counts), (found, _) in zip(reception.counts, encoded, strict=True):
        counts.copy_(torch.tensor(found))
    reception.allocate()
    # The last message has no change, and does not travel.
    assert [sender for sender, _ in reception.receives] == [0, 1]
    for (_, tensor), (_, flat) in zip(reception.receives, encoded, strict=False):
        tensor.copy_(flat)
    (_, w), (_, v) = reception.unpack()
    assert torch.equal(w, new["w"]) and torch.equal(v, new["v"])
    assert old["v"][4] == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_hash_sees_every_bit_and_every_place(dtype, monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = hash_tensor(tensor)
    assert hash_tensor(tensor.clone()) == expected
    seen = {expected}
    for index in (0, 1, 500, 999):
        bits = tensor.clone().view(torch.int16)
        bits[index] ^= 1
        seen.add(hash_tensor(bits.view(dtype)))
        swapped = tensor.clone()
        swapped[[index, 7]] = swapped[[7, index]]
        seen.add(hash_tensor(swapped))
    assert len(seen) == 9
    monkeypatch.setattr("megatron_stapo.rollout.weight_transfer._HASH_CHUNK", 64)
    assert hash_tensor(tensor) == expected
    # Of the order of a matrix's elements, not of its memory.
    assert hash_tensor(tensor.view(10, 100).T) == hash_tensor(tensor.view(10, 100).T.contiguous())


def test_minus_zero_is_another_hash():
    assert hash_tensor(torch.tensor([0.0])) != hash_tensor(torch.tensor([-0.0]))


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


def test_a_group_of_its_own_carries_messages():
    """Two trainer ranks send, an engine's rank receives; without a default group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    info = ConnectInfo(host="127.0.0.1", port=store.port, num_trainer_ranks=2, num_engine_ranks=1)
    device = torch.device("cpu")

    def send(rank):
        group = info.connect(store if rank == 0 else info.open_store(), rank, device)
        for _ in range(2):
            exchange(group, [(2, flat) for flat in (FLATS[:1] if rank == 0 else FLATS[1:])], [])
        return group

    def receive():
        group = info.connect(info.open_store(), 2, device)
        receiver = Receiver(group, [BUCKET], torch.float32, device)
        for _ in range(2):
            for parts in receiver.receive(None):
                (_, tensor), _ = parts
        return tensor

    with ThreadPoolExecutor() as pool:
        groups = [pool.submit(send, rank) for rank in (0, 1)]
        assert torch.equal(pool.submit(receive).result(), MATRIX[2:6, 1:5])
        [group.result() for group in groups]
    assert not dist.is_initialized()
