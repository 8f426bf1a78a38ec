from megatron_stapo.rollout import compute_request_seed


def test_the_seed_is_the_same_in_every_process():
    assert compute_request_seed(seed=0, policy_version=3, prompt_id=17) == 1358120980


def test_every_part_of_the_key_counts():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 10), (0, 11, 0), (1, 1, 0)]
    seeds = [compute_request_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**31 for seed in seeds)
