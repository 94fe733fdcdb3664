"""Context parallelism: attention over a sequence whose tokens are distributed over ranks.

`qflash.parallel.torch` is for processes of torch.distributed, `qflash.parallel.jax` for shard_map. Both are imported by
name, so this module imports no framework.

placement   which tokens a rank has                   words   what each strategy can and cannot express
pieces      a step as calls of attention on slices    wire    what a ring transfers
parts       these calls with their arrays             model   the time of a layer on many GPUs
torch       process groups: ring, all_gather, ulysses jax     the same on an axis of a mesh
"""
