"""The penalty on responses that come close to the length limit."""


def compute_overlong_penalty(
    num_tokens: int, max_response_tokens: int, buffer_tokens: int
) -> float:
    """Penalty that is added to a response's reward.

    Args:
        num_tokens: length of the response, tokens.
        max_response_tokens: L_max, the limit that the response was sampled under.
        buffer_tokens: L_cache, the last tokens before the limit, over which the penalty grows.

    Returns:
        Reward units: 0 up to L_max - L_cache tokens, then linearly down to -1 at L_max and beyond.
        Always 0 without a buffer.

    Source: DAPO, arXiv:2503.14476, equation 13.
    """
    if buffer_tokens == 0:
        return 0.0
    num_tokens_left = max_response_tokens - buffer_tokens - num_tokens
    return min(0.0, max(-1.0, num_tokens_left / buffer_tokens))
