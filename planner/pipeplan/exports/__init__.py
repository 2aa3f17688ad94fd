"""Plans for other trainers: torch.distributed.pipelining, torchtitan, Megatron-LM, DeepSpeed and more.

Each target is one module that says what the trainer can express and writes its files. The other modules describe a
plan in a trainer's terms: uniform degrees, module stacks, chains of layers, and orders of microbatches.
"""

TARGET_NAMES = ("deepspeed", "diffusion-pipe", "megatron", "torch-pipelining", "torchtitan")
"""Names of the targets. Each is the name of a module with a `TARGET`, which is imported on demand."""
