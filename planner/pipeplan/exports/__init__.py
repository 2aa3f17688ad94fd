"""Exports plans to other trainers, as files that these read.

target      the interface of a target, and the list of targets
aim         planning within the limits of a target
written     writing the files of a target
deepspeed, megatron, torch_pipelining, torchtitan
            the targets: which plans each can express, and its files

degrees     a plan as a uniform grid: stages, replicas, microbatches
servers     the servers and devices of a grid
run         the torchrun commands for a grid
boundaries  the cuts that can be described by naming a module
chain       plans whose stages pass tensors to the next stage only
stacks      a model as a list of equal blocks between an embedding and a head
chains      a model as a list of layers, each of which reads only the one before
orders      the order of forward and backward passes
flight      the cost of a trainer's own number of microbatches in flight
header      the comment at the head of every file
python      literals in generated Python
"""
