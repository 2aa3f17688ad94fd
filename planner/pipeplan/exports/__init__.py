"""Plans for other trainers: torch.distributed.pipelining, torchtitan, Megatron-LM, DeepSpeed and more.

Each target is one module, which knows what its trainer can express and writes the trainer's files. The other modules
describe a plan in a trainer's terms: uniform degrees, module stacks, chains of layers, and orders of microbatches.
"""

TARGET_NAMES = ("deepspeed", "diffusion-pipe", "megatron", "torch-pipelining", "torchtitan")
"""Names of the targets. Each is the name of a module with a `TARGET`, which is imported on demand."""
