"""Which rank is where: named axes, pipeline stages, and the process groups that follow from them.

The arithmetic (``grid``) is made of sizes alone; only ``process_groups`` knows torch.distributed.
May import: ``user_input``, ``config``.
"""
