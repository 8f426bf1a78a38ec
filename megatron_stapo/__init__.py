"""megatron_stapo: STAPO reinforcement learning with verifiable rewards on Megatron-Core."""
