"""A step of a transformer known by its dimensions alone, under the plans of Megatron, FSDP and DeepSpeed."""
