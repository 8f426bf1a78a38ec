"""Every engine rank gets exactly its part of every weight, for any pair of layouts."""

import itertools
from collections import defaultdict

import pytest
import torch

from megatron_stapo.model.weights import build_weight_table, shard
from megatron_stapo.reshard.plan import build_plan, list_holdings
from megatron_stapo.rollout import delta
from megatron_stapo.rollout.engine_parts import list_parts
from megatron_stapo.rollout.fp8_weights import round_trip
from megatron_stapo.rollout.weight_transfer import (
    Part,
    Reception,
    Region,
    format_buckets,
    hash_part,
    pack,
    parse_buckets,
)

DENSE = {
    "hidden_size": 48,
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
MODELS = {
    "dense": DENSE,
    "tied": DENSE | {"tie_word_embeddings": True},
    "moe": DENSE | {"num_experts": 8, "moe_intermediate_size": 24},
}


def draw_tensors(model_json):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator)
        for pair in build_weight_table(model_json)
        for name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True)
    }


def build_trainer(model_json, tensors, tp, pp, dp, ep=1):
    """Holdings and parameters of every rank, in Megatron's order of ranks: tp, dp, pp."""
    num_kv_heads, num_layers = model_json["num_key_value_heads"], model_json["num_hidden_layers"]
    num_experts = model_json.get("num_experts", 0)
    table = build_weight_table(model_json)
    holdings, parameters = [], []
    for pp_rank, dp_rank, tp_rank in itertools.product(range(pp), range(dp), range(tp)):
        ep_rank = (dp_rank * tp + tp_rank) % ep
        stage = [layer for layer in range(num_layers) if layer * pp // num_layers == pp_rank]
        mine, own = [], {}
        for pair in table:
            names = [pair.name]
            fields = pair.name.split(".")
            if fields[0] == "embedding":
                names = [pair.name] if pp_rank == 0 else []
                if pp_rank == pp - 1 and model_json["tie_word_embeddings"]:
                    names.append("output_layer.weight")
            elif fields[1] == "layers":
                if int(fields[2]) not in stage:
                    continue
                if "experts" in fields and int(fields[5]) * ep // num_experts != ep_rank:
                    continue
            elif pp_rank != pp - 1:
                continue
            for name in names:
                mine += list_holdings(name, pair, tp_rank, tp, num_kv_heads)
                full = [tensors[hf_name] for hf_name in pair.hf_names]
                cut = shard(full, pair.layout, tp_rank, tp, num_kv_heads)
                own[name] = cut.contiguous()
        holdings.append(mine)
        parameters.append(own)
    return holdings, parameters


def execute(plan, parameters, receivers):
    """What every receiver has in the end, without any process."""
    received = {receiver: {} for receiver in receivers}
    buckets = {r: parse_buckets(format_buckets(plan.list_buckets(r))) for r in receivers}
    for number, sends in enumerate(plan.sends):
        mail = {}
        for sender, messages in sends.items():
            for message in messages:
                views = [
                    holding.view(parameters[sender][holding.parameter], region)
                    for holding, region in message.pieces
                ]
                assert message.form != "direct" or views[0].is_contiguous()
                flat = pack(message.form, views)
                mail.setdefault((sender, message.receiver), []).append(flat)
        for receiver in receivers:
            dtype = next(iter(parameters[0].values())).dtype
            reception = Reception(buckets[receiver][number], dtype, torch.device("cpu"))
            for sender, tensor in reception.receives:
                assert tensor.is_contiguous()
                tensor.view(-1).copy_(mail[sender, receiver].pop(0).view(-1))
            received[receiver] |= {p.name: (p, tensor) for p, tensor in reception.unpack()}
        assert not any(mail.values())
    return received


def parts_of(model_json, tp, pp, is_fp8=False):
    ranks = [(tp_rank, tp, pp_rank, pp) for pp_rank in range(pp) for tp_rank in range(tp)]
    return [list_parts(model_json, *rank, is_fp8=is_fp8) for rank in ranks]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("trainer", [(1, 1, 1), (4, 1, 2), (2, 2, 1), (1, 3, 1), (2, 2, 2)])
@pytest.mark.parametrize("engine", [(1, 1), (2, 1), (1, 2), (8, 1), (2, 3)])
def test_each_rank_gets_exactly_its_part(model, trainer, engine, monkeypatch):
    monkeypatch.setattr("megatron_stapo.reshard.plan._DIRECT_BYTES", 1024)
    model_json = MODELS[model]
    tensors = draw_tensors(model_json)
    holdings, parameters = build_trainer(model_json, tensors, *trainer)
    parts = parts_of(model_json, *engine)
    receivers = range(len(holdings), len(holdings) + len(parts))
    bucket_bytes = 100_000
    plan = build_plan(holdings, parts, receivers, element_bytes=4, bucket_bytes=bucket_bytes)

    received = execute(plan, parameters, receivers)

    for receiver, modules in zip(receivers, parts, strict=True):
        mine = [part for module in modules for part in module]
        assert sorted(received[receiver]) == sorted(part.name for part in mine)
        for part in mine:
            found, tensor = received[receiver][part.name]
            full = tensors[part.name]
            r = part.region
            cut = full[r.first_row : r.end_row]
            expected = cut[:, r.first_column : r.end_column] if full.dim() > 1 else cut
            assert found == part
            torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
        least = 4 * sum(part.region.num_elements for part in mine)
        assert plan.count_received_bytes(receiver) == least
        largest = max(4 * sum(p.region.num_elements for p in module) for module in modules)
        assert plan.find_peak_bytes(receiver) <= max(bucket_bytes, 2 * largest)
    sent = [plan.count_sent_bytes(rank) for rank in range(len(holdings))]
    assert sum(sent) == sum(plan.count_received_bytes(r) for r in receivers)
    assert all(plan.find_peak_bytes(r) <= 2 * bucket_bytes for r in range(len(holdings)))


BLOCKS = DENSE | {
    "hidden_size": 256,
    "head_dim": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
}
"""Of gate and up a rank of TP 8 has 64 rows, half a block."""


@pytest.mark.parametrize(
    "model_json",
    [BLOCKS, BLOCKS | {"num_experts": 4, "moe_intermediate_size": 256}],
    ids=["dense", "moe"],
)
@pytest.mark.parametrize("trainer", [(1, 1, 1), (2, 2, 2), (4, 1, 1)])
@pytest.mark.parametrize("engine", [(1, 1), (2, 1), (8, 1), (2, 2)])
def test_an_fp8_engine_gets_blocks_or_else_every_bit(model_json, trainer, engine):
    tensors = {name: w.bfloat16() for name, w in draw_tensors(model_json).items()}
    holdings, parameters = build_trainer(model_json, tensors, *trainer)
    parts = parts_of(model_json, *engine, is_fp8=True)
    receivers = range(len(holdings), len(holdings) + len(parts))
    plan = build_plan(holdings, parts, receivers, element_bytes=2, bucket_bytes=1 << 20)

    received = execute(plan, parameters, receivers)

    forms = set()  # no part of the others is large enough to travel alone
    for receiver, modules in zip(receivers, parts, strict=True):
        in_fp8 = defaultdict(list)
        for bucket in plan.list_buckets(receiver):
            for message in bucket.messages:
                forms.add(message.form)
                for name, region in message.pieces:
                    if message.form == "fp8":
                        in_fp8[name].append(region)
        least = 0
        for part in (part for module in modules for part in module):
            found, tensor = received[receiver][part.name]
            matrix = tensors[part.name]
            matrix = matrix if matrix.dim() > 1 else matrix[:, None]
            expected = Region.whole(part.shape).cut(matrix, part.region).clone()
            assert hash_part(found, tensor) == hash_part(part, expected)
            assert part.is_fp8 or not in_fp8[part.name]
            for region in in_fp8[part.name]:
                place = part.region.cut(expected, region)
                place.copy_(round_trip(place))
                least -= region.num_elements - 4 * (-(-region.num_rows // 128)) * (
                    -(-region.num_columns // 128)
                )
            least += 2 * part.region.num_elements
            assert torch.equal(tensor.reshape(expected.shape), expected), part.name
            num_sent = sum(region.num_elements for region in in_fp8[part.name])
            assert num_sent == (part.region.num_elements if part.is_fp8 else 0)
        assert plan.count_received_bytes(receiver) == least
    assert forms == {"packed", "fp8"}


def test_blocks_begin_where_vllm_cuts_them():
    """q, k and v are one matrix there, and gate and up."""

    def find_fp8(tp, **sizes):
        modules = parts_of(BLOCKS | sizes, tp, 1, is_fp8=True)[0]
        names = {p.name.split(".")[-2] for module in modules for p in module if p.is_fp8}
        return sorted(names)

    everything = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert find_fp8(1) == find_fp8(4) == everything
    assert find_fp8(8) == ["down_proj", "k_proj", "o_proj", "q_proj", "v_proj"]
    assert find_fp8(4, head_dim=64) == ["down_proj", "gate_proj", "o_proj", "up_proj"]
    assert find_fp8(1, intermediate_size=500) == [
        n for n in everything if n[:2] not in ("ga", "up")
    ]
    assert parts_of(BLOCKS, 1, 1)[0] == parts_of(BLOCKS, 1, 1, is_fp8=False)[0]


def test_pieces_that_cut_a_block_keep_every_bit():
    model_json = BLOCKS | {"num_key_value_heads": 8}
    tensors = {name: w.bfloat16() for name, w in draw_tensors(model_json).items()}
    holdings, parameters = build_trainer(model_json, tensors, 8, 1, 1)
    plan = build_plan(
        holdings,
        parts_of(model_json, 1, 1, is_fp8=True),
        [8],
        element_bytes=2,
        bucket_bytes=1 << 20,
    )
    received = execute(plan, parameters, [8])[8]
    for name in ("mlp.gate_proj", "mlp.down_proj"):
        name = f"model.layers.1.{name}.weight"
        assert received[name][0].is_fp8
        assert torch.equal(received[name][1], tensors[name])


@pytest.mark.parametrize("trainer", [(1, 1, 1), (2, 2, 2), (4, 1, 1)])
@pytest.mark.parametrize("engine", [(1, 1), (2, 1), (8, 1), (2, 2)])
def test_an_engine_that_keeps_the_rest_gets_what_changed(trainer, engine):
    model_json = MODELS["tied"]
    tensors = draw_tensors(model_json)
    generator = torch.Generator().manual_seed(1)
    changed = {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < 0.05, -tensor, tensor)
        for name, tensor in tensors.items()
    }
    holdings, before = build_trainer(model_json, tensors, *trainer)
    _, after = build_trainer(model_json, changed, *trainer)
    parts = parts_of(model_json, *engine)
    receivers = range(len(holdings), len(holdings) + len(parts))
    plan = build_plan(
        holdings, parts, receivers, element_bytes=4, bucket_bytes=100_000, is_delta=True
    )
    kept = execute(plan, before, receivers)
    num_bytes = 0

    for number, sends in enumerate(plan.sends):
        receptions, counts, changes = {}, defaultdict(list), defaultdict(list)
        for receiver in receivers:
            bucket = plan.list_buckets(receiver)[number]
            base = {name: tensor for name, (_, tensor) in kept[receiver].items()}
            receptions[receiver] = Reception(bucket, torch.float32, torch.device("cpu"), base=base)
        for sender, messages in sends.items():
            for message in messages:
                assert message.form == "delta"
                news, olds = (
                    [
                        holding.view(parameters[sender][holding.parameter], r)
                        for holding, r in message.pieces
                    ]
                    for parameters in (after, before)
                )
                found, flat = delta.encode(news, olds)
                counts[sender, message.receiver].append(torch.tensor(found))
                changes[sender, message.receiver] += [flat] if len(flat) else []
        for receiver, reception in receptions.items():
            for sender, tensor in reception.counts:
                tensor.copy_(counts[sender, receiver].pop(0))
            reception.allocate()
            for sender, tensor in reception.receives:
                tensor.copy_(changes[sender, receiver].pop(0))
                num_bytes += tensor.nbytes
            for part, tensor in reception.unpack():
                full = changed[part.name] if tensor.dim() > 1 else changed[part.name][:, None]
                expected = Region.whole(part.shape).cut(full, part.region)
                assert torch.equal(tensor.reshape(expected.shape), expected), part.name

    planned = sum(plan.count_received_bytes(receiver) for receiver in receivers)
    assert 0.08 * planned < num_bytes < 0.12 * planned  # eight bytes of every twentieth element


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_experts_come_from_the_rank_that_has_them(ep):
    model_json = MODELS["moe"]
    tensors = draw_tensors(model_json)
    holdings, parameters = build_trainer(model_json, tensors, tp=2, pp=1, dp=4, ep=ep)
    parts = parts_of(model_json, 2, 1)
    plan = build_plan(holdings, parts, [8, 9], element_bytes=4, bucket_bytes=1 << 20)

    received = execute(plan, parameters, [8, 9])

    for name, (part, tensor) in received[9].items():
        matrix = tensors[name] if tensors[name].dim() > 1 else tensors[name][:, None]
        expected = Region.whole(part.shape).cut(matrix, part.region)
        assert torch.equal(tensor.reshape(expected.shape), expected), name


def test_replicas_share_the_work():
    model_json = MODELS["dense"]
    holdings, _ = build_trainer(model_json, draw_tensors(model_json), tp=1, pp=1, dp=4)
    parts = parts_of(model_json, 1, 1)
    plan = build_plan(holdings, parts, [4], element_bytes=2, bucket_bytes=1 << 20)
    sent = [plan.count_sent_bytes(rank) for rank in range(4)]
    assert sum(sent) == plan.count_received_bytes(4)
    # No tensor is cut among them, so the largest one is how far they can be apart.
    assert max(sent) - min(sent) <= 2 * 96 * 48


def test_stages_send_at_the_same_time():
    model_json = MODELS["dense"] | {"num_hidden_layers": 8}
    holdings, _ = build_trainer(model_json, draw_tensors(model_json), tp=1, pp=4, dp=1)
    plan = build_plan(
        holdings, parts_of(model_json, 1, 1), [4], element_bytes=2, bucket_bytes=120_000
    )
    assert len(plan.sends) > 2
    assert sum(len(bucket) >= 3 for bucket in plan.sends) > len(plan.sends) / 2


def test_a_rank_that_holds_what_it_takes_sends_nothing():
    # A vocabulary that vLLM does not pad, and so cuts where Megatron does.
    model_json = MODELS["dense"] | {"vocab_size": 128}
    holdings, _ = build_trainer(model_json, draw_tensors(model_json), tp=2, pp=1, dp=2)
    for index, receivers in enumerate([[0, 1], [2, 3]]):
        plan = build_plan(
            holdings,
            parts_of(model_json, 2, 1),
            receivers,
            element_bytes=2,
            bucket_bytes=1 << 20,
            turn=index,
        )
        assert [plan.count_received_bytes(r) for r in receivers] == [0, 0]


def test_a_tensor_that_nobody_holds_is_named():
    part = Part("model.other.weight", (4, 4), Region(0, 2, 0, 4))
    with pytest.raises(ValueError, match=r"model\.other\.weight: .* hold 0 of these 8 elements"):
        build_plan([[]], [[[part]]], [1], element_bytes=2, bucket_bytes=100)
