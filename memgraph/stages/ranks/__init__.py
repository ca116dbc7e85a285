"""The ranks of a pipeline, and what they send to each other.

stage_group.py: the ranks, and the errors of one of them
messages.py: values between stages
machine.py: how long messages take, and copies to the disks of all ranks
"""
